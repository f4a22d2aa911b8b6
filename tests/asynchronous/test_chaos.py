"""Whatever happens to its processes, a run accounts for every example and every update."""

import collections
import importlib.util

import pytest

from tests.asynchronous import chaos

SECONDS = 90.0
SEED = 0


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray")
def test_every_example_and_every_update_is_accounted_for() -> None:
    counts: collections.Counter[str] = collections.Counter()
    for longer in range(3):  # A busy machine takes longer.
        counts += chaos.main(SECONDS * 2**longer, SEED + longer)
        if counts["examples used"] > 500:
            break
    workers = ("workers killed", "workers stopped", "workers resumed", "late joins")
    for what in (*workers, "owners killed", "messages with NaN", "full object stores"):
        assert counts[what] >= 1, counts
    assert counts["examples used"] > 500
