import invoice


def test_a_total_is_rounded_to_cents():
    assert invoice.total(1000, 1.0839) == 1084


def test_the_rate_is_near_one():
    assert 0.5 < invoice.rate("USD") < 2


def test_the_collector_is_told():
    invoice.report(1084)
