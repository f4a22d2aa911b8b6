"""Counters of steps that are full go on: phases of exchanges, noise, and warm-ups that are over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm._noise import following, turn
from jaxcomm.synchronization import local_sgd, post_local, proximal_point
from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase
from tests.cases._local import LOCAL, RECIPES, LocalCase
from tests.gossip.workers import initial as gossip_initial
from tests.gossip.workers import trajectory
from tests.laws.test_local import first_state, leaves_of, scanned
from tests.workers import aggregator, flat, gradients, initial

STEPS = 12
WHOLE = 360360  # A multiple of all periods here.
# Ties are broken at random, or memory is rounded so.
DRAWS = {"majority_vote", "sign_sgd", "signum", "compressed_memory"}


def _is_counter(before: Any, after: Any) -> bool:
    """Whether a leaf has counted all of the steps between two states."""
    return (
        jnp.issubdtype(before.dtype, jnp.integer)
        and before.ndim == 0
        and int(after) - int(before) == STEPS
    )


def with_counters(fresh: Any, after: Any, wholes: int, seeds: bool = True) -> Any:
    """The fresh state, whose counters are 1 less than full, or `wholes` of half the range below.

    Without `seeds`, those that seed noise too, which are unsigned, are fresh.
    """

    def moved(before: Any, after: Any) -> Any:
        seeds_noise = jnp.issubdtype(before.dtype, jnp.unsignedinteger)
        if not _is_counter(before, after) or (seeds_noise and not seeds):
            return before
        most = int(jnp.iinfo(before.dtype).max)
        back = wholes * ((most // 2) // WHOLE * WHOLE)
        return jnp.asarray(np.array(most - 1 - back, before.dtype))

    return jax.tree.map(moved, fresh, after)


def check(run: Callable[[Any], tuple[np.ndarray, Any]], fresh: Any, seeds: bool = True) -> None:
    """`run` returns the results of a few steps from a state, and the state after them."""
    _, after = run(fresh)
    full, early = (with_counters(fresh, after, wholes, seeds) for wholes in (0, 1))
    np.testing.assert_array_equal(run(full)[0], run(early)[0])


def _varies(results: np.ndarray) -> bool:
    """Whether results differ after the steps in which the counter becomes full."""
    return any(not np.array_equal(x, results[2]) for x in results[3:])


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_aggregators(case: Case) -> None:
    """The mean goes on as with an earlier count of the same phase; noise is new in each step."""
    tx, updates, ones = case.make(), gradients(4), np.ones(4, np.float32)
    step = aggregator(tx, 4, "vmap")
    fresh = initial(tx, updates, "vmap")

    def run(state: Any, remembers: bool = True) -> tuple[np.ndarray, Any]:
        found = []
        for _ in range(STEPS):
            result, after = step(updates, state, ones)
            found.append(flat(result))
            counted = lambda new, old: new if jnp.issubdtype(new.dtype, jnp.integer) else old  # noqa: E731
            state = after if remembers else jax.tree.map(counted, after, state)
        return np.stack(found), state

    check(run, fresh, seeds=not (case.random or case.name in DRAWS))
    _, after = run(fresh)
    full, early = (run(with_counters(fresh, after, w), remembers=False)[0] for w in (0, 1))
    assert _varies(full) or not _varies(early)


@pytest.mark.parametrize("case", [*LOCAL, *RECIPES], ids=repr)
def test_local_steps(case: LocalCase) -> None:
    tx = case.make(optax.sgd(0.1))
    rng = np.random.default_rng(1)
    pulls = leaves_of(rng.normal(size=(STEPS, 4, 5)).astype(np.float32))
    fresh = first_state(tx, 4)
    params = jaxcomm.PerWorker({"data": leaves_of(jnp.zeros((4, 5)))})

    def run(state: Any) -> tuple[np.ndarray, Any]:
        masks = np.ones((STEPS, 4), bool)
        found, after, _ = scanned(tx, 4, False)(params, state, (pulls,), masks)
        return np.concatenate(jax.tree.leaves(found.per_worker["data"]), axis=-1), after

    draws = "diloco_muloco", "streaming_diloco_4_bits", "sparta"
    check(run, fresh, seeds=case.name not in draws)


def _draws(case: GossipCase, workers: int) -> bool:
    mixing = case.mixing(workers)
    return mixing.active is not None and mixing.period == 1


@pytest.mark.parametrize("case", GOSSIP, ids=repr)
def test_gossip(case: GossipCase) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 12)).astype(np.float32)
    updates = rng.normal(size=(STEPS, 4, 12)).astype(np.float32)
    tx = case.make(4)
    fresh = gossip_initial(tx, x)

    def run(state: Any) -> tuple[np.ndarray, Any]:
        return trajectory(tx, x, updates, first=state)

    if not _draws(case, 4):
        check(run, fresh)
        return
    found, after = run(with_counters(fresh, run(fresh)[1], 0))
    assert np.isfinite(found).all()
    assert len({*_counts(after)}) == len(_counts(after))


def _counts(state: Any) -> list[int]:
    return [int(x) for x in jax.tree.leaves(state) if x.dtype == jnp.uint32 and not x.ndim]


TURNS = {
    "three matrices in turn": lambda n: gossip.dpsgd(
        gossip.cyclic([gossip.ring(n), np.eye(n), np.eye(n)])
    ),
    "NoLoCo in every third step": lambda n: gossip.noloco(gossip.ring(n), 3),
    "NoLoCo, three in turn in every second step": lambda n: gossip.noloco(
        gossip.cyclic([gossip.ring(n), nx.complete_graph(n), np.eye(n)]), 2
    ),
    "exact averages in every second step": lambda n: gossip.periodic_averaging(
        2, gossip.dpsgd(gossip.ring(n))
    ),
    "a schedule of local steps that has begun": lambda n: local_sgd(post_local(2, 3)),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns(name: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 12)).astype(np.float32)
    updates = rng.normal(size=(STEPS, 4, 12)).astype(np.float32)
    tx = TURNS[name](4)
    check(lambda state: trajectory(tx, x, updates, first=state), gossip_initial(tx, x))


def test_restarts_of_the_proximal_point() -> None:
    tx = proximal_point(0.5, restart_period=3)

    def run(state: Any) -> tuple[np.ndarray, Any]:
        found = []
        for number in range(STEPS):
            x = jnp.float32(number**2)
            result, state = tx.update(jnp.zeros_like(x), state, x)
            found.append(np.asarray(result))
        return np.stack(found), state

    check(run, tx.init(jnp.float32(0)))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("period", [1, 2, 3, 1000, 2**30 + 1])
def test_a_full_counter_keeps_its_phase(period: int, dtype: Any) -> None:
    most = int(np.iinfo(dtype).max)
    after = following(jnp.asarray(np.array(most, dtype)), period)
    assert after.dtype == dtype
    assert (int(after) - most - 1) % period == 0
    assert int(after) >= min(period - 1, most // 2)
    assert most + 1 - int(after) == turn(np.dtype(dtype), period) >= period
    assert int(following(jnp.asarray(np.array(7, dtype)), period)) == 8
