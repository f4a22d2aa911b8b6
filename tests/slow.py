"""Marks parameters of a test for `make test-all` only."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One more parameter, or several of one test, that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
