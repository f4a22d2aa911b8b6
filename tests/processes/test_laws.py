"""What holds of devices of one process holds of processes, and the wire is what is accounted."""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.processes.conftest import Ended
from tests.processes.families import (
    FAMILIES,
    STEPS,
    UNMEASURED,
    WORKERS,
    Run,
)
from tests.slow import slow

pytestmark = pytest.mark.xdist_group("processes")

MOST_OVERHEAD = 0.005  # 144 bytes a message, of Gloo's; see test_bytes.py.
ROUNDING = 2e-6

families = pytest.mark.parametrize(
    "name", [slow(name) if family.slow else name for name, family in FAMILIES.items()]
)


@families
def test_replicas_are_bit_equal(cluster: Ended, name: str) -> None:
    runs = [process["runs"][name] for process in cluster.processes]
    replicas = [digest for run in runs for digest in run["replicas"]]
    assert len(replicas) == WORKERS and len(set(replicas)) == 1
    assert len({digest for run in runs for digest in run["states"]}) <= 1
    assert len({tuple(run["losses"]) for run in runs}) == 1


@families
def test_processes_compute_what_devices_do(
    cluster: Ended, alone: Callable[[str], Run], name: str
) -> None:
    here, there = alone(name), cluster.params[name]
    if FAMILIES[name].integer_sum:
        np.testing.assert_array_equal(there, here.params)
        assert set(cluster.processes[0]["runs"][name]["states"]) == set(here.states)
    else:
        np.testing.assert_allclose(there, here.params, rtol=0, atol=ROUNDING)
    losses = cluster.processes[0]["runs"][name]["losses"]
    np.testing.assert_allclose(losses, here.losses, rtol=1e-6)
    assert losses[-1] < losses[0]


counted = pytest.mark.skipif(sys.platform != "linux", reason="not Linux: its counters are read")


@counted
@families
def test_sockets_send_the_accounted_bytes(cluster: Ended, name: str) -> None:
    for process in cluster.processes:
        run = process["runs"][name]
        measured = process["devices"] * (STEPS - UNMEASURED)
        if FAMILIES[name].exchanges:
            assert abs(run["sent"] / (measured * run["account"]) - 1) < MOST_OVERHEAD
        else:  # Flags, of what a mean would send.
            assert run["sent"] < 0.02 * measured * 6 * FAMILIES[name].size


@pytest.mark.slow
@counted
@pytest.mark.parametrize("name", ["noloco"])
@pytest.mark.parametrize("cluster", [pytest.param((4, 1), id="4x1")], indirect=True)
def test_sockets_send_only_the_chosen_random_round(cluster: Ended, name: str) -> None:
    family = FAMILIES[name]
    for process in cluster.processes:
        of_rounds = family.exchanges * 4 * family.size
        assert abs(process["runs"][name]["sent"] / of_rounds - 1) < MOST_OVERHEAD
    test_sockets_send_the_accounted_bytes(cluster, name)


def test_a_process_local_batch_is_refused(cluster: Ended) -> None:
    for process in cluster.processes:
        assert "`batch['phase']` is of this process only" in process["refused"]
        assert "make_array_from_process_local_data" in process["refused"]
