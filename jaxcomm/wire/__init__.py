"""Counts the bytes that a program sends, and reads what a compiled one computes meanwhile."""

from jaxcomm.wire._account import account
from jaxcomm.wire._overlap import overlap_report

__all__ = ["account", "overlap_report"]
