"""The sparse form: what it saves by the paper, and that too little room is seen."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import wire
from jaxcomm.compression.quantizers import sparse_dither
from tests.slow import slow
from tests.workers import abstract, aggregator, draws, initial

D = 2**18


def _capacity(expected_of_all: float, workers: int) -> int:
    """Room for one worker: its share of the expected non-zeros and six standard deviations."""
    share = expected_of_all / workers
    return int(share + 6 * share**0.5)


def _sent(tx: object, given: jnp.ndarray) -> float:
    run = aggregator(tx, len(given), "checked")
    account = wire.account(run, given, abstract(tx, given, "checked"), jnp.ones(len(given)))
    gathers = [c.bytes_per_worker for c in account.collectives if c.primitive == "all_gather"]
    return sum(gathers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4])
def test_bytes_shrink_by_the_root_of_the_workers_on_a_mesh(workers: int) -> None:
    _bytes_shrink(workers, _sent)


def _sent_simulated(tx: object, given: jnp.ndarray) -> float:
    step = jaxcomm.simulate(lambda w, x: jnp.mean((x[0] - w) ** 2), tx, len(given))
    state = abstract(tx, given, "vmap")
    account = wire.account(step, given[0], state, given)
    return sum(c.bytes_per_worker for c in account.collectives if c.primitive == "all_gather")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, slow(16)])
def test_bytes_shrink_by_the_root_of_the_workers(workers: int) -> None:
    _bytes_shrink(workers, _sent_simulated)


@functools.cache
def _both(workers: int) -> tuple[Any, Any]:
    common = _capacity((workers * D) ** 0.5, workers)
    own = _capacity(workers * D**0.5, workers)
    return (
        jaxcomm.sparse_global_qsgd(capacity=common),
        jaxcomm.all_gather_mean(sparse_dither(capacity=own)),
    )


def _bytes_shrink(workers: int, sent: object) -> None:
    given = jnp.asarray(np.random.default_rng(0).normal(size=(workers, D)), jnp.float32)
    one_norm, own_norms = _both(workers)
    # The room for chance is relatively larger where fewer are expected.
    ratio = sent(own_norms, given) / sent(one_norm, given)
    assert 0.8 * workers**0.5 < ratio <= 1.05 * workers**0.5
    for tx in (one_norm, own_norms):
        assert np.isfinite(draws(tx, given, 3)).all()  # The room sufficed.


@pytest.mark.slow
def test_too_little_room_is_seen_by_every_worker() -> None:
    given = jnp.ones((3, 64)).at[:, 0].set(4.0)
    tx = jaxcomm.sparse_global_qsgd(capacity=1, levels=100)
    run = aggregator(tx, 3, "checked")
    results, _ = run(given, initial(tx, given, "checked"), jnp.ones(3))
    assert np.isnan(np.asarray(results)).all()


def test_indices_are_as_narrow_as_they_can_be() -> None:
    # Eight indices, the word that holds eight codes, and a count, in one message.
    for size, dtype, words in ((2**16 - 1, "uint16", 8 + 2 + 2), (2**16, "uint32", 8 + 1 + 1)):
        tx = jaxcomm.sparse_global_qsgd(capacity=8)
        given = jnp.zeros((2, size))
        run = aggregator(tx, 2, "checked")
        account = wire.account(run, given, abstract(tx, given, "checked"), jnp.ones(2))
        gathered = [c for c in account.collectives if c.primitive == "all_gather"]
        assert [(str(c.dtype), c.shape) for c in gathered] == [(dtype, (words,))]
