"""The table of cases: every method with what it claims. A new method is one row.

Claims are written here from the papers and by hand, never from the code they are held against.
"""

import pytest

from tests.cases._case import Case
from tests.cases._quantized import QUANTIZED
from tests.cases._sparse import SPARSE

__all__ = ["CASES", "MEANS", "WEIGHTED", "Case", "rows"]

CASES = [*QUANTIZED, *SPARSE]


def rows(cases: list[Case]) -> list:
    """Rows for `pytest.mark.parametrize`, variants being left to the slow run."""
    return [pytest.param(c, marks=[pytest.mark.slow] if c.variant else []) for c in cases]


MEANS = [case for case in CASES if case.resolution]
WEIGHTED = [case for case in MEANS if case.weighted]
