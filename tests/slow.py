"""Marks parameters of a test for the slow run only."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One more parameter, or several of one test, for the slow run."""
    return pytest.param(*values, marks=pytest.mark.slow)
