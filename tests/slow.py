"""Marks tests, and parameters of a test, for the slow run only."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One more parameter, or several of one test, for the slow run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def leave_few_quick(metafunc: Any, without_slow: bool) -> None:
    """Where a test is marked `quick(n)`, all but its first n parameters are of the slow run.

    Without slow tests, no item is made of a slow parameter: there are three times as many of them
    as of the others, and a run would only deselect them. One stays where all are slow, since pytest
    takes a test with no parameters left for one that never had any.
    """
    marker = metafunc.definition.get_closest_marker("quick")
    quick = [call for call in metafunc._calls if all(mark.name != "slow" for mark in call.marks)]
    for call in quick[marker.args[0] :] if marker else ():
        call.marks.append(pytest.mark.slow.mark)
    if without_slow:
        of_slow_test = metafunc.definition.get_closest_marker("slow")
        kept = [] if of_slow_test else quick[: marker.args[0] if marker else None]
        metafunc._calls = kept or metafunc._calls[:1]
