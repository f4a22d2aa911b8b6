"""The study of budgets: its clock."""

import pytest

from experiments.training.budgets import seconds_of
from jaxcomm.wire._account import Account
from jaxcomm.wire._collective import Collective


def collective(kind: str, size: int, pairs: tuple = ()) -> Collective:
    import numpy as np

    return Collective(kind, ("data",), 4, np.dtype("int8"), (size,), 1, (), 0, (), pairs)


def test_a_stage_lasts_as_long_as_its_slowest_link() -> None:
    sent = [collective("ppermute", 100, ((1, 2), (2, 1))), collective("ppermute", 10, ((0, 1),))]
    account = Account((*sent, collective("all_gather", 8)))
    # Worker 1 sends 100 and receives 110; worker 0 sends 10; the gather sends 3 times 8.
    assert seconds_of(account, 4, 1.0, 100.0) == pytest.approx(1.1 + 0.24)
    assert seconds_of(account, 4, 20.0, 100.0) == pytest.approx(2.0 + 20 * 0.24)
