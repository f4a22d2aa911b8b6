"""Servers of rows: which rows each has, too small a capacity, dense leaves."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.aggregation._rows import ROW_CUTS
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import nonzero
from tests.slow import slow
from tests.steps import steps
from tests.workers import aggregate

WORKERS, ROWS, WIDTH = 4, 16, 2


@pytest.mark.parametrize("shape", [(7, 3), slow((5,)), slow(()), slow((0, 2))])
@pytest.mark.parametrize("ownership", ROW_CUTS)
def test_rows_round_trip(ownership: str, shape: tuple[int, ...]) -> None:
    x = jnp.arange(1.0, 1.0 + np.prod(shape, dtype=int)).reshape(shape)
    rows = ROW_CUTS[ownership].split(x, 3)
    assert rows.shape[0] == 3 and (rows != 0).sum() == x.size
    np.testing.assert_array_equal(ROW_CUTS[ownership].join(rows, shape), x)


def test_neighboring_rows_have_different_servers() -> None:
    rows = ROW_CUTS["cyclic"].split(jnp.arange(7), 3)
    np.testing.assert_array_equal(rows, [[0, 3, 6], [1, 4, 0], [2, 5, 0]])


def frequent_rows() -> np.ndarray:
    """Each worker's updates of the first rows, as of frequent words."""
    given = np.zeros((WORKERS, ROWS, WIDTH), np.float32)
    given[:, :4] = np.random.default_rng(0).integers(1, 9, (WORKERS, 4, WIDTH))
    return given


@pytest.mark.slow
def test_cyclic_rows_need_less_capacity_than_blocks() -> None:
    given, codec = jnp.asarray(frequent_rows()), nonzero(density=0.25)
    exact = np.asarray(given).mean(axis=0)
    turns = jaxcomm.two_stage_mean(codec, ownership="cyclic", scope="leaf")
    runs = jaxcomm.two_stage_mean(nonzero(density=0.25, granularity=WIDTH))
    np.testing.assert_array_equal(aggregate(turns, given)[0], exact)
    assert (aggregate(runs, given)[0] != exact).any()


@pytest.mark.slow
def test_dense_leaves_use_the_exact_mean() -> None:
    given = {"embedding": jnp.asarray(frequent_rows()), "bias": jnp.eye(WORKERS)}
    tx = jaxcomm.parallax(
        sparse={"embedding": True, "bias": False}, density=0.25, union_density=0.25
    )
    results = aggregate(tx, given)
    for name, result in results.items():
        np.testing.assert_array_equal(result[0], np.asarray(given[name]).mean(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize(("density", "union"), [(0.25, 0.5), (0.5, 0.25)])
def test_overflow_at_push_or_pull_is_sent_later(density: float, union: float) -> None:
    given = jnp.zeros((WORKERS, ROWS, WIDTH)).at[:, ::4].set(4.0)  # All of one server.
    tx = jaxcomm.two_stage_mean(
        error_feedback(nonzero(density=density)),
        mean_codec=error_feedback(nonzero(density=union)),
        ownership="cyclic",
        scope="leaf",
        diagnostics=True,
    )
    results, states = steps(tx, jnp.zeros((6, *given.shape)).at[0].set(given))
    np.testing.assert_array_equal(results[:, 0].sum(axis=0), np.asarray(given).mean(axis=0))
    overflows = np.asarray(states.diagnostics["overflow"])[:, 0]
    assert overflows[0] > 0 and overflows[-1] == 0
