"""Records each test that ends, so that another run goes on where this one stopped.

A line of the file is a test: its name, outcome, why it was skipped, its wall, user and system
seconds (child processes included), and the commit. What passed, or was skipped, is not run again.
"""

import collections
import json
import os
import pathlib
import subprocess
import time
from typing import Any

import pytest

from tests import skips

ROOT = pathlib.Path(__file__).parents[1]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def whole_lines(file: pathlib.Path) -> list[dict[str, Any]]:
    """What a file of JSON lines holds; half a line, of a run that was killed, is cut off."""
    text = file.read_bytes() if file.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        file.write_bytes(whole)
    return [*map(json.loads, whole.splitlines())]


def folder_of(test: str) -> str:
    """`tests/laws`, or `jaxcomm` of a docstring's example."""
    parts = pathlib.PurePosixPath(test.split("::")[0]).parts
    return "/".join(parts[: 2 if parts[:1] == ("tests",) and len(parts) > 2 else 1])


class Resume:
    """A plugin of pytest, and of pytest-xdist's controller and workers.

    Args:
      config: pytest's.
      file: What was recorded; it is appended to.
    """

    def __init__(self, config: pytest.Config, file: pathlib.Path) -> None:
        self.file = file
        self.of_worker = getattr(config, "workerinput", None)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.lines: dict[str, dict[str, Any]] = {}
        if self.of_worker is None:
            self.lines = {line["test"]: line for line in whole_lines(file)}
            done = [name for name, line in self.lines.items() if line["outcome"] != "failed"]
        else:  # Also one that replaces another collects what the run began with.
            done = self.of_worker["done"]
        self.done = {*done}
        self.left = 0
        self.commit = "" if self.of_worker else _commit()
        self.phases: dict[str, list[pytest.TestReport]] = collections.defaultdict(list)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["done"] = [*self.done]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for item in items:  # Before pytest-xdist appends the names of groups.
            item.user_properties.append(("test", item.nodeid))
        done = [item for item in items if item.nodeid in self.done]
        items[:] = [item for item in items if item.nodeid not in self.done]
        config.hook.pytest_deselected(items=done)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.begun = (time.perf_counter(), *os.times()[:4])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            now = (time.perf_counter(), *os.times()[:4])
            wall, user, system, *of_children = (b - a for a, b in zip(self.begun, now, strict=True))
            spent = (wall, user + of_children[0], system + of_children[1])
            item.user_properties.append(("spent", spent))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.of_worker is not None:
            return
        phases = self.phases[report.nodeid]
        phases.append(report)
        if report.when in ("setup", "call"):  # Neither the last phase, nor a worker's crash.
            return
        del self.phases[report.nodeid]
        properties = dict(report.user_properties)
        reason = next(filter(None, map(skips.reason_of, phases)), None)
        if reason == skips.TIME:
            self.left += 1
            return
        outcome = "skipped" if reason else "passed"
        line = {
            "test": properties.get("test", report.nodeid),
            "outcome": "failed" if any(phase.failed for phase in phases) else outcome,
            "reason": reason,
            "spent": [round(seconds, 3) for seconds in properties.get("spent", ())],
            "commit": self.commit,
        }
        self.lines[line["test"]] = line
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.of_worker is None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """All that the file knows: counts and seconds by folder, skips by reason, failures."""
        lines = list(self.lines.values())
        outcomes = collections.Counter(line["outcome"] for line in lines)
        terminalreporter.section(f"all tests that are recorded in {self.file}")
        heads = ("passed", "failed", "skipped", "wall", "user", "system")
        row = "{:30}" + "{:>9}" * 3 + "{:>9}" * 3
        terminalreporter.line(row.format("folder", *heads))
        for folder in [*sorted({folder_of(line["test"]) for line in lines}), "all"]:
            of_folder = [x for x in lines if folder in ("all", folder_of(x["test"]))]
            counts = collections.Counter(line["outcome"] for line in of_folder)
            spent = [line["spent"] for line in of_folder if line["spent"]]
            seconds = [f"{sum(each):.0f}" for each in zip(*spent, strict=True)] or [""] * 3
            terminalreporter.line(row.format(folder, *(counts[h] for h in heads[:3]), *seconds))
        for reason, count in collections.Counter(line["reason"] for line in lines).items():
            if reason:
                terminalreporter.line(f"{count} skipped: {reason}")
        for commit, count in collections.Counter(line["commit"] for line in lines).items():
            terminalreporter.line(f"{count} at {commit}")
        for line in lines:
            if line["outcome"] == "failed":
                terminalreporter.line(f"FAILED {line['test']}")
        terminalreporter.line(f"{self.left} left, {outcomes['failed']} failed")
