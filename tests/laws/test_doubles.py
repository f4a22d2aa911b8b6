"""Weights have the precision of float64 leaves, also where they are fractions."""

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
from jaxcomm.aggregation import delayed
from tests.cases import WEIGHTED, Case
from tests.cases._local import LOCAL, LocalCase
from tests.gossip.workers import initial as own_initial
from tests.gossip.workers import trajectory

N, SIZE, EXACT = 4, 5, 1e-14
RNG = np.random.default_rng(5)
GIVEN = RNG.normal(size=(2, N, SIZE))
WEIGHTS = np.array([[0.1, 0.7, 0.3, 1 / 3], [0.2, 1 / 7, 0.9, 0.0]])


def results(tx: Any, steps: int, weighted: bool = True) -> np.ndarray:
    """The results of a few updates, on every worker: float64[steps, n, d]."""

    def one(given: jax.Array, weights: jax.Array) -> list[jax.Array]:
        state, found = tx.init(given[0]), []
        for x, weight in zip(given, weights, strict=True):
            extra = {"weight": weight} if weighted else {}
            result, state = tx.update(x, state, jnp.zeros_like(x), **extra)
            found.append(result)
        return found

    run = jax.jit(jax.vmap(one, in_axes=1, axis_name="data"))
    found = run(jnp.asarray(GIVEN[:steps]), jnp.asarray(WEIGHTS[:steps]))
    assert all(x.dtype == np.float64 for x in found)
    return np.stack(found)


def mean_of(weights: np.ndarray, given: np.ndarray) -> np.ndarray:
    return weights @ given / weights.sum()


@pytest.mark.parametrize("case", WEIGHTED, ids=repr)
def test_aggregators(case: Case) -> None:
    """Where the plain mean is exact to float64, so is the weighted one."""
    with jax.enable_x64(True):
        plain, weighted = (results(case.make(), 1, each)[0] for each in (False, True))
    exact = np.abs(plain - GIVEN[0].mean(axis=0)).max() < EXACT
    assert exact or case.name != "mean"
    if exact:
        expected = np.broadcast_to(mean_of(WEIGHTS[0], GIVEN[0]), weighted.shape)
        np.testing.assert_allclose(weighted, expected, rtol=0, atol=EXACT)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "backup": lambda tx: jaxcomm.backup(tx, backups=0),
    "skip_nonfinite": jaxcomm.skip_nonfinite,
    "hierarchical": jaxcomm.hierarchical,
    "sharded_server": lambda tx: jaxcomm.sharded_server(optax.sgd(-1.0)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(name: str) -> None:
    with jax.enable_x64(True):
        found = results(WRAPPERS[name](jaxcomm.mean()), 1)[0]
    np.testing.assert_allclose(found, [mean_of(WEIGHTS[0], GIVEN[0])] * N, rtol=0, atol=EXACT)


def test_an_earlier_step() -> None:
    with jax.enable_x64(True):
        found = results(delayed(jaxcomm.mean(), 1), 2)[1]
    np.testing.assert_allclose(found, [mean_of(WEIGHTS[0], GIVEN[0])] * N, rtol=0, atol=EXACT)


def test_several_steps() -> None:
    with jax.enable_x64(True):
        found = results(jaxcomm.accumulate(jaxcomm.mean(), 2), 2)[1]
    expected = np.einsum("tn,tni->i", WEIGHTS, GIVEN) / WEIGHTS.sum()
    np.testing.assert_allclose(found, [expected] * N, rtol=0, atol=EXACT)


def test_workers_of_two_axes() -> None:
    tx = jaxcomm.hierarchical(jaxcomm.mean("data"), jaxcomm.mean("other"))
    update = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    run = jax.vmap(jax.vmap(update, axis_name="data"), axis_name="other")
    with jax.enable_x64(True):
        found = run(GIVEN[0].reshape(2, 2, SIZE), WEIGHTS[0].reshape(2, 2)).reshape(N, SIZE)
    np.testing.assert_allclose(found, [mean_of(WEIGHTS[0], GIVEN[0])] * N, rtol=0, atol=EXACT)


def _moved(tx: Any, steps: int) -> np.ndarray:
    """Where workers that begin at 0 are after steps of rate 1, float64[n, d]."""
    x, state = np.zeros((N, SIZE)), own_initial(tx, np.zeros((N, SIZE)))
    for given, weights in zip(GIVEN[:steps], WEIGHTS, strict=False):
        found, state = trajectory(tx, x, given[None], first=state, weight=jnp.asarray(weights))
        x = found[-1]
    return x


@pytest.mark.parametrize("case", LOCAL, ids=repr)
def test_local_steps(case: LocalCase) -> None:
    """A worker's displacement has the sum of the weights of its steps."""
    with jax.enable_x64(True):
        found = _moved(case.neutral(optax.sgd(-1.0), 2), 2)
    totals, taken = WEIGHTS.sum(axis=0), WEIGHTS > 0
    moved = np.einsum("tn,tni->ni", taken, GIVEN)
    np.testing.assert_allclose(found, [mean_of(totals, moved)] * N, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "make",
    [
        lambda graph: gossip.dpsgd(graph, order="adapt_then_combine"),
        lambda graph: gossip.noloco(graph, 1, momentum=0.0, learning_rate=1.0),
    ],
)
def test_gossip(make: Callable[[Any], Any]) -> None:
    """Where all are neighbors, all are at the weighted mean after a step."""
    with jax.enable_x64(True):
        found = _moved(make(gossip.to_mixing(nx.complete_graph(N), "uniform")), 1)
    np.testing.assert_allclose(found, [mean_of(WEIGHTS[0], GIVEN[0])] * N, rtol=0, atol=EXACT)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("weight", [np.float32, np.float64])
def test_narrower_leaves_have_weights_of_float32(dtype: Any, weight: Any) -> None:
    """Whatever the dtype of the weights."""
    tx = jaxcomm.accumulate(jaxcomm.mean(), 2)

    def one(g: jax.Array, w: jax.Array) -> Any:
        return tx.update(g, tx.init(g), weight=w.astype(jnp.float32))

    def given(g: jax.Array, w: jax.Array) -> Any:
        return tx.update(g, tx.init(g), weight=w)

    with jax.enable_x64(True):
        arrays = jnp.asarray(GIVEN[0], dtype), jnp.asarray(WEIGHTS[0], weight)
        expected, found = (jax.vmap(each, axis_name="data")(*arrays) for each in (one, given))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype != np.float64
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
