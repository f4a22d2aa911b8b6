"""Bytes, counted in the program that sends them."""

from jaxcomm.wire._account import Account, Collective, account

__all__ = ["Account", "Collective", "account"]
