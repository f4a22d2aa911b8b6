"""A plugin: a test may be skipped for what a machine lacks, and for nothing else.

The reason that a test gives begins with one of `REASONS`; any other skip is a failure.
"""

import itertools
from collections.abc import Generator
from typing import Any

import pytest

REASONS = (
    "no GPU",
    "no libtpu",
    "no CUDA compiler",
    "no PyTorch",
    "no root or no tc",
    "not Linux",
    "no checkout",
    "no Ray",
    "this JAX",
)


def reason_of(report: Any) -> str | None:
    """Which of the reasons a report names; "another", or None if it reports no skip."""
    if not (report.skipped and isinstance(report.longrepr, tuple)):
        return None
    given = str(report.longrepr[2]).removeprefix("Skipped: ")
    return next((reason for reason in REASONS if given.startswith(reason)), "another")


def refuse_others(report: Any) -> Any:
    """The report, failed if it reports a skip for another reason."""
    if reason_of(report) == "another":
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr[2]}\n  is not one of the reasons in tests/skips.py."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return refuse_others((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return refuse_others((yield))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts the skips by reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason in REASONS:
        ids = sorted(report.nodeid for report in skipped if reason_of(report) == reason)
        if ids:
            terminalreporter.section(f"{len(ids)} skipped: {reason}")
        for file, of_file in itertools.groupby(ids, lambda each: each.split("::")[0]):
            rest = [each.partition("::")[2] for each in of_file]
            terminalreporter.line(f"{len(rest):5} of {file}: {rest[0]} ... {rest[-1]}")
