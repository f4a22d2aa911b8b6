"""Hashes are uniform and rows independent, estimates unbiased, their variance that of theory."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import count_sketch
from pallas_kernels.count_sketch import reference, tiling
from pallas_kernels.count_sketch.tiling import Key
from tests.slow import slow

Z = 5.0  # Two-sided, 6e-7.
SIZE, COLUMNS, SLOTS, TILES = 16 * 1024, 4096, 4, 16
DRAWS = 300
SEEDS = jax.random.bits(jax.random.key(0), (DRAWS, 2), jnp.uint32)


# Coordinates that are set: structures on which poor hashes fail.
_I = np.arange(SIZE)
SUPPORTS = {
    "one per tile, at the same place": _I % 1024 == 77,
    "one sublane of each tile": _I // 128 % 8 == 3,
    "periodic in tiles": (_I // 1024 % 2 == 0) & (_I % 16 == 0),
    "consecutive": (_I >= 7000) & (_I < 9500),  # In two rounds of tiles.
}


def expected_error(x: np.ndarray, hashing: str) -> float:
    """The exact mean squared error on the support, of one row."""
    on = x != 0
    if hashing == "elements":
        return float(((x**2).sum() - x[on] ** 2).mean() / COLUMNS)
    # Tiles of one round never share a slot.
    energy = (x.reshape(TILES // SLOTS, -1) ** 2).sum(axis=1)
    error = (energy.sum() - energy) / COLUMNS
    return float(np.repeat(error, SLOTS * 1024)[on].mean())


@functools.partial(jax.jit, static_argnames=("hashing", "rows", "estimate"))
def estimates(x: jax.Array, hashing: str, rows: int, estimate: str) -> jax.Array:
    """Of every draw, [draws, size]."""

    def draw(seeds: jax.Array) -> jax.Array:
        table = count_sketch.encode(x, seeds, rows=rows, columns=COLUMNS, hashing=hashing)
        return count_sketch.decode(table, seeds, shape=x.shape, hashing=hashing, estimate=estimate)

    return jax.lax.map(draw, SEEDS)


def errors(x: np.ndarray, hashing: str, rows: int, estimate: str = "mean") -> np.ndarray:
    """Of every draw, float64[draws, K] of the K coordinates that are not zero."""
    result = estimates(jnp.asarray(x, jnp.float32), hashing, rows, estimate)
    return np.asarray(result)[:, x != 0].astype(np.float64) - x[x != 0]


def z_score(samples: np.ndarray, expected: float) -> float:
    """How many standard errors the mean of independent samples is off."""
    return float((samples.mean() - expected) / (samples.std(ddof=1) / math.sqrt(samples.size)))


@pytest.mark.parametrize("hashing", ["tiles", slow("elements")])
@pytest.mark.parametrize("name", [n if n == "consecutive" else slow(n) for n in SUPPORTS])
def test_unbiased_with_the_variance_of_theory(name: str, hashing: str) -> None:
    on = SUPPORTS[name]
    x = np.where(on, np.random.default_rng(0).choice([-1.0, 1.0, 0.5], SIZE), 0)
    error = errors(x, hashing, 1)
    weights = np.random.default_rng(1).normal(size=on.sum())
    assert abs(z_score(error.mean(axis=1), 0)) < Z
    assert abs(z_score(error @ weights, 0)) < Z
    expected = expected_error(x, hashing)
    bound = (x**2).sum() / COLUMNS
    assert 0 < expected <= bound
    assert abs(z_score((error**2).mean(axis=1), expected)) < Z


@pytest.mark.parametrize(("tiles", "slots"), [(64, 8), slow(60, 6), slow(99, 33)])
def test_pairs_of_tiles_share_slots_independently(tiles: int, slots: int) -> None:
    """In two rows; `test_tails` has pairs of structures."""
    shapes = tiling.tiling(tiles * 1024, slots * 1024, 1)
    tile = jnp.arange(tiles, dtype=jnp.uint32)

    @jax.jit
    @jax.vmap
    def dealt(seeds: jax.Array) -> jax.Array:
        keys = tiling.keys(seeds, 2)
        return jnp.stack([tiling.slot_of(shapes, Key(*key), tile) for key in keys])

    slot = np.asarray(dealt(SEEDS))
    assert slot.max() < slots
    first, second = np.moveaxis(slot[..., :, None] == slot[..., None, :], 1, 0)
    round_ = np.arange(tiles) // slots
    may = round_[:, None] != round_[None]
    # Whatever the seeds, each slot has one tile of each round.
    assert not first[:, ~may & ~np.eye(tiles, dtype=bool)].any()
    np.testing.assert_allclose(first[:, may].mean(axis=1), 1 / slots, rtol=1e-12)
    assert abs(z_score((first & second)[:, may].mean(axis=1), 1 / slots**2)) < Z


def signs_of_elements(size: int, rows: int) -> np.ndarray:
    _, signs = count_sketch.locations(jnp.arange(size), SEEDS[0], rows=rows, columns=COLUMNS)
    return np.asarray(signs, np.float64)


def signs_of_tiles(size: int, rows: int) -> np.ndarray:
    """From tables that are 1 in one row."""
    tables = jnp.eye(rows)[:, :, None] * jnp.ones((1, 1, 32 * 1024))
    decode = functools.partial(reference.decode, shape=(size,), estimate="sum", planes=32)
    return np.stack([np.asarray(decode(t, SEEDS[0]), np.float64) for t in tables])


@pytest.mark.parametrize("signs_of", [signs_of_elements, slow(signs_of_tiles)])
def test_signs_are_fair_and_uncorrelated(signs_of: Callable[[int, int], np.ndarray]) -> None:
    size, rows = 2**18, 4
    signs = signs_of(size, rows)
    assert (np.abs(signs) == 1).all()
    deviation = 1 / math.sqrt(size)
    assert (np.abs(signs.mean(axis=1)) < Z * deviation).all()
    between = signs @ signs.T / size - np.eye(rows)
    assert (np.abs(between) < Z * deviation).all()
    # 128 and 1024: elements whose signs are bits of one word; 4096: of one word and the next.
    for lag in (1, 2, 8, 128, 256, 1024, 2048, 4096, 8192, 32_768, 65_536):
        lagged = (signs[:, lag:] * signs[:, :-lag]).mean(axis=1)
        assert (np.abs(lagged) < Z / math.sqrt(size - lag)).all(), lag
    triple = (signs[:, 3072:] * signs[:, 2048:-1024] * signs[:, :-3072]).mean(axis=1)
    assert (np.abs(triple) < Z / math.sqrt(size - 3072)).all()
