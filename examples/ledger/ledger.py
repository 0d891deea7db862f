"""A ledger: amounts in cents, booked on accounts, printed as a statement."""

from dataclasses import dataclass, field

from tabulate import tabulate


@dataclass
class Ledger:
    """Accounts and what was booked between them. The sum over all accounts is always zero."""

    entries: list[tuple[str, str, int]] = field(default_factory=list)

    def book(self, debit: str, credit: str, cents: int) -> None:
        """Moves `cents` from the account `debit` to the account `credit`."""
        if cents <= 0:
            raise ValueError(f"an amount must be positive, not {cents}")
        if debit == credit:
            raise ValueError(f"{debit} can't pay itself")
        self.entries.append((debit, credit, cents))

    def balance(self, account: str) -> int:
        """What the account holds."""
        received = sum(cents for _, credit, cents in self.entries if credit == account)
        paid = sum(cents for debit, _, cents in self.entries if debit == account)
        return received - paid

    def accounts(self) -> list[str]:
        """Every account that was ever booked on, in order of names."""
        return sorted({name for debit, credit, _ in self.entries for name in (debit, credit)})

    def statement(self) -> str:
        """The balances as a table."""
        rows = [(name, f"{self.balance(name) / 100:.2f}") for name in self.accounts()]
        return tabulate(rows, headers=["account", "balance"], disable_numparse=True)
