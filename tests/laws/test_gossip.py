"""The laws of gossip, `jaxcomm.testing.GOSSIP_LAWS`, hold of every row: `law[method]`."""

from typing import Any

import numpy as np
import pytest

from jaxcomm.testing import GOSSIP_LAWS, GossipTrial
from tests.cases._gossip import GossipCase, gossip_rows

WORKERS = 4


def _law(law: str) -> Any:
    rows = [
        pytest.param(case, WORKERS, id=case.name, marks=row.marks)
        for row in gossip_rows(WORKERS, {"dpsgd"})
        for case in row.values
    ]

    @pytest.mark.parametrize(("case", "workers"), rows)
    def test(case: GossipCase, workers: int) -> None:
        # DeepSqueeze's largest coordinates are always those of some workers only.
        tolerance = np.inf if case.name == "deep_squeeze" else 1e-3
        GOSSIP_LAWS[law](GossipTrial(case.make(workers), workers, tolerance=tolerance))

    test.law = GOSSIP_LAWS[law]  # For `tests.cases.pairs`, which reads its bounds.
    return test


globals().update({f"test_{law}": _law(law) for law in GOSSIP_LAWS})
