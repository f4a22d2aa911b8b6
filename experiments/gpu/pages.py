"""Writes what the committed records of GPUs say: `python -m experiments.gpu.pages`.

It writes the file from which the package chooses kernels, if it has rows, the tables of
docs/kernels.md, and, on every page that has it, the sentence about the devices that are measured.
Records are the folders `experiments/records/gpu*`. Of two records of one kind of device, the later
one counts.
"""

import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu.__main__ import ROOT
from pallas_kernels import _measurements
from pallas_kernels.benchmark.goals import Measurement, measured_rows, read
from pallas_kernels.benchmark.ops import SIZES, TIMES
from pallas_kernels.benchmark.record import METRICS, Record

DISPATCH = "pallas_kernels/measured.jsonl"
TABLES = "docs/kernels.md"
PAGES = (
    "README.md",
    "docs/answer/page.html",
    "docs/kernels.md",
    "docs/results.md",
    "docs/which_method.md",
)
NONE = "No GPU or TPU has been measured."


def records(root: Path) -> dict[str, Record]:
    """The records by kind of device, without rehearsals."""
    every = [Record(path.parent) for path in root.glob(f"experiments/records/gpu*/{METRICS}")]
    found = [record for record in every if not record.config["rehearse"]]
    # The later one replaces another of its kind.
    return {record.config["device"]: record for record in sorted(found, key=_date)}


def _date(record: Record) -> str:
    (*_, last) = (line["date"] for line in record.lines() if line["kind"] == "session")
    date: str = last[:10]
    return date


def sentence(found: dict[str, Record]) -> str:
    """Which devices are measured."""
    if not found:
        return NONE
    each = [f"{kind}: measured on {_date(record)}" for kind, record in sorted(found.items())]
    return "; ".join([*each, "no TPU has been measured."])


def dispatch(found: dict[str, Record]) -> list[Any]:
    """The rows from which the package chooses kernels.

    An op that was not timed at the smallest size keeps the assumption: below the sizes of its rows
    the reference would run.
    """
    rows = []
    for kind, record in sorted(found.items()):
        measurements = read(record.results(TIMES))
        whole = {m.row.label for m in measurements if m.size <= min(SIZES["other"])}
        counted = [m for m in measurements if m.row.label in whole]
        rows += measured_rows(counted, kind, record.folder.name)
    return rows


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _size(size: int) -> str:
    power = size.bit_length() - 1
    return f"2^{power}" if size == 2**power else f"{size:,}"


def _share(measurement: Measurement | None) -> str:
    return "" if measurement is None else f"{measurement.share_of_copy:.0%}"


def _times(found: dict[str, Record]) -> str:
    rows = []
    for kind, record in found.items():
        lines = [one for one in record.results(["times"]) if one["kind"] == "time"]
        by_call: dict[tuple[str, int], dict[str, Measurement]] = {}
        for m in read(lines):
            by_call.setdefault((m.row.label, m.size), {})[m.implementation] = m
        peaks = [one.get("published_bytes_per_second") or 0.0 for one in lines]
        for (label, size), timed in by_call.items():
            own = [m for name, m in timed.items() if name not in ("copy", "torch")]
            if not own:
                continue
            best = min(own, key=lambda m: m.seconds)
            bandwidth = best.row.traffic(size) / best.seconds
            kernel = next((m for m in own if m.implementation != "reference"), None)
            rows.append(
                (
                    *(kind, label, _size(size), f"{1e6 * best.seconds:,.1f}"),
                    *map(_share, (timed.get("reference"), kernel, timed.get("torch"))),
                    f"{bandwidth / max(peaks):.0%}" if max(peaks) else "",
                )
            )
    head = ("device", "op", "coordinates", "fastest of ours, µs", "XLA's fusion", "kernel")
    return _table((*head, "`torch.compile`", "fastest, of the published peak"), rows)


def _checks(found: dict[str, Record]) -> str:
    lines = []
    for kind, record in found.items():
        checks = record.results(["right"])
        bad = [one for one in checks if one["kind"] != "check" or one["wrong"]]
        lines.append(f"{kind}: {len(checks) - len(bad)} comparisons with the reference are right.")
        for one in bad:
            what = f"{one['label']}, {one['implementation']}, {_size(one['size'])}"
            lines.append(f"- **Not right**: {what}: {one.get('wrong') or one['reason']}.")
    return "\n".join(lines) + "\n"


