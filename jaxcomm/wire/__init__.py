"""Proves what a program sends: a report of its collectives, and budgets for tests."""

from jaxcomm.wire._count import account
from jaxcomm.wire._overlap import overlap_report
from jaxcomm.wire._require import WireError, require

__all__ = ["WireError", "account", "overlap_report", "require"]
