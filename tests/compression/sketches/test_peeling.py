"""Peeling: exact above its threshold, and what it cannot solve for it leaves alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.sketches._cells import Peeled, peel


def placed(count: int, cells: float, rows: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Cells in rows of their own, and signs, as NumPy draws them."""
    rng = np.random.default_rng(seed)
    columns = int(cells * count / rows)
    index = rng.integers(0, columns, (rows, count)) + columns * np.arange(rows)[:, None]
    return index.astype(np.int32), rng.choice([-1, 1], (rows, count)).astype(np.int32)


def tabulated(values: np.ndarray, index: np.ndarray, sign: np.ndarray) -> np.ndarray:
    table = np.zeros(index.max() + 1, values.dtype)
    np.add.at(table, index, sign * values)
    return table


@functools.partial(jax.jit, static_argnames="wraps")
def solve(
    table: jax.Array, index: jax.Array, sign: jax.Array, real: jax.Array, wraps: bool = False
) -> Peeled:
    wrap = (lambda x: x.astype(jnp.int8).astype(jnp.int32)) if wraps else (lambda x: x)
    return peel(table, index, sign, real, wrap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "cells", "rounds"), [(3000, 1.6, 12), (2**15, 1.3, 40), (300_000, 1.25, 40)]
)
def test_all_are_solved_above_the_threshold(count: int, cells: float, rounds: int) -> None:
    index, sign = placed(count, cells)
    values = np.random.default_rng(1).standard_t(2, count)
    solved = solve(
        jnp.asarray(tabulated(values, index, sign), jnp.float32), index, sign, np.ones(count, bool)
    )
    assert solved.solved.all()
    assert 3 < int(solved.rounds) <= rounds
    # Relative to the largest that was subtracted on the way, of which the largest is a bound.
    bound = 2.0**-21 * np.abs(values).max()
    assert np.abs(np.asarray(solved.values, np.float64) - values).max() <= bound
    assert np.abs(solved.rest).max() <= 4 * bound


def test_below_it_many_are_not_and_stay_in_the_table() -> None:
    count = 3000
    index, sign = placed(count, 1.1)
    values = np.random.default_rng(1).integers(-1000, 1000, count).astype(np.int32)
    peeled = solve(tabulated(values, index, sign), index, sign, np.ones(count, bool))
    solved = np.asarray(peeled.solved)
    assert 0.05 < solved.mean() < 0.5
    np.testing.assert_array_equal(np.asarray(peeled.values)[solved], values[solved])
    assert (np.asarray(peeled.values)[~solved] == 0).all()
    left = np.where(solved, 0, values).astype(np.int32)
    np.testing.assert_array_equal(peeled.rest, tabulated(left, index, sign))


def test_cells_known_modulo_256_are_enough() -> None:
    count = 2000
    index, sign = placed(count, 1.4)
    values = np.random.default_rng(1).integers(-127, 128, count).astype(np.int32)
    table = tabulated(values, index, sign)
    wrapped = table.astype(np.int8).astype(np.int32)
    assert (wrapped != table).sum() > 50
    peeled = solve(wrapped, index, sign, np.ones(count, bool), wraps=True)
    assert peeled.solved.all()
    np.testing.assert_array_equal(peeled.values, values)


def test_only_existing_coordinates_count() -> None:
    count = 500
    index, sign = placed(count, 1.0)
    real = np.random.default_rng(2).random(count) < 0.6
    values = np.where(real, np.arange(count), 0).astype(np.int32)
    peeled = solve(tabulated(values, index, sign), index, sign, real)
    np.testing.assert_array_equal(peeled.solved, real)
    np.testing.assert_array_equal(peeled.values, values)
    nothing = solve(np.zeros(9, np.int32), index[:, :3] % 9, sign[:, :3], np.zeros(3, bool))
    assert not nothing.solved.any() and int(nothing.rounds) == 0
