"""What a codec remembers: each worker's own, what all share, and that NaN touches neither."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import Codec, Context, Memory
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from tests.workers import MODE_ROWS, Mode, aggregator, initial, mesh_of

AGGREGATORS = pytest.mark.parametrize(
    "aggregate", [jaxcomm.all_reduce_mean, jaxcomm.all_gather_mean]
)


class Sent(NamedTuple):
    whole: jax.Array


def remainders() -> Codec:
    """Sends whole numbers exactly, keeps the rest for the next step, and adds up the means."""

    def encode(context: Context, x: jax.Array) -> Any:
        total = x + context.memory.own
        whole = jnp.trunc(total)
        return Sent(whole.astype(jnp.int32)), context.memory._replace(own=total - whole)

    def finalize(context: Context, payload: Any, mean: jax.Array) -> tuple[jax.Array, Memory]:
        return mean, context.memory._replace(shared=context.memory.shared + mean)

    return Codec(
        init=lambda x: Memory(own=jnp.zeros_like(x), shared=jnp.zeros_like(x)),
        encode=encode,
        decode=lambda context, payload: payload.whole.astype(jnp.float32) / context.count,
        finalize=finalize,
        combine="sum",
    )


def _memory(state: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(state.own.per_worker["data"][0]), np.asarray(state.shared[0])


@AGGREGATORS
@pytest.mark.parametrize("mode", MODE_ROWS)
def test_own_and_shared_memory(aggregate: Any, mode: Mode) -> None:
    given = jnp.array([[0.25, 1.5], [2.75, -0.5], [0.5, 0.5]])
    tx = aggregate(remainders())
    run, state = aggregator(tx, 3, mode), initial(tx, given, mode)
    own, shared = np.zeros((3, 2)), np.zeros(2)
    for _ in range(4):
        results, state = run(given, state, jnp.ones(3))
        whole = np.trunc(given + own)
        own, shared = given + own - whole, shared + whole.mean(axis=0)
        np.testing.assert_allclose(results, np.broadcast_to(whole.mean(axis=0), (3, 2)), rtol=1e-6)
        np.testing.assert_allclose(_memory(state)[0], own)
        np.testing.assert_allclose(_memory(state)[1], shared, rtol=1e-6)
    np.testing.assert_allclose(shared, 4 * np.asarray(given).mean(0) - own.mean(0), rtol=1e-6)


@AGGREGATORS
@pytest.mark.parametrize("mode", MODE_ROWS)
def test_a_nan_anywhere_leaves_all_memory_as_it_was(aggregate: Any, mode: Mode) -> None:
    given = jnp.array([[0.25, 1.5], [2.75, -0.5], [0.5, 0.5]])
    tx = aggregate(remainders())
    run = aggregator(tx, 3, mode)
    _, before = run(given, initial(tx, given, mode), jnp.ones(3))
    results, after = run(given.at[1, 0].set(jnp.nan), before, jnp.ones(3))
    assert np.isnan(np.asarray(results)).all()
    chex.assert_trees_all_equal(_memory(before), _memory(after))
    assert after.step == before.step + 1


@AGGREGATORS
def test_state_that_differs_by_worker_needs_the_workers(aggregate: Any) -> None:
    tx = aggregate(remainders())
    with pytest.raises(ValueError, match=r"jaxcomm\.init\(tx, params, mesh\)"):
        tx.init(jnp.zeros(3))


@AGGREGATORS
def test_each_worker_holds_its_slice(aggregate: Any) -> None:
    tx = optax.chain(aggregate(remainders()), optax.sgd(0.1))
    state = jaxcomm.init(tx, {"w": jnp.zeros(3)}, mesh_of(4))
    residual = state[0].own.per_worker["data"][0]
    assert residual.shape == (4, 3)
    assert [shard.data.shape for shard in residual.addressable_shards] == [(1, 3)] * 4
    assert jaxcomm.init(tx, {"w": jnp.zeros(3)}, 4)[0].own.per_worker["data"][0].shape == (4, 3)


def test_a_codec_that_cannot_be_summed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`combine`=None\. Use `all_gather_mean`"):
        jaxcomm.all_reduce_mean(remainders().replace(combine=None))


@AGGREGATORS
def test_a_weight_that_is_no_scalar(aggregate: Any) -> None:
    tx = aggregate(remainders())
    weigh = lambda x: tx.update(x, tx.init(x), weight=jnp.ones(2))  # noqa: E731
    with pytest.raises(
        ValueError, match=r"`weight` must be a scalar on each worker, got shape \(2,\)"
    ):
        jax.vmap(weigh, axis_name="data")(jnp.ones((2, 3)))


@pytest.mark.parametrize(
    ("aggregate", "options", "message"),
    [
        (jaxcomm.all_reduce_mean, {"scope": "tree"}, "`scope`='tree' shares statistics"),
        (jaxcomm.all_gather_mean, {"scope": "tree"}, "`scope`='tree' shares statistics"),
        (
            jaxcomm.all_gather_mean,
            {"share_statistics": True},
            "`share_statistics`=True shares statistics",
        ),
    ],
)
def test_feedback_needs_statistics_of_its_own(aggregate: Any, options: dict, message: str) -> None:
    tx = aggregate(error_feedback(dither(bits=8)), **options)
    with pytest.raises(ValueError, match=message):
        jaxcomm.init(tx, jnp.zeros(3), 4)
    without = aggregate(dither(bits=8), **options)
    jaxcomm.init(without, jnp.zeros(3), 4)
