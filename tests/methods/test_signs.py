"""Methods of one bit under error feedback, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.slow import slow
from tests.steps import steps

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


@pytest.mark.parametrize(
    ("name", "decay"), [("ef_sign_sgd", 0.5), slow("one_bit_sgd", 0.5), slow("one_bit_sgd", 1.0)]
)
def test_against_numpy(name: str, decay: float) -> None:
    method, compress = METHODS[name]
    rng = np.random.default_rng(0)
    shapes = {"bias": (4,), "kernel": (6, 3)}
    given = {k: rng.standard_t(3, size=(STEPS, WORKERS, *s)) for k, s in shapes.items()}
    results, _ = steps(method(decay=decay), {k: x.astype(np.float32) for k, x in given.items()})
    for leaf, updates in given.items():
        residual = np.zeros((WORKERS, *shapes[leaf]))
        for update, result in zip(updates, results[leaf], strict=True):
            corrected = update + decay * residual
            sent = np.stack([*map(compress, corrected)])
            residual = corrected - sent
            np.testing.assert_allclose(result[1], sent.mean(axis=0), atol=1e-5)


def test_a_whole_tree_has_no_scale() -> None:
    for method, _ in METHODS.values():
        with pytest.raises(ValueError, match="`scope`='tree' shares statistics"):
            jaxcomm.init(method(scope="tree"), jnp.zeros(3), 2)


def test_residuals_of_half_the_size() -> None:
    tx = jaxcomm.ef_sign_sgd(residual_dtype=jnp.bfloat16)
    state = jaxcomm.init(tx, jnp.ones(8), 2)
    assert [x.dtype for x in jax.tree.leaves(state.own)] == [jnp.bfloat16]
