"""Writes docs/methods.md from the catalogue: `python -m tests.cases.page`.

The text is docs/methods.md.in, in which a line such as `{{MEANS}}` is the place of a table. What
workers keep in gossip and in local steps is the claim of their rows.
"""

import functools
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import jaxcomm
from jaxcomm import compression, gossip
from jaxcomm.catalogue import CLAIMS, METHODS, Method
from jaxcomm.compression import feedback, low_rank, quantizers, sketches, sparsifiers
from jaxcomm.gossip import ring
from tests.cases._gossip import GOSSIP
from tests.cases._local import LOCAL, RECIPES
from tests.cases._quantized import most_levels

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE, TEMPLATE = DOCS / "methods.md", DOCS / "methods.md.in"
GOSSIP_ROWS = {case.name: case for case in GOSSIP}
LOCAL_ROWS = {case.name: case for case in [*LOCAL, *RECIPES]}
LOCAL_ROWS["local_sgd_post_local"] = LOCAL_ROWS["local_sgd"]  # With another period.


def printed(kind: str) -> list[Method]:
    """The methods of a kind that have a line of their own."""
    return [method for method in METHODS.values() if method.kind == kind and not method.like]


def error(method: Method) -> str:
    """The bound of the variance for a sum of squares of 1, or the contraction of the codec."""
    formula, _, text = method.error.partition("; ")
    if not formula:
        return ""
    cell = formula if method.is_unbiased else f"δ = {formula}"
    return f"{cell}; {text}" if text else cell


def table(header: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {header} |"
    yield "|" + "---|" * (header.count("|") + 1)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def code(method: Method) -> str:
    return f"`{method.call}`{method.suffix}"


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
    means = [
        (code(x), CLAIMS[x.claim] + x.note, error(x), x.bytes, x.paper) for x in printed("mean")
    ]
    neighbors = []
    for method in printed("gossip"):
        row = GOSSIP_ROWS[method.name]
        keeps = "sums, also of push-sum weights" if row.sums else "mean"
        converges = method.note or ("the optimum" if row.corrects else "near the optimum")
        absent = "yes" if row.absence else "no"
        neighbors.append((code(method), keeps, converges, absent, method.bytes, method.paper))
    local = []
    for method in printed("local"):
        case = LOCAL_ROWS[method.name]
        own = "exact mean" if case.neutral else "its codec"
        by = "any aggregator" if case.aggregates else own
        local.append((code(method), method.bytes, by, "yes" if case.agree else "no", method.paper))
    return {
        "MEANS": [
            *table("method | result | error | bytes | paper", means),
        ],
        "GOSSIP": [
            *table(
                "method | preserved | converges to, if data differ | `present=` | bytes | paper",
                neighbors,
            )
        ],
        "LOCAL": [
            *table(
                "method | what an exchange averages | averaged by | equal afterwards | paper",
                local,
            )
        ],
        "AROUND": [
            *table("wrapper | bytes", [(code(x), x.bytes) for x in printed("wrapper")]),
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
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in text.split("\n"))


def wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_on_hyphens=False)


@functools.cache
def names(size: int) -> dict[str, Any]:
    """What the page defines before its lines, at `size` coordinates, and what variants need."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block.count("n, d = 8, 10_000 ") == 1
    given = {name: getattr(compression, name) for name in compression.__all__}
    given |= {name: getattr(feedback, name) for name in feedback.__all__}
    given["low_rank"] = low_rank
    given["directed"] = METHODS["sgp_directed"].graph(8)
    exec(block.replace("n, d = 8, 10_000 ", f"n, d = 8, {size} "), given)
    return given


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
