"""Where leaves lie changes what is copied, and nothing of what is computed or sent."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcomm import Codec, _noise, _units
from jaxcomm._contract import Coins
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean, hierarchical, two_stage_mean
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import diana, error_feedback, momentum
from jaxcomm.compression.quantizers import (
    cast,
    dither,
    exponential_dither,
    fixed_threshold,
    min_max_dither,
    natural,
    one_bit,
    scaled_cast,
    scaled_signs,
    signs,
)
from jaxcomm.compression.sparsifiers import nonzero_union, top_k
from pallas_kernels import _hash

WORKERS = 4

# In the order of a bucket's units: small leaves, then large ones.
SHAPES = {"a": (5,), "b": (2, 3), "c": (), "large": (16, 4), "larger": (9, 8)}

SUMMED = {
    "max": dither(bits=8),
    "packed": dither(levels=1),
    "fixed threshold": fixed_threshold(0.5),
    "min max": min_max_dither(levels=9),
    "feedback": error_feedback(scaled(dither(levels=2))),
    "diana": diana(dither(levels=3)),
}
GATHERED = {
    "max": dither(bits=8),
    "feedback": error_feedback(scaled(dither(levels=2))),
    "exponential": exponential_dither(),
    "cast": cast(jnp.bfloat16),
    "scaled cast": scaled_cast(jnp.float8_e4m3fn),
    "natural": natural(),
    "momentum": momentum(signs()),
}


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_units, "LARGE", 32)


def assert_same_draws(one: Any, other: Any) -> None:
    """Equal but for the last bits, where compilers fuse; a level is a thousand times as much."""
    chex.assert_trees_all_close(one, other, rtol=0, atol=2e-6)


def updates(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: jax.random.normal(key, (WORKERS, *shape), jnp.float32)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def second_step(tx: optax.GradientTransformation, grads: Any, *axes: str) -> tuple[Any, Any]:
    """Each worker's update and state after it; each axis but the last is of two."""

    def steps(grads: Any) -> tuple[Any, Any]:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            return tx.update(grads, carry[1]), None

        return jax.lax.scan(step, (grads, tx.init(grads)), length=2)[0]

    for axis in reversed(axes):
        steps = jax.vmap(steps, axis_name=axis)
    split = jax.tree.map(lambda x: x.reshape(*[2] * (len(axes) - 1), -1, *x.shape[1:]), grads)
    return jax.jit(steps)(split)


def second_update(tx: optax.GradientTransformation) -> dict[str, jax.Array]:
    """Of each worker."""
    return second_step(tx, updates(), "data")[0]


def both_layouts(
    form: Callable[[Codec], optax.GradientTransformation], codec: Codec
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    assert codec.layout == "shared_statistics"
    joined = codec.replace(layout="concatenated")
    return second_update(form(codec)), second_update(form(joined))


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMED)
def test_sums_are_those_of_a_joined_bucket(name: str) -> None:
    shared, joined = both_layouts(lambda codec: all_reduce_mean(codec), SUMMED[name])
    assert_same_draws(shared, joined)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATHERED)
def test_means_are_those_of_a_joined_bucket(name: str) -> None:
    shared, joined = both_layouts(lambda codec: all_gather_mean(codec), GATHERED[name])
    assert_same_draws(shared, joined)


@pytest.mark.slow
def test_trees_are_those_of_joined_buckets() -> None:
    shared, joined = both_layouts(
        lambda codec: all_reduce_mean(codec, scope="tree", bucket_bytes=4 * 80),
        dither(bits=8),
    )
    assert_same_draws(shared, joined)


@pytest.mark.slow
def test_a_sum_of_squares_is_rounded_otherwise() -> None:
    codec = dither(levels=3, norm="l2")
    shared, joined = both_layouts(lambda codec: all_reduce_mean(codec), codec)
    chex.assert_trees_all_close(shared, joined, rtol=1e-5)


