"""Where the largest are: a threshold and a sample find what a sort does, ties and all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcomm.compression.sparsifiers import _largest
from jaxcomm.compression.sparsifiers._largest import by_sample, by_sort, by_threshold, largest
from tests.slow import slow

SIZE = 1003
NORMAL = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
TIES = np.abs(np.round(2 * NORMAL))
INPUTS = [
    np.abs(NORMAL),
    TIES,
    np.zeros(SIZE, np.float32),
    np.where(np.arange(SIZE) % 100 == 7, np.abs(NORMAL), 0),
    np.where(np.arange(SIZE) % 2, np.float32(np.inf), np.float32(3e38)),
    np.abs(NORMAL) * np.float32(1e-39),
    np.where(np.arange(SIZE) % 3, np.abs(np.round(NORMAL)), np.float32(-1)),
]


def in_order(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """The oracle: a stable sort, by falling magnitude."""
    return np.sort(np.argsort(-magnitudes, kind="stable")[:k])


@pytest.mark.parametrize("k", [31, slow(1), slow(500), slow(SIZE)])
def test_a_threshold_selects_the_same_as_a_sort(k: int) -> None:
    x = jnp.asarray(np.stack(INPUTS), jnp.float32)
    found, expected = (
        jax.jit(jax.vmap(functools.partial(each, k=k)))(x) for each in (by_threshold, by_sort)
    )
    np.testing.assert_array_equal(found, expected)
    assert all(
        np.array_equal(each, in_order(row, k))
        for each, row in zip(expected, INPUTS[:2], strict=False)
    )


@pytest.mark.parametrize("size", [*map(slow, (1, 32, 33)), 31])
def test_any_size(size: int) -> None:
    x = jnp.asarray(TIES[:size])
    for k in {1, size // 2 or 1, size}:
        for each in (by_threshold, by_sample):
            found = jax.jit(each, static_argnums=1)(x, k)
            np.testing.assert_array_equal(found, by_sort(x, k))


@pytest.mark.parametrize("words", [3, 70])
def test_the_first_bits_are_those_of_the_first_positions(words: int) -> None:
    given = np.random.default_rng(0).integers(0, 2**32, words, dtype=np.uint32)
    planes = np.arange(32, dtype=np.uint32)[:, None]
    marks = (given >> planes & 1).ravel()  # Bit j of word i is that of position j words + i.
    first_bits = jax.jit(_largest.first_bits)
    for wanted in (1, 7, 31, 40, int(marks.sum())):
        kept = np.where(np.cumsum(marks) <= wanted, marks, 0).reshape(32, words)
        expected = np.bitwise_or.reduce(kept.astype(np.uint32) << planes, axis=0)
        np.testing.assert_array_equal(first_bits(jnp.asarray(given), jnp.int32(wanted)), expected)


WIDE = 2**17 + 77  # No multiple of anything.
STRIDE = _largest._plan(WIDE, WIDE // 100).stride
DRAWN = np.abs(np.random.default_rng(1).standard_normal(WIDE)).astype(np.float32)
PLACES = np.arange(WIDE)
OFTEN_MISSED = {
    "normal": DRAWN,
    "constant": np.ones(WIDE, np.float32),
    "99 % zeros": np.where(PLACES % 100 == 7, DRAWN, 0),
    "half unwanted": np.where(PLACES % 2, DRAWN, np.float32(-1)),
    "descending": np.sort(DRAWN)[::-1].copy(),
    "large where sampled": np.where(PLACES % STRIDE == 0, DRAWN + 9, DRAWN),
    "small where sampled": np.where(PLACES % STRIDE == 0, 0, DRAWN),
    "ties of bfloat16": np.asarray(jnp.asarray(DRAWN, jnp.bfloat16), np.float32),
    "clustered": np.where(PLACES // 2048 == 40, DRAWN + 9, DRAWN),
    "ties above and below": np.where(PLACES % 257 == 3, np.float32(5), np.minimum(DRAWN, 2)),
    "huge": np.where(PLACES % 50, DRAWN * np.float32(1e37), np.float32(np.inf)),
}


@pytest.mark.parametrize("k", [*map(slow, (1, 100, WIDE // 100, WIDE // 3)), WIDE - 1, slow(WIDE)])
def test_any_sample_selects_the_same_as_a_sort(k: int) -> None:
    select = jax.jit(by_sample, static_argnums=1)
    for name, x in OFTEN_MISSED.items():
        np.testing.assert_array_equal(select(jnp.asarray(x), k), in_order(x, k), err_msg=name)


@pytest.mark.slow
def test_samples_under_vmap() -> None:
    names = ["normal", "constant", "99 % zeros", "small where sampled"]
    x = np.stack([OFTEN_MISSED[name] for name in names])
    found = jax.jit(jax.vmap(lambda row: largest(row, 1000)))(x)
    np.testing.assert_array_equal(found, [in_order(row, 1000) for row in x])


def test_a_sample_on_a_mesh_in_a_loop() -> None:
    x = np.stack([OFTEN_MISSED[name] for name in ("constant", "normal")])
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    local = jax.sharding.PartitionSpec("data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=local, out_specs=local)
    def found(x: jax.Array) -> jax.Array:
        _, each = lax.scan(lambda _, row: (None, largest(row, 700, jnp.abs)), None, -x)
        return each

    np.testing.assert_array_equal(found(x), [in_order(row, 700) for row in x])


def test_the_number_of_selected_may_be_traced() -> None:
    numbers = np.where(PLACES[:200] % 3, PLACES[:200] % 7, 0).astype(np.uint32)
    take_largest = jax.jit(_largest.take_largest)
    for k in (0, 3, 77, 200):
        expected = in_order(numbers.astype(np.float64), k)
        taken = take_largest(jnp.asarray(numbers), jnp.int32(k))
        np.testing.assert_array_equal(np.flatnonzero(taken), expected[numbers[expected] > 0])


@pytest.mark.slow
def test_places_of_more_marks_than_the_capacity_and_of_none() -> None:
    marks = OFTEN_MISSED["99 % zeros"] > 0
    for wanted, capacity in ((marks, 100), (marks, WIDE // 50), (np.zeros_like(marks), 5)):
        found = np.flatnonzero(wanted)[:capacity]
        expected = np.pad(found, (0, capacity - found.size), constant_values=WIDE)
        np.testing.assert_array_equal(_largest.places(jnp.asarray(wanted), capacity), expected)


def test_a_sample_sorts_nothing() -> None:
    program = jax.jit(lambda x: by_sample(x, 1000)).lower(OFTEN_MISSED["normal"]).as_text()
    assert "stablehlo.sort" not in program and "top_k" not in program
