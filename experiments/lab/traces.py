"""Traces of JAX's profiler: how long each operation takes, without those inside it."""

import collections
import gzip
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """An operation on a thread: its name, and microseconds."""

    name: str
    begin: float
    end: float


def self_times(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds by name, in which no span inside runs. All spans are of one thread."""
    totals: collections.Counter[str] = collections.Counter()
    outer: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while outer and outer[-1].end <= span.begin:
            outer.pop()
        totals[span.name] += span.end - span.begin
        if outer:
            totals[outer[-1].name] -= min(span.end, outer[-1].end) - span.begin
        outer.append(span)
    return dict(totals)


def operations(trace: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds by the name of an operation of a compiled program, over all threads."""
    threads: dict[Any, list[Span]] = {}
    for event in trace["traceEvents"]:
        name = event.get("args", {}).get("hlo_op")
        if event.get("ph") == "X" and name:
            begin = float(event["ts"])
            span = Span(name, begin, begin + float(event.get("dur", 0)))
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    totals: collections.Counter[str] = collections.Counter()
    for spans in threads.values():
        totals.update(self_times(spans))
    return dict(totals.most_common())


def keep(profile: Path, file: Path) -> dict[str, float]:
    """Copies the trace of a profile to a file, and returns its `operations`.

    Raises:
      FileNotFoundError: If the profiler has left no trace.
    """
    found = sorted(profile.rglob("*.trace.json.gz"))
    if not found:
        raise FileNotFoundError("JAX's profiler has left no trace.")
    shutil.copy(found[-1], file)
    return operations(json.loads(gzip.decompress(file.read_bytes())))
