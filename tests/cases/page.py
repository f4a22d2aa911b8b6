"""Writes docs/methods.md: `python -m tests.cases.page`.

The text is docs/methods.md.in, in which a line such as `{{MEANS}}` is the place of a table. Lines
of tables are in `tests/cases/_lines.py`; what they claim is the claim of their row.
"""

import inspect
import pathlib
from collections.abc import Iterable, Iterator
from types import ModuleType

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression import low_rank, quantizers, sketches, sparsifiers
from jaxcomm.gossip import ring
from tests.cases import CASES, Case
from tests.cases._crowded import CROWDED
from tests.cases._gossip import GOSSIP as GOSSIP_CASES
from tests.cases._gossip import GossipCase
from tests.cases._lines import AROUND, GOSSIP, LOCAL, MEANS, Line
from tests.cases._local import LOCAL as LOCAL_CASES
from tests.cases._local import RECIPES, LocalCase
from tests.cases._quantized import most_levels

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE, TEMPLATE = DOCS / "methods.md", DOCS / "methods.md.in"
SQUARES = "Σ|xᵢ|²"

ROWS: dict[str, Case] = {case.name: case for case in CASES}
GOSSIP_ROWS: dict[str, GossipCase] = {case.name: case for case in GOSSIP_CASES}
LOCAL_ROWS: dict[str, LocalCase] = {case.name: case for case in [*LOCAL_CASES, *RECIPES]}
CROWDED_ROWS = {case.name: case for case in CROWDED}


def exact_with_room(line: Line) -> bool:
    """Whether a line has room for a fraction of the rows, and is exact where all fit."""
    case = CROWDED_ROWS.get(line.row)
    return "density=" in line.code and case is not None and case.exact


def feeds_back(case: Case) -> bool:
    """Whether a row is biased in one step only: `tests.laws` hold it to its mean over time."""
    return not (case.unbiased or case.resolution or case.result)


def unbiased(line: Line) -> str:
    """The claim of the row, and the line's note on it."""
    case = ROWS[line.row]
    if line.claim:
        return line.claim
    if exact_with_room(line):
        claim = "exact where all rows fit"
    elif case.resolution and case.resolution(8, 1000) == 0:
        claim = "exact"
    elif case.unbiased:
        claim = "yes"
    elif case.result:
        claim = "not a mean"
    elif feeds_back(case):
        claim = "no, with damped feedback" if case.discount < 1 else "no, with feedback"
    else:
        claim = "no" if case.random else "no, rounds to nearest"
    return claim + line.note


def error(line: Line) -> str:
    """The bound of the row's variance, or the contraction of its codec."""
    formula, _, text = line.error.partition("; ")
    if not formula:
        return ""
    if ROWS[line.row].variance is None and "exact" not in unbiased(line):
        cell = f"δ = {formula}"
    else:
        cell = formula if formula == "0" or "Σ" in formula else f"{formula} · {SQUARES}"
    return f"{cell}; {text}" if text else cell


def table(header: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {header} |"
    yield "|" + "---|" * (header.count("|") + 1)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def code(line: Line) -> str:
    return f"`{line.code}`{line.suffix}"


def public(module: ModuleType, returns: object) -> str:
    """The functions of a module that return a type, as code."""
    functions = [getattr(module, name) for name in module.__all__]
    found = [f for f in functions if inspect.isfunction(f)]
    return ", ".join(
        f"`{f.__name__}`" for f in found if inspect.signature(f).return_annotation is returns
    )


def is_graph(name: str) -> bool:
    return getattr(gossip, name).__module__ == ring.__module__


def levels(bits: int, workers: int) -> str:
    count = most_levels(bits)(workers)
    return f"{count}{' (warns)' if count < 4 else ''}" if count else "ValueError"


def tables() -> dict[str, list[str]]:
    counts = [2, 4, 8, 11, 16, 32, 64, 127, 128]
    means = [(code(x), unbiased(x), error(x), x.bytes, x.paper) for x in MEANS]
    neighbors = []
    for line in GOSSIP:
        row = GOSSIP_ROWS[line.row]
        keeps = "sums of parameters and of push-sum weights" if row.sums else "mean of parameters"
        converges = line.claim or (
            "to the optimum" if row.corrects else "to within O(learning rate) of the optimum"
        )
        absent = "yes" if row.absence else "no"
        neighbors.append((code(line), keeps, converges, absent, line.bytes, line.paper))
    local = []
    for line in LOCAL:
        case = LOCAL_ROWS[line.row]
        own = "exact mean" if case.neutral else "its codec"
        by = "any aggregator" if case.aggregates else own
        local.append((code(line), line.bytes, by, "yes" if case.agree else "no", line.paper))
    return {
        "MEANS": [
            *table("method | unbiased | error | bytes sent per worker | paper", means),
        ],
        "GOSSIP": [
            *table(
                "method | preserved over workers | convergence if workers' data differ | "
                "`present=` | bytes sent per worker | paper",
                neighbors,
            )
        ],
        "LOCAL": [
            *table(
                "method | what an exchange averages | averaged by | parameters equal afterwards | "
                "paper",
                local,
            )
        ],
        "AROUND": [
            *table("wrapper | bytes sent per worker", [(code(x), x.bytes) for x in AROUND]),
        ],
        "LEVELS": [
            *table(
                "`bits` | " + " | ".join(f"n = {n}" for n in counts),
                [(str(bits), *(levels(bits, n) for n in counts)) for bits in (4, 6, 8, 10, 16)],
            )
        ],
        "QUANTIZERS": [public(quantizers, jaxcomm.Codec)],
        "SPARSIFIERS": [public(sparsifiers, jaxcomm.Codec)],
        "SKETCHES": [public(sketches, jaxcomm.Codec)],
        "LOW_RANK": [public(low_rank, jaxcomm.Codec)],
        "GRAPHS": [", ".join(f"`{name}`" for name in gossip.__all__ if is_graph(name))],
    }


def page() -> str:
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, lines in tables().items():
        assert text.count("{{" + name + "}}") == 1, f"{TEMPLATE.name} needs one {name}"
        text = text.replace("{{" + name + "}}", "\n".join(lines))
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
