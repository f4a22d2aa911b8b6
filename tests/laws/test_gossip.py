"""The laws of gossip, `jaxcomm.testing.GOSSIP_LAWS`, hold of every row: `law[method]`."""

from typing import Any

import numpy as np
import pytest

from jaxcomm.testing import GOSSIP_LAWS, GossipTrial
from tests.cases._gossip import GOSSIP, GossipCase

WORKERS = 4


def _law(law: str) -> Any:
    @pytest.mark.parametrize("case", GOSSIP, ids=repr)
    def test(case: GossipCase) -> None:
        # DeepSqueeze's largest coordinates are always those of some workers only.
        tolerance = np.inf if case.name == "deep_squeeze" else 1e-3
        GOSSIP_LAWS[law](GossipTrial(case.make(WORKERS), WORKERS, tolerance=tolerance))

    return test


globals().update({f"test_{law}": _law(law) for law in GOSSIP_LAWS})
