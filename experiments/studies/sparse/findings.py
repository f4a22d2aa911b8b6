"""The findings of a comparison of sparse methods, in sentences."""

import math
from collections.abc import Sequence

from experiments.methods import BASELINE
from experiments.methods.sparse import ALL_GATHER, S2_METHODS
from experiments.studies.sparse.density import LeafDensity
from experiments.studies.sparse.table import Row, signed

CLAIM = 0.81
"""The fraction of the sparse communication that S2 Reducer saves, as its paper states."""

PAPER = "[The paper](https://arxiv.org/abs/2110.02140)"
UNJUDGED = f"No loss is judged, which takes `{BASELINE}` and two seeds."


def _name(rows: Sequence[Row]) -> str:
    return ", ".join(f"`{row.method}`" for row in rows) or "none"


def _cut(part: float) -> str:
    percent = 100 * (1 - part)
    return f"{abs(percent):.1f} % {'less' if percent >= 0 else 'more'}"


def _cuts(row: Row) -> str:
    against = [
        f"{_cut(part)} than {name}"
        for method, part, name in (
            (ALL_GATHER, row.all_gather_ratio, "the sparse all-gather"),
            (BASELINE, row.dense_ratio, "the dense all-reduce"),
        )
        if row.method != method and not math.isnan(part)
    ]
    return " and ".join(against) or f"{row.sparse_bytes:,.0f} bytes"


def _loss(row: Row) -> str:
    if not math.isfinite(row.test_loss):
        return "; it diverged"
    verdict = "within" if row.is_within else "not within"
    distance = f"{signed(row.difference)} standard deviations from dense, {verdict} one"
    return f"; its loss is {distance}" if _is_judged(row) else ""


def _is_judged(row: Row) -> bool:
    return not math.isnan(row.difference)


def _describe_cuts(rows: Sequence[Row]) -> list[str]:
    sentences_of_s2 = [
        f"`{row.method}` sends {_cuts(row)}{_loss(row)}."
        for row in rows
        if row.method in S2_METHODS
    ]
    return ["Of S2 Reducer, for the sparse leaves:", *sentences_of_s2] if sentences_of_s2 else []


def _describe_claim(rows: Sequence[Row], column: str, against: str) -> tuple[str, bool]:
    """Which variants save the fraction of the paper, and whether any is within a deviation."""
    cut = [row for row in rows if row.method in S2_METHODS and 1 - getattr(row, column) >= CLAIM]
    within = [row for row in cut if row.is_within]
    above = [row for row in cut if not row.is_within]
    sentence = f"Against {against} it is reached within one standard deviation by {_name(within)}"
    return sentence + (f", and at a higher loss by {_name(above)}." if above else "."), bool(within)


def _mean_capacity(leaves: Sequence[LeafDensity]) -> tuple[float, float]:
    """The mean capacities for one worker and for the union, over coordinates of sparse leaves."""
    capacities = [(leaf.capacity, math.prod(leaf.shape)) for leaf in leaves if leaf.is_sparse]
    total = sum(size for _, size in capacities)
    worker = sum(capacity.worker * size for capacity, size in capacities)
    return worker / total, sum(capacity.union * size for capacity, size in capacities) / total


def _error_of(ratio: float) -> str:
    return f"{1 / ratio:.1f} times the squared norm"


def _explain_all_gather(leaves: Sequence[LeafDensity], workers: int) -> str:
    worker, union = _mean_capacity(leaves)
    all_gather_ratio = 2 * union / (workers * worker)
    most = (1 - CLAIM) / all_gather_ratio
    return (
        f"The union of {workers} workers is {union / worker:.2f} times as dense as one worker's "
        "own "
        f"gradient. The all-gather passes on {workers - 1} payloads, a sum sends its table "
        f"{2 * (workers - 1) / workers:.2f} times; so a cell for each coordinate of the union "
        f"costs {all_gather_ratio:.2f} times the all-gather, and {100 * CLAIM:.0f} % are cut by "
        "tables "
        f"of at most {most:.2f} cells a coordinate, whose estimates have an expected error of "
        f"{_error_of(most)}."
    )


def _explain_dense(leaves: Sequence[LeafDensity]) -> str:
    _, union = _mean_capacity(leaves)
    most = (1 - CLAIM) / union
    return (
        f"The dense all-reduce sends every row, of which there is room for {100 * union:.1f} % in "
        f"the union: {100 * CLAIM:.0f} % are cut by tables of at most {most:.2f} cells a "
        "coordinate of it."
    )


def _describe_additions(rows: Sequence[Row]) -> list[str]:
    by_name = {row.method: row for row in rows}
    sentences = []
    for name, base, what in (
        ("s2_peel", "s2_mean_1", "Peeling solves for what the sketch estimates"),
        ("s2_peel_8_bits", "s2_peel", "Codes of 8 bits in place of floats"),
    ):
        row, other = by_name.get(name), by_name.get(base)
        if row is None or other is None:
            continue
        sentence = (
            f"{what}: `{name}` sends {row.sparse_bytes / other.sparse_bytes:.2f} times the bytes "
            f"of `{base}`"
        )
        if _is_judged(row):
            sentence += (
                f", and its loss is {signed(row.difference)} standard deviations from dense in "
                f"place of {signed(other.difference)}"
            )
        if not math.isnan(row.unpeeled):
            sentence += f"; {100 * row.unpeeled:.2g} % of the union were not solved for at worst"
        sentences.append(sentence + ".")
    return sentences


def _describe_rest(rows: Sequence[Row]) -> list[str]:
    sentences = []
    if within := [row for row in rows if row.is_within and row.method != BASELINE]:
        least = min(within, key=lambda row: row.sparse_bytes)
        sentences.append(
            f"Of all that stay within one standard deviation of dense ({_name(within)}), "
            f"`{least.method}` sends least: {least.sparse_bytes:,.0f} bytes of the sparse leaves"
            f", {_cuts(least)}."
        )
    if full := [row for row in rows if row.overflow > 0]:
        sentences.append(f"There was not room for everything in every step of {_name(full)}.")
    if edge := [row for row in rows if row.at_edge]:
        sentences.append(
            f"At the edge of the grid, so that another rate may do better: {_name(edge)}."
        )
    return sentences


def describe_findings(rows: Sequence[Row], leaves: Sequence[LeafDensity]) -> str:
    """The savings and losses, whether the saving of the paper is reached and why, and the rest.

    Args:
      rows: The table.
      leaves: The densities of all leaves.
    """
    methods = {row.method for row in rows}
    claims = []
    if {BASELINE, ALL_GATHER} <= methods and methods & {*S2_METHODS}:
        claims.append(f"{PAPER} says {100 * CLAIM:.0f} %.")
        workers = rows[0].workers
        sentence, reached = _describe_claim(rows, "all_gather_ratio", "the sparse all-gather")
        claims += [sentence] if reached else [sentence, _explain_all_gather(leaves, workers)]
        sentence, reached = _describe_claim(rows, "dense_ratio", "the dense all-reduce")
        claims += [sentence] if reached else [sentence, _explain_dense(leaves)]
    judged = [] if any(_is_judged(row) for row in rows) else [UNJUDGED]
    paragraphs = [
        _describe_cuts(rows),
        claims,
        _describe_additions(rows),
        judged + _describe_rest(rows),
    ]
    return "\n\n".join(" ".join(sentences) for sentences in paragraphs if sentences)
