"""Times of operations in a trace, against traces made by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.lab import traces


def event(name: str, begin: float, length: float, thread: int = 0) -> dict[str, Any]:
    arguments = {"hlo_op": name, "hlo_module": "jit_step"}
    return {"ph": "X", "pid": 1, "tid": thread, "ts": begin, "dur": length, "args": arguments}


def test_operations_are_summed_over_threads(tmp_path: Path) -> None:
    events = [
        event("call", 0, 8),
        event("dot", 1, 3),
        event("dot", 2, 5, thread=1),
        {"ph": "X", "pid": 1, "tid": 0, "ts": 20, "dur": 5, "name": "host"},
        {"ph": "M", "pid": 1, "name": "thread_name", "args": {"name": "main"}},
    ]
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    (folder / "host.trace.json.gz").write_bytes(packed)
    kept = tmp_path / "kept.trace.json.gz"
    assert traces.keep(tmp_path, kept) == {"dot": 8, "call": 5}
    assert kept.read_bytes() == packed
    with pytest.raises(FileNotFoundError, match="no trace"):
        traces.keep(tmp_path / "empty", kept)
