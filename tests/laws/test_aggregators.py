"""The laws of aggregators, `jaxcomm.testing.AGGREGATOR_LAWS`, hold of every row: `law[method]`."""

from collections.abc import Mapping
from typing import Any

import pytest

from jaxcomm.testing import AGGREGATOR_LAWS
from jaxcomm.testing._laws import aggregator_laws_of
from tests.cases import CASES, Case

WORKERS: Mapping[str, tuple[int, ...]] = {
    "modes": (3, 4, 8),
    "nonfinite": (4, 3),
    "memory after nonfinite": (4,),
    "resolution": (3, 1, 2, 4, 5, 8, 16, 64),
    "overflow": (3, 1, 2, 4, 5, 8, 16, 64),
    "weights": (4,),
    "equal weights": (4,),
    "unbiased": (3, 1, 8, 16),
    "variance": (3, 1, 8),
}
"""The numbers of workers, if not 3. Without so many devices, one simulates."""


def _parameters(law: str) -> list[Any]:
    """Each row of which the law holds, with each number of workers."""
    first, *more = WORKERS.get(law, (3,))
    held = [case for case in CASES if law in aggregator_laws_of(case.trial())]
    return [
        pytest.param(case, n, id=case.name if n == first else f"{case.name}-{n}")
        for case in held
        for n in (first, *more)
    ]


def _law(law: str) -> Any:
    @pytest.mark.filterwarnings("ignore:`bits`=.* leaves .* levels:UserWarning")
    @pytest.mark.parametrize(("case", "workers"), _parameters(law))
    def test(case: Case, workers: int) -> None:
        AGGREGATOR_LAWS[law](case.trial(workers))

    return test


globals().update({f"test_{law.replace(' ', '_')}": _law(law) for law in AGGREGATOR_LAWS})
