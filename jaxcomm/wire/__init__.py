"""Counts the bytes that a program sends, and reads what a compiled one computes meanwhile."""

from jaxcomm.wire._account import Account, account
from jaxcomm.wire._collective import Collective
from jaxcomm.wire._overlap import Overlap, OverlapReport, overlap_report

__all__ = ["Account", "Collective", "Overlap", "OverlapReport", "account", "overlap_report"]
