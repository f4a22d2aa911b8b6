"""The table of cases: every method with what it claims. A new method is one row.

from tests.cases._case import row
Claims are written here from the papers and by hand, never from the tested code.
"""

import pytest

from tests.cases._binary import BINARY
from tests.cases._blocks import BLOCKS
from tests.cases._case import Case
from tests.cases._chained import CHAINED
from tests.cases._coded import CODED
from tests.cases._exchanged import EXCHANGED
from tests.cases._feedback import FEEDBACK
from tests.cases._low_rank import LOW_RANK
from tests.cases._quantized import QUANTIZED
from tests.cases._sampled import SAMPLED
from tests.cases._sharded import SHARDED
from tests.cases._signs import SIGNS
from tests.cases._sketched import SKETCHED
from tests.cases._sparse import SPARSE
from tests.cases._stale import STALE
from tests.cases._switched import SWITCHED
from tests.cases._zeroth_order import ZEROTH_ORDER

__all__ = [
    "CASES",
    "FAMILIES",
    "FEW",
    "FRAME",
    "REPRESENTATIVES",
    "MEANS",
    "WEIGHTED",
    "Case",
    "rows",
    "rows_by_workers",
]

# One for each way in which updates are exchanged and memory is kept. The others share their code
# with one of these, but for the codec and what tests of their own are for, and are variants.
REPRESENTATIVES = {
    "mean",
    "majority_vote",
    "global_qsgd",  # summed
    "global_qsgd_exponential",  # merged
    "two_stage_8_bits",
    "sharded_server",  # in two stages, with an optimizer between
    "top_k_sgd",  # gathered, feedback
    "diana",  # shared memory
}

FAMILIES = [
    QUANTIZED,
    SIGNS,
    SPARSE,
    BINARY,
    SAMPLED,
    BLOCKS,
    CHAINED,
    LOW_RANK,
    CODED,
    SKETCHED,
    EXCHANGED,
    SWITCHED,
    ZEROTH_ORDER,
    SHARDED,
    STALE,
    FEEDBACK,
]
CASES = [
    case._replace(variant=case.name not in REPRESENTATIVES)
    for family in FAMILIES
    for case in family
]

# A mean without a codec, one of codes, and one with memory: enough for laws about the code that
# all aggregators share around exchange and codec.
FRAME = {"mean", "global_qsgd", "top_k_sgd"}

# Without memory and with it: enough in the quick run for laws that take long.
FEW = {"global_qsgd", "top_k_sgd"}


def rows(cases: list[Case], quick: set[str] = REPRESENTATIVES) -> list:
    """Rows for `pytest.mark.parametrize`, all but the `quick` ones in the slow run only."""
    return [pytest.param(c, marks=[] if c.name in quick else [pytest.mark.slow]) for c in cases]


def rows_by_workers(
    cases: list[Case], quick: list[int], of_variants: list[int], slow: tuple[int, ...] = ()
) -> list:
    """Rows crossed with numbers of workers; the quick run has variants only with `of_variants`."""

    def is_slow(case: Case, workers: int) -> bool:
        return workers in slow or (case.variant and workers not in of_variants)

    return [
        pytest.param(c, n, marks=[pytest.mark.slow] if is_slow(c, n) else [])
        for c in cases
        for n in (*quick, *slow)
    ]


MEANS = [case for case in CASES if case.resolution]
WEIGHTED = [case for case in MEANS if case.weighted]
