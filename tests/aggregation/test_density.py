"""How much of each leaf is not zero, of one worker and of all."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm import gradient_density
from tests.aggregation.runs import over
from tests.workers import mesh_of

N = 4


def test_density_of_each_worker_and_of_the_union() -> None:
    rng = np.random.default_rng(0)
    leaves = {
        "rows": rng.normal(size=(N, 50, 3)) * (rng.random((N, 50, 1)) < 0.1),
        "flat": rng.normal(size=(N, 77)) * (rng.random((N, 77)) < 0.3),
        "scalar": np.ones(N),
        "empty": np.zeros((N, 0, 2)),
    }
    given = {name: jnp.asarray(x, jnp.float32) for name, x in leaves.items()}

    def densities(x: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
        return gradient_density(x), gradient_density(x, axis_name="data")

    own, union = jax.jit(jax.vmap(densities, axis_name="data"))(given)
    touched = {
        "rows": (leaves["rows"] != 0).any(axis=2),
        "flat": leaves["flat"] != 0,
        "scalar": np.ones((N, 1), bool),
    }
    for name, parts in touched.items():
        np.testing.assert_allclose(own[name], parts.mean(axis=1), rtol=1e-6)
        np.testing.assert_allclose(union[name], np.full(N, parts.any(axis=0).mean()), rtol=1e-6)
    assert (np.asarray(own["empty"]) == 0).all()
    of_blocks = jax.jit(lambda x: gradient_density(x, granularity=4))
    blocks = of_blocks({"a": jnp.zeros(10).at[3].set(1.0)})
    assert blocks["a"] == jnp.float32(1 / 3)
    assert gradient_density({}) == {}


def test_it_sends_one_bit_per_row() -> None:
    density = over(mesh_of(8), "data", lambda x: gradient_density(x, axis_name="data"))
    sent = jaxcomm.wire.account(density, jnp.zeros((8, 2560, 16)))
    assert sent.bytes_per_worker == 2 * 7 / 8 * 2560 / 8
