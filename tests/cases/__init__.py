"""The table of cases: every method with what it claims. A new method is one row.

Claims are written here from the papers and by hand, never from the tested code.
"""

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

__all__ = ["CASES", "FAMILIES", "MEANS", "WEIGHTED", "Case"]

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
CASES = [case for family in FAMILIES for case in family]
MEANS = [case for case in CASES if case.resolution]
WEIGHTED = [case for case in MEANS if case.weighted]
