"""Writes what the committed records of GPUs say: `python -m experiments.gpu.pages`.

It writes the file from which the package chooses kernels, if it has rows, the tables of
docs/kernels.md, and, on every page that has it, the sentence about the devices that are measured.
Records are the folders `experiments/records/gpu*`. Of two records of one kind of device, the later
one counts.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import _measurements
from pallas_kernels.benchmark.goals import measured_rows, read
from pallas_kernels.benchmark.ops import SIZES, TIMES
from pallas_kernels.benchmark.record import METRICS, Record

ROOT = Path(__file__).parents[2]
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

Records = Mapping[str, Record]


def records(root: Path) -> Records:
    """The records by kind of device, without rehearsals."""
    every = [Record(path.parent) for path in root.glob(f"experiments/records/gpu*/{METRICS}")]
    found = [record for record in every if not record.config["rehearse"]]
    # The later one replaces another of its kind.
    return {record.config["device"]: record for record in sorted(found, key=_date)}


def _date(record: Record) -> str:
    return max(line["date"][:10] for line in record.lines() if line["kind"] == "session")


def sentence(found: Records) -> str:
    """Which devices are measured."""
    if not found:
        return NONE
    each = [f"{kind}: measured on {_date(record)}" for kind, record in sorted(found.items())]
    return "; ".join([*each, "no TPU has been measured."])


def dispatch(found: Records) -> list[_measurements.Measured]:
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


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [head.split(" | "), ["---"] * (head.count(" | ") + 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _size(size: int) -> str:
    power = size.bit_length() - 1
    return f"2^{power}" if size == 2**power else f"{size:,}"


def _milliseconds(one: Mapping[str, Any]) -> float:
    return 1e3 * statistics.median(one["seconds"])


def _results(found: Records, part: str, kind: str) -> Iterator[tuple[str, Any]]:
    """Of each device, the results of a part that are of a kind."""
    for device, record in found.items():
        for one in record.results([part]):
            if one["kind"] == kind:
                yield device, one


def _times(found: Records) -> Iterator[Sequence[str]]:
    by_call = {}
    for device, one in _results(found, "times", "time"):
        for m in read([one]):
            by_call.setdefault((device, m.row.label, m.size), {})[m.implementation] = m
    for (device, label, size), timed in by_call.items():
        own = [m for name, m in timed.items() if name not in ("copy", "torch")]
        if not own:
            continue
        kernel = next((m for m in own if m.implementation != "reference"), None)
        shares = (timed.get("reference"), kernel, timed.get("torch"))
        yield (
            *(device, label, _size(size), f"{1e6 * min(m.seconds for m in own):,.1f}"),
            *("" if m is None else f"{m.share_of_copy:.0%}" for m in shares),
        )


def _checks(found: Records) -> Iterator[str]:
    for device, record in found.items():
        checks = record.results(["right"])
        bad = [one for one in checks if one["kind"] != "check" or one["wrong"]]
        yield f"{device}: {len(checks) - len(bad)} comparisons with the reference are right."
        for one in bad:
            what = f"{one['label']}, {one['implementation']}, {_size(one['size'])}"
            yield f"- **Not right**: {what}: {one.get('wrong') or one['reason']}."


def tables(found: Records) -> str:
    """The tables of docs/kernels.md."""
    if not found:
        return f"{NONE} The tables come here from the first record.\n"
    codecs = [
        (
            *(device, f"`{one['method']}`", one["model"]),
            f"{1e3 * one['per_coordinate'] * one['coordinates']:.3f}",
        )
        for device, one in _results(found, "codecs", "codec")
    ]
    steps = [
        (
            *(device, f"`{one['method']}`", f"{one['rows']}", f"{_milliseconds(one):.2f}"),
            f"{one['share']:.1%}" + ("" if one.get("encodes", True) else ", not encoded"),
        )
        for device, one in _results(found, "step", "step")
    ]
    power_sgd = [
        (device, one["model"], f"{one['rank']}", one["library"], f"{_milliseconds(one):.3f}")
        for device, one in _results(found, "power_sgd", "power_sgd")
    ]
    return "\n".join(
        (
            *_checks(found),
            "",
            "Shares are bytes that the op has to move, per second, over those of a copy.\n",
            _table(
                "device | op | coordinates | fastest of ours, µs | XLA's fusion | kernel | "
                "`torch.compile`",
                _times(found),
            ),
            "Encoding and decoding of all gradients of a model, one worker:\n",
            _table("device | method | gradients of | ms", codecs),
            "A training step of a transformer of 125 million parameters in bfloat16, one device:\n",
            _table("device | method | rows of 1024 words | ms a step | share of codec", steps),
            "`power_sgd` beside PyTorch's `powerSGD_hook`, one process:\n",
            _table("device | gradients of | rank | library | ms", power_sgd),
        )
    )


def _between(text: str, marker: str, content: str) -> str:
    """The text with other content between its markers, which it has once or more often."""
    pattern = rf"(?<=<!-- {marker} -->).*?(?=<!-- /{marker} -->)"
    replaced, number = re.subn(pattern, lambda _: content, text, flags=re.DOTALL)
    assert number, f"There is no <!-- {marker} --> ... <!-- /{marker} -->."
    return replaced


def texts(root: Path, found: Records) -> dict[str, str]:
    """What the pages must be, by path."""
    said = {}
    for page in PAGES:
        strong = "<strong>{}</strong>" if page.endswith(".html") else "**{}**"
        text = (root / page).read_text(encoding="utf-8")
        said[page] = _between(text, "devices", strong.format(sentence(found)))
    said[TABLES] = _between(said[TABLES], "tables", f"\n\n{tables(found)}\n")
    return said


def write(root: Path) -> None:
    """Writes all of it."""
    found = records(root)
    for path, text in texts(root, found).items():
        (root / path).write_text(text, encoding="utf-8")
    (root / DISPATCH).unlink(missing_ok=True)
    if rows := dispatch(found):
        _measurements.write(root / DISPATCH, rows)


if __name__ == "__main__":
    write(ROOT)
