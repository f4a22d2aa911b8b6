"""Marks tests, and parameters of a test, for the slow run only."""

import collections
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One more parameter, or several of one test, for the slow run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def leave_few_quick(items: Iterable[pytest.Item]) -> None:
    """Where a test is marked `quick(n)`, all but its first n parameters are of the slow run."""
    left: collections.Counter[str] = collections.Counter()
    for item in items:
        marker = item.get_closest_marker("quick")
        if marker is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.split("[")[0]
        left[test] += 1
        if left[test] > marker.args[0]:
            item.add_marker(pytest.mark.slow)
