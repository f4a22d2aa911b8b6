"""Where leaves lie changes what is copied, and nothing of what is computed or sent."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import Codec, _noise, _units
from jaxcomm._contract import Keys
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
from tests.aggregation.runs import refuse

WORKERS = 4

# In the order of a bucket's units: small leaves, then large ones.
SHAPES = {"a": (5,), "b": (2, 3), "c": (), "large": (16, 4), "larger": (9, 8)}


summed, gathered = all_reduce_mean, all_gather_mean
FEEDBACK = error_feedback(scaled(dither(levels=2)))
SHARED: dict[str, Any] = {
    "summed, max": (summed, dither(bits=8)),
    "summed, packed": (summed, dither(levels=1)),
    "summed, fixed threshold": (summed, fixed_threshold(0.5)),
    "summed, min max": (summed, min_max_dither(levels=9)),
    "summed, feedback": (summed, FEEDBACK),
    "summed, diana": (summed, diana(dither(levels=3))),
    "of a tree": (lambda codec: summed(codec, scope="tree", bucket_bytes=4 * 80), dither(bits=8)),
    "gathered, max": (gathered, dither(bits=8)),
    "gathered, feedback": (gathered, FEEDBACK),
    "gathered, exponential": (gathered, exponential_dither()),
    "gathered, cast": (gathered, cast(jnp.bfloat16)),
    "gathered, scaled cast": (gathered, scaled_cast(jnp.float8_e4m3fn)),
    "gathered, natural": (gathered, natural()),
    "gathered, momentum": (gathered, momentum(signs())),
    # A sum of squares is rounded otherwise.
    "summed, l2": (summed, dither(levels=3, norm="l2")),
}


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_units, "LARGE", 32)


def assert_same_draws(one: Any, other: Any) -> None:
    """Equal but for the last bits, where compilers fuse; a level is a thousand times as much."""
    chex.assert_trees_all_close(one, other, rtol=0, atol=2e-6)


def normal(shapes: dict[str, Any] = SHAPES) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.normal(size=(WORKERS, *shape)), jnp.float32)  # noqa: E731
    return {name: draw(shape) for name, shape in shapes.items()}


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
    return second_step(tx, normal(), "data")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_updates_are_those_of_a_joined_bucket(name: str) -> None:
    form, codec = SHARED[name]
    assert codec.layout == "shared_statistics"
    shared = second_update(form(codec))
    joined = second_update(form(codec.replace(layout="concatenated")))
    if name == "summed, l2":
        chex.assert_trees_all_close(shared, joined, rtol=1e-5)
    else:
        assert_same_draws(shared, joined)


STACKED = [
    (summed, dither(levels=3)),
    (summed, FEEDBACK),
    (gathered, error_feedback(one_bit())),
    (gathered, error_feedback(top_k(k=1))),
    (gathered, diana(dither(levels=3))),
    (two_stage_mean, error_feedback(scaled_signs())),
    (two_stage_mean, blockwise(dither(levels=3), 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "codec"), STACKED)
def test_a_stack_equals_its_leaves(
    form: Any, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same diagnostics."""
    shapes = {"a": (4, 6), "b": (6,), "c": (4, 6), "d": (4, 6)}
    grads = normal(shapes) | {"c": 9 * normal(shapes)["c"]}

    def second() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        update, state = second_step(form(codec, scope="leaf", diagnostics=True), grads, "data")
        return update, state.diagnostics

    stacked, diagnostics = second()
    monkeypatch.setattr(_units, "LARGE", 0)
    alone, diagnostics_alone = second()
    assert_same_draws(stacked, alone)
    chex.assert_trees_all_close(diagnostics, diagnostics_alone, rtol=1e-5)


def test_a_bitmap_is_not_shared() -> None:
    codec = nonzero_union(density=0.5).replace(layout="shared_statistics")
    message = "This codec has a statistic of a single array"
    refuse(message, lambda: all_gather_mean(codec, share_statistics=True))


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
        return second_step(tx, normal(), "outer", "inner")[0]

    assert_same_draws(nested(FEEDBACK), nested(FEEDBACK.replace(layout="concatenated")))


def test_bounds_use_the_size_that_shares_statistics() -> None:
    """Of 64 coordinates alone, omega is below 1."""
    tx = all_reduce_mean(error_feedback(dither(levels=17)))
    refuse("for 148 coordinates of 4 workers", lambda: second_update(tx))


@pytest.mark.parametrize("start", [0, 1, 7, 2**32 - 1, 2**33 + 5])
def test_keys_continue_where_a_part_begins(start: int) -> None:
    key = jax.random.key(3, impl="threefry2x32")
    moved = _noise.beyond(Keys(key, key), start)
    first, second = _noise.seeds(key)
    position = jnp.arange(9, dtype=jnp.uint32) + jnp.uint32(start % 2**32)
    expected = _hash.bits(position, first, second)
    for part in moved:
        chex.assert_trees_all_equal(_noise.bits(part, (9,)), expected)
