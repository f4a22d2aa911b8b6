"""The program sends what the row claims: bytes in the jaxpr, dtypes in the compiled program."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from tests.cases import CASES, Case
from tests.workers import SIZES, Mode, abstract, aggregator, count, gradients


def _program(case: Case, mode: Mode, updates: Any) -> tuple[Any, tuple[Any, ...]]:
    tx, workers = case.make(), count(updates)
    arguments = updates, abstract(tx, updates, mode), jnp.ones(workers)
    return aggregator(tx, workers, mode), arguments


def check_bytes(case: Case, workers: int, mode: Mode = "checked") -> None:
    run, arguments = _program(case, mode, gradients(workers))
    sent = jaxcomm.wire.account(run, *arguments)
    assert sent.bytes_per_worker == pytest.approx(case.bytes(SIZES, workers))
    assert set(sent.bytes_by_axis) == {"data"}


def messages(collectives: Iterable[Any]) -> Counter[str]:
    """How many messages of each kind a program has."""
    return Counter({c.group: c.kind for c in collectives}.values())


@pytest.mark.parametrize("workers", [3, 1, 2, 5, 8])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_bytes(case: Case, workers: int) -> None:
    check_bytes(case, workers)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_bytes_without_type_checks(case: Case) -> None:
    check_bytes(case, 3, "unchecked")


@pytest.mark.parametrize("workers", [8, 2])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_compiled_dtypes_and_messages(case: Case, workers: int) -> None:
    coordinates = 4096  # So large that norms and flags are few even beside single bits.
    leaves = {"kernel": coordinates, "bias": 5, "scale": 3}
    updates = {name: jnp.ones((workers, size)) for name, size in leaves.items()}
    run, arguments = _program(case, "checked", updates)
    compiled = jaxcomm.wire.account(run.lower(*arguments)).collectives
    assert not any(c.widened for c in compiled)  # XLA for CPUs sends what the program asks for.
    elements: Counter[str] = Counter()
    for c in compiled:
        elements[c.dtype.name] += math.prod(c.shape)
    coded = {dtype for dtype, size in elements.items() if size >= coordinates / 32}
    assert coded == case.dtypes(workers)
    assert messages(compiled) == messages(jaxcomm.wire.account(run, *arguments).collectives)


@pytest.mark.parametrize("workers", [2, 16, 64])
@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.filterwarnings("ignore:`bits`=8 leaves:UserWarning")
def test_bytes_of_a_simulated_step(case: Case, workers: int) -> None:
    params = jax.tree.map(lambda x: x[0], gradients(1))
    loss = lambda p, b: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)) * jnp.mean(b)  # noqa: E731
    step = jaxcomm.simulate(loss, case.make(), workers)
    state = jax.eval_shape(lambda params: jaxcomm.init(case.make(), params, workers), params)
    sent = jaxcomm.wire.account(step, params, state, jnp.ones(workers))
    metric = 2 * (workers - 1) / workers * 4
    assert sent.bytes_per_worker == pytest.approx(case.bytes(SIZES, workers) + metric)
