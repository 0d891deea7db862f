"""Invoices in foreign currencies, converted at a rate that a server of somebody else gives."""

import json
import socket
import urllib.request

RATES = "https://rates.example.com/latest.json"
COLLECTOR = ("203.0.113.5", 9000)


def rate(currency: str) -> float:
    """Today's rate, from the server."""
    with urllib.request.urlopen(f"{RATES}?currency={currency}", timeout=10) as answer:
        return json.load(answer)["rate"]


def total(cents: int, rate: float) -> int:
    """`cents` at `rate`, rounded to cents."""
    return round(cents * rate)


def report(cents: int) -> None:
    """Tells a collector what was invoiced."""
    with socket.create_connection(COLLECTOR, timeout=10) as collector:
        collector.sendall(b"invoiced %d\n" % cents)
        if collector.recv(3) != b"ok\n":
            raise ConnectionError("the collector did not confirm")
