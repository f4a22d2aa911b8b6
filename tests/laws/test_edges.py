"""Zero, constant, one-hot, denormal, huge, empty and scalar leaves."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import MEANS, Case, rows
from tests.workers import MODE_ROWS, ONE_LEAF, Mode, aggregate, flat

N, SIZE = ONE_LEAF
EDGES = {
    "zero": np.zeros((N, SIZE)),
    "constant": np.full((N, SIZE), -0.7),
    "one_hot": np.eye(N, SIZE),
    "one_worker_alone": np.concatenate([np.ones((1, SIZE)), np.zeros((N - 1, SIZE))]),
    "tiny": np.full((N, SIZE), 3e-38),
    "huge": np.linspace(-3e37, 3e37, N * SIZE).reshape(N, SIZE),
    "wide_range": np.tile(10.0 ** np.arange(-30, 31, 15), (N, 1)),
    "scalar": np.array([1.0, -2.0, 4.0]),
    "empty": np.zeros((N, 0)),
    "empty_matrix": np.zeros((N, 2, 0)),
}


def check_edge(case: Case, edge: np.ndarray, mode: Mode) -> None:
    given = edge.reshape(len(edge), -1)
    result = aggregate(case.make(), jnp.asarray(edge, jnp.float32), mode)
    assert result.shape == edge.shape
    peak = np.abs(given).max(initial=0)
    bound = (case.resolution(*given.shape) + 1e-6) * peak + 1e-36
    error = np.abs(result.reshape(given.shape) - given.mean(axis=0))
    assert np.all(error <= bound)
    silent = np.all(given == 0, axis=0)
    assert case.spreads or np.all(result.reshape(given.shape)[:, silent] == 0)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("case", rows(MEANS), ids=repr)
def test_edge(case: Case, edge: str) -> None:
    check_edge(case, EDGES[edge], "vmap")


@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("edge", ["scalar", "empty"])
@pytest.mark.parametrize("case", rows(MEANS), ids=repr)
def test_edge_of_shape_in_every_mode(case: Case, edge: str, mode: Mode) -> None:
    check_edge(case, EDGES[edge], mode)


@pytest.mark.slow
@pytest.mark.parametrize("case", rows(MEANS), ids=repr)
def test_empty_leaves_among_others_and_empty_trees(case: Case) -> None:
    full = jnp.asarray(EDGES["one_hot"], jnp.float32)
    mixed = {"a": jnp.zeros((N, 0)), "b": full, "c": jnp.zeros((N, 0, 4))}
    result = aggregate(case.make(), mixed)
    assert (
        np.abs(result["b"] - np.asarray(full).mean(axis=0)).max() <= case.resolution(N, SIZE) + 1e-6
    )
    assert result["a"].shape == (N, 0) and result["c"].shape == (N, 0, 4)


@pytest.mark.parametrize("case", rows(MEANS), ids=repr)
def test_denormals_become_small_numbers(case: Case) -> None:
    # XLA flushes denormals on CPU: the result may be zero, and is finite and no larger.
    given = jnp.asarray(np.full(ONE_LEAF, 1e-40), jnp.float32)
    result = flat(aggregate(case.make(), given))
    assert np.all((result >= 0) & (result <= 1e-37))
