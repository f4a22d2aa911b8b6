"""The bytes of a program, traced and compiled; `tests/processes/test_bytes.py` has the sockets'."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxcomm import wire
from jaxcomm.wire._account import Account
from jaxcomm.wire._collective import Collective
from tests.processes.sending import OURS, PARTITIONED


def sums(account: Account, key: Callable[[Collective], Any]) -> dict[Any, float]:
    totals: dict[Any, float] = {}
    for c in account.collectives:
        totals[key(c)] = totals.get(key(c), 0.0) + c.bytes_per_worker
    return totals


@pytest.mark.parametrize("name", OURS)
def test_a_step_compiled_sends_what_it_does_traced(name: str) -> None:
    step, arguments = OURS[name]()
    traced = wire.account(step, *arguments)
    compiled = wire.account(jax.jit(step).lower(*arguments).compile())
    assert traced.bytes_per_worker == compiled.bytes_per_worker > 1e6
    of_dtype = lambda c: (c.kind, c.dtype)  # noqa: E731
    assert sums(traced, of_dtype) == sums(compiled, of_dtype)
    assert traced.messages == compiled.messages


MIB = 2.0**20  # Of each matrix of weights.
BY_HAND = {
    "data parallel": {"all_reduce": 2 * 1.5 * MIB},
    "fsdp": {"all_reduce": 2 * 1.5 * MIB, "all_gather": 2 * 0.75 * MIB},
    "tensor": {"all_reduce": 1.5 * 4 * MIB},  # Of activations.
    "fsdp and tensor": {"all_reduce": (2 * 0.5 + 2) * MIB, "all_gather": 2 * 0.25 * MIB},
    "all-to-all": {"all_reduce": 2 * 1.5 * MIB, "all_to_all": 4 * 0.75 * MIB},
    "gathers in a scan": {"all_reduce": 3 * 1.5 * MIB, "all_gather": 3 * 2 * 0.75 * MIB},
    "bfloat16": {"all_reduce": 1.5 * MIB},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_xla_partitions_sends_what_is_counted_by_hand(name: str) -> None:
    run, arguments = PARTITIONED[name]()
    assert sums(wire.account(run, *arguments), lambda c: c.kind) == BY_HAND[name]
