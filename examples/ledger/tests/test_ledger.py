import itertools

import pytest

from ledger import Ledger


@pytest.fixture
def ledger():
    ledger = Ledger()
    ledger.book("bank", "rent", 90_000)
    ledger.book("salary", "bank", 250_000)
    return ledger


def test_balances_follow_the_bookings(ledger):
    assert ledger.balance("bank") == 160_000
    assert ledger.balance("rent") == 90_000
    assert ledger.balance("never seen") == 0


def test_nothing_is_made_and_nothing_is_lost(ledger):
    assert sum(ledger.balance(name) for name in ledger.accounts()) == 0


@pytest.mark.parametrize("cents", [0, -1, -90_000])
def test_amounts_are_positive(ledger, cents):
    with pytest.raises(ValueError, match="positive"):
        ledger.book("bank", "rent", cents)


@pytest.mark.parametrize(("first", "second"), itertools.permutations(["bank", "rent", "salary"], 2))
def test_a_booking_can_be_undone(ledger, first, second):
    before = ledger.balance(first), ledger.balance(second)
    ledger.book(first, second, 12_345)
    ledger.book(second, first, 12_345)
    assert (ledger.balance(first), ledger.balance(second)) == before


def test_an_account_can_not_pay_itself(ledger):
    with pytest.raises(ValueError, match="itself"):
        ledger.book("bank", "bank", 1)


def test_the_statement_lists_every_account(ledger):
    lines = ledger.statement().splitlines()
    assert lines[0].split() == ["account", "balance"]
    assert [line.split() for line in lines[2:]] == [["bank", "1600.00"], ["rent", "900.00"], ["salary", "-2500.00"]]
