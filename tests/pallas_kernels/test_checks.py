"""What has no gradient says so."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _dispatch


def test_nondifferentiable_is_the_identity() -> None:
    x, codes = jnp.arange(3.0), jnp.arange(3)
    same, same_codes = jax.jit(jax.vmap(lambda *a: _dispatch.nondifferentiable("op", *a)))(x, codes)
    assert same.tolist() == x.tolist() and same_codes.tolist() == codes.tolist()


def test_nondifferentiable_names_the_op() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return _dispatch.nondifferentiable("some_op", x)[0].sum()

    for differentiate in (jax.grad, jax.jacfwd, jax.hessian):
        with pytest.raises(TypeError, match="`some_op` rounds, so it has no gradient"):
            differentiate(loss)(jnp.ones(3))
    gradient = jax.grad(lambda x: (x * loss(jax.lax.stop_gradient(x))).sum())(jnp.ones(3))
    assert gradient.tolist() == [3, 3, 3]