def _codecs(found: dict[str, Record]) -> str:
    rows = [
        (
            *(kind, f"`{one['method']}`", one["model"]),
            f"{1e3 * one['per_coordinate'] * one['coordinates']:.3f}",
            f"{1e9 * one['per_coordinate']:.4f}",
        )
        for kind, record in found.items()
        for one in record.results(["codecs"])
        if one["kind"] == "codec"
    ]
    return _table(("device", "method", "gradients of", "ms", "ns per coordinate"), rows)


def _steps(found: dict[str, Record]) -> str:
    rows = [
        (
            *(kind, f"`{one['method']}`", f"{one['rows']}"),
            f"{1e3 * statistics.median(one['seconds']):.2f}",
            f"{one['share']:.1%}" + ("" if one.get("encodes", True) else ", not encoded"),
        )
        for kind, record in found.items()
        for one in record.results(["step"])
        if one["kind"] == "step"
    ]
    return _table(("device", "method", "rows of 1024 words", "ms a step", "share of codec"), rows)


def _power_sgd(found: dict[str, Record]) -> str:
    rows = [
        (
            *(kind, one["model"], f"{one['rank']}", one["library"]),
            f"{1e3 * statistics.median(one['seconds']):.3f}",
        )
        for kind, record in found.items()
        for one in record.results(["power_sgd"])
        if one["kind"] == "power_sgd"
    ]
    return _table(("device", "gradients of", "rank", "library", "ms"), rows)


def tables(found: dict[str, Record]) -> str:
    """The tables of docs/kernels.md."""
    if not found:
        return f"{NONE} The tables come here from the first record.\n"
    return "\n".join(
        (
            _checks(found),
            "Shares are bytes that the op has to move, per second, over those of a copy.\n",
            _times(found),
            "Encoding and decoding of all gradients of a model, one worker:\n",
            _codecs(found),
            "A training step of a transformer of 125 million parameters in bfloat16, one device:\n",
            _steps(found),
            "`power_sgd` beside PyTorch's `powerSGD_hook`, one process:\n",
            _power_sgd(found),
        )
    )


def between(text: str, marker: str, content: str) -> str:
    """The text with other content between its markers.

    Raises:
      ValueError: If it has no such markers.
    """
    pattern = rf"(<!-- {marker} -->).*?(<!-- /{marker} -->)"
    replaced, number = re.subn(pattern, lambda m: m[1] + content + m[2], text, flags=re.DOTALL)
    if not number:
        raise ValueError(f"There is no <!-- {marker} --> ... <!-- /{marker} -->.")
    return replaced


def texts(root: Path, found: dict[str, Record]) -> dict[str, str]:
    """What the pages must be, by path."""
    said = {}
    for page in PAGES:
        strong = "<strong>{}</strong>" if page.endswith(".html") else "**{}**"
        text = (root / page).read_text(encoding="utf-8")
        said[page] = between(text, "devices", strong.format(sentence(found)))
    said[TABLES] = between(said[TABLES], "tables", f"\n\n{tables(found)}\n")
    return said


def write(root: Path) -> list[str]:
    """Writes all of it; returns the paths that changed."""
    found = records(root)
    files = [root / path for path in (*PAGES, DISPATCH)]
    before = [file.read_bytes() if file.exists() else None for file in files]
    for path, text in texts(root, found).items():
        (root / path).write_text(text, encoding="utf-8")
    if rows := dispatch(found):
        _measurements.write(root / DISPATCH, rows)
    else:
        (root / DISPATCH).unlink(missing_ok=True)
    after = [file.read_bytes() if file.exists() else None for file in files]
    pairs = zip((*PAGES, DISPATCH), before, after, strict=True)
    return [path for path, old, new in pairs if old != new]


if __name__ == "__main__":
    print(*write(ROOT) or ["nothing changed"], sep="\n")
    sys.exit()
