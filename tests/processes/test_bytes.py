"""Sockets send what the compiled program says, of this library and of what XLA partitions."""

import sys

import pytest

from tests.processes.conftest import Counted
from tests.processes.count import STEPS
from tests.processes.counters import HEADERS
from tests.processes.sending import PROGRAMS, WORKERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="not Linux: its counters are read"),
]
programs = pytest.mark.parametrize("program", PROGRAMS)

CLOSE = 0.005  # Gloo adds 144 bytes to each message.
# Gloo scatters by halves, which leaves parts in the reversed order of bits: workers 1 and 2 then
# send each other theirs. All other kinds send as many bytes as a ring.
OVER_RING = {"reduce_scatter": (1, 4 / 3, 4 / 3, 1)}


@programs
def test_sockets_of_each_worker(counted: Counted, program: str) -> None:
    factors = OVER_RING.get(program, (1,) * WORKERS)
    for run, factor in zip(counted.by_program[program], factors, strict=True):
        assert STEPS * run["bytes_per_worker"] > 1e6
        off = run["payload"] - STEPS * factor * run["expected"]
        assert abs(off) < CLOSE * STEPS * run["bytes_per_worker"]


@programs
def test_packets_on_the_interface(counted: Counted, program: str) -> None:
    """Of all workers, without headers and what TCP sent again."""
    if not counted.isolated:
        pytest.skip("no root or no tc: no network of the processes alone")
    runs = counted.by_program[program]
    factors = OVER_RING.get(program, (1,) * WORKERS)
    expected = STEPS * sum(f * run["expected"] for f, run in zip(factors, runs, strict=True))
    interface = runs[0]["loopback"] - HEADERS * runs[0]["packets"]
    assert abs(interface - sum(run["repeated"] for run in runs) - expected) < CLOSE * expected


@pytest.mark.parametrize("program", ["bfloat16"])
def test_bfloat16_is_sent_as_float32(counted: Counted, program: str) -> None:
    for run in counted.by_program[program]:
        assert run["widened"] == run["bytes_per_worker"] == 1.5 * 2 * 2**18 * 2
