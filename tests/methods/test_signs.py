"""Methods of one bit under error feedback, against NumPy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.slow import slow
from tests.workers import aggregator, initial

STEPS, WORKERS = 5, 3


def mean_magnitude(a: np.ndarray) -> np.ndarray:
    return np.abs(a).mean() * np.where(a >= 0, 1.0, -1.0)


def class_means(a: np.ndarray) -> np.ndarray:
    columns = a.reshape(-1, a.shape[-1] if a.ndim > 1 else 1).T
    decoded = np.zeros_like(columns)
    for given, out in zip(columns, decoded, strict=True):
        for chosen in (given >= 0, given < 0):
            if chosen.any():
                out[chosen] = given[chosen].mean()
    return decoded.T.reshape(a.shape)


METHODS = {
    "ef_sign_sgd": (jaxcomm.ef_sign_sgd, mean_magnitude),
    "one_bit_sgd": (jaxcomm.one_bit_sgd, class_means),
}


@pytest.mark.slow
@pytest.mark.parametrize("decay", [slow(1.0), 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_against_numpy(name: str, decay: float) -> None:
    method, compress = METHODS[name]
    rng = np.random.default_rng(0)
    shapes = {"bias": (4,), "kernel": (6, 3)}
    given = {k: rng.standard_t(3, size=(STEPS, WORKERS, *s)) for k, s in shapes.items()}
    tx = method(decay=decay)
    at = lambda step: {k: jnp.asarray(v[step], jnp.float32) for k, v in given.items()}  # noqa: E731
    run, state = aggregator(tx, WORKERS, "vmap"), initial(tx, at(0), "vmap")
    residual = {k: np.zeros((WORKERS, *s)) for k, s in shapes.items()}
    for step in range(STEPS):
        results, state = run(at(step), state, jnp.ones(WORKERS))
        for leaf, updates in given.items():
            corrected = updates[step] + decay * residual[leaf]
            sent = np.stack([*map(compress, corrected)])
            residual[leaf] = corrected - sent
            np.testing.assert_allclose(results[leaf][1], sent.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("method", [jaxcomm.ef_sign_sgd, jaxcomm.one_bit_sgd])
def test_a_whole_tree_has_no_scale(method: Callable[..., jaxcomm.Aggregator]) -> None:
    with pytest.raises(ValueError, match="`scope`='tree' shares statistics"):
        jaxcomm.init(method(scope="tree"), jnp.zeros(3), 2)


def test_residuals_of_half_the_size() -> None:
    given = jnp.ones((2, 8))
    state = initial(jaxcomm.ef_sign_sgd(residual_dtype=jnp.bfloat16), given, "vmap")
    kept = [x.dtype for x in jax.tree.leaves(state.own)]
    assert kept == [jnp.bfloat16]
