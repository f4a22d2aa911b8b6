"""Counts the bytes that a program sends."""

from jaxcomm.wire._account import Account, account
from jaxcomm.wire._collective import Collective

__all__ = ["Account", "Collective", "account"]
