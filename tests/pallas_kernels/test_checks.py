"""Checks of arguments that ops share."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _checks


def test_require() -> None:
    _checks.require(True, "unseen")
    with pytest.raises(ValueError, match="what went wrong"):
        _checks.require(False, "what went wrong")


@pytest.mark.parametrize("scale", [jnp.zeros(1), jnp.int32(1), jnp.bfloat16(1)])
def test_a_scalar_is_one_float32(scale: jax.Array) -> None:
    _checks.require_scalar("scale", jnp.float32(1))
    with pytest.raises(ValueError, match=r"`scale` must be float32\[\], got"):
        _checks.require_scalar("scale", scale)


@pytest.mark.parametrize(
    "seeds", [jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.uint32), jnp.uint32(1)]
)
def test_seeds_are_two_words(seeds: jax.Array) -> None:
    _checks.require_seeds(jnp.zeros(2, jnp.uint32))
    with pytest.raises(ValueError, match=r"`seeds` must be uint32\[2\], got"):
        _checks.require_seeds(seeds)


def test_nondifferentiable_is_the_identity() -> None:
    x, codes = jnp.arange(3.0), jnp.arange(3)
    same, same_codes = jax.jit(jax.vmap(lambda *a: _checks.nondifferentiable("op", *a)))(x, codes)
    assert same.tolist() == x.tolist() and same_codes.tolist() == codes.tolist()


def test_nondifferentiable_names_the_op() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return _checks.nondifferentiable("some_op", x)[0].sum()

    for differentiate in (jax.grad, jax.jacfwd, jax.hessian):
        with pytest.raises(TypeError, match="`some_op` rounds, so it has no gradient"):
            differentiate(loss)(jnp.ones(3))
    gradient = jax.grad(lambda x: (x * loss(jax.lax.stop_gradient(x))).sum())(jnp.ones(3))
    assert gradient.tolist() == [3, 3, 3]
