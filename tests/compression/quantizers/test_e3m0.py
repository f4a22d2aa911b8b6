"""Floats of 4 bits: which numbers are exact, and that all others are unbiased."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import Context
from jaxcomm.compression.quantizers import e3m0


def rounded(x: np.ndarray, draws: int) -> np.ndarray:
    """What receivers decode, [draws, size]."""
    codec, given = e3m0(), jnp.asarray(x, jnp.float32)

    def once(key: jax.Array) -> jax.Array:
        context = Context.of(given)
        coins = context.coins._replace(private=key)
        context = context.replace(coins=coins, statistics=codec.measure(context, given))
        return codec.decode(context.received(), codec.encode(context, given)[0])

    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), draws)
    return np.asarray(jax.jit(jax.vmap(once))(keys), np.float64)


def test_seven_powers_and_zero_are_exact() -> None:
    powers = 5.5 * 2.0 ** -np.arange(7)
    x = np.concatenate([powers, -powers, [0.0]])
    np.testing.assert_array_equal(rounded(x, 3), np.tile(x, (3, 1)))


def test_one_of_two_neighbors_without_bias() -> None:
    levels = 3 * np.concatenate([[0.0], 2.0 ** np.arange(-6.0, 1)])
    x = np.concatenate([[3.0], np.random.default_rng(0).uniform(levels[:-1], levels[1:])])
    found, draws = rounded(x, 10_000)[:, 1:], 10_000
    below, above = levels[:-1], levels[1:]
    assert ((found == below) | (found == above)).all()
    spread = np.sqrt((above - x[1:]) * (x[1:] - below) / draws)
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - x[1:]), 4.5 * spread)