PER_LEAF = {
    "summed": lambda codec, diagnostics: all_reduce_mean(
        codec, scope="leaf", diagnostics=diagnostics
    ),
    "gathered": lambda codec, diagnostics: all_gather_mean(
        codec, scope="leaf", diagnostics=diagnostics
    ),
    "two stages": lambda codec, diagnostics: two_stage_mean(
        codec, scope="leaf", diagnostics=diagnostics
    ),
}
STACKED = [
    ("summed", dither(levels=3)),
    ("summed", error_feedback(scaled(dither(levels=2)))),
    ("gathered", error_feedback(one_bit())),
    ("gathered", error_feedback(top_k(k=1))),
    ("gathered", diana(dither(levels=3))),
    ("two stages", error_feedback(scaled_signs())),
    ("two stages", blockwise(dither(levels=3), 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("diagnostics", [False, True])
@pytest.mark.parametrize(("form", "codec"), STACKED)
def test_a_stack_is_its_leaves(
    form: str, codec: Codec, diagnostics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_shape = jax.random.normal(jax.random.key(1), (WORKERS, 3, 4, 6), jnp.float32)
    grads = {
        "a": of_shape[:, 0],
        "b": of_shape[:, 1, 0],
        "c": 9 * of_shape[:, 1],
        "d": of_shape[:, 2],
    }

    def second() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        update, state = second_step(PER_LEAF[form](codec, diagnostics), grads, "data")
        return update, state.diagnostics

    stacked, told = second()
    monkeypatch.setattr(_units, "LARGE", 0)
    alone, told_alone = second()
    assert_same_draws(stacked, alone)
    chex.assert_trees_all_close(told, told_alone, rtol=1e-5)


def test_leaves_of_one_shape_are_stacked() -> None:
    leaves = [
        jnp.full(shape, float(i)) for i, shape in enumerate([(2,), (3,), (2,), (0,), (0,), (99,)])
    ]
    split = _units.split(leaves, "leaf", 4, stacks=True)
    assert [unit.leaves for unit in split.units] == [(0, 2), (1,), (3,), (4,), (5,)]
    assert [x.shape for x in split.arrays] == [(2, 2), (3,), (0,), (0,), (99,)]
    chex.assert_trees_all_equal(split.join(split.arrays), leaves)


def test_units_and_what_they_share() -> None:
    split = _units.split({name: x[0] for name, x in updates().items()}, "bucket", 4 * 80)
    assert [x.shape for x in split.arrays] == [(76,), (72,)]
    shared = _units.split(
        {name: x[0] for name, x in updates().items()}, "bucket", 4 * 80, layout="shared_statistics"
    )
    assert [x.shape for x in shared.arrays] == [(12,), (16, 4), (9, 8)]
    assert shared.units == [
        _units.Unit((0, 1, 2), "concatenated", (0,), 0, 0, 76),
        _units.Unit((3,), "alone", (0,), 12, 0, 76),
        _units.Unit((4,), "alone", (1,), 0, 1, None),
    ]


def test_blocks_share_nothing() -> None:
    split = _units.split(
        {name: x[0] for name, x in updates().items()}, "tree", 2**20, layout="independent"
    )
    assert [unit.group for unit in split.units] == [0, 1, 2]
    assert {unit.statistics_size for unit in split.units} == {None}
    assert blockwise(dither(), 8).layout == "independent"


def test_a_layout_is_one_of_three() -> None:
    with pytest.raises(
        ValueError, match=r"`layout` must be one of .*'shared_statistics'.*, got 'joind'"
    ):
        all_reduce_mean(dither().replace(layout="joind"))


def test_a_bitmap_is_not_shared() -> None:
    codec = nonzero_union(density=0.5).replace(layout="shared_statistics")
    with pytest.raises(ValueError, match="This codec has a statistic of a single array"):
        all_gather_mean(codec, share_statistics=True)


@pytest.mark.slow
def test_blocks_with_feedback_may_be_of_a_tree() -> None:
    codec = error_feedback(blockwise(dither(levels=15), 4))
    of_tree, of_bucket = (all_reduce_mean(codec, scope=s) for s in ("tree", "bucket"))
    assert_same_draws(second_update(of_tree), second_update(of_bucket))


@pytest.mark.slow
def test_nested_stages_are_those_of_joined_buckets() -> None:
    def nested(codec: Codec) -> dict[str, jax.Array]:
        tx = hierarchical(
            all_reduce_mean(dither(bits=8), axis_name="inner"),
            all_gather_mean(codec, axis_name="outer"),
        )
        return second_step(tx, updates(), "outer", "inner")[0]

    codec = error_feedback(scaled(dither(levels=2)))
    assert_same_draws(nested(codec), nested(codec.replace(layout="concatenated")))


def test_a_bound_is_asked_for_what_shares_statistics() -> None:
    """Of 64 coordinates alone, omega is below 1."""
    tx = all_reduce_mean(error_feedback(dither(levels=17)))
    with pytest.raises(ValueError, match="for 148 coordinates of 4 workers"):
        second_update(tx)


@pytest.mark.parametrize("start", [0, 1, 7, 2**32 - 1, 2**33 + 5])
def test_coins_go_on_where_a_part_begins(start: int) -> None:
    key = jax.random.key(3, impl="threefry2x32")
    moved = _noise.beyond(Coins(key, key), start)
    first, second = _noise.seeds(key)
    position = jnp.arange(9, dtype=jnp.uint32) + jnp.uint32(start % 2**32)
    expected = _hash.bits(position, first, second)
    for coin in moved:
        chex.assert_trees_all_equal(_noise.bits(coin, (9,)), expected)
