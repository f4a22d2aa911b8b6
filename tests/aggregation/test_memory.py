"""What a codec remembers: each worker's own, what all share, and that NaN touches neither."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Codec, Context, Memory
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from tests.aggregation.runs import refuse, simulated, steps
from tests.workers import MODE_ROWS, Mode, mesh_of

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


@AGGREGATORS
@pytest.mark.parametrize("mode", MODE_ROWS)
def test_own_and_shared_memory(aggregate: Any, mode: Mode) -> None:
    """A NaN of one worker, in the third step, changes neither."""
    given, own, shared = np.array([[0.25, 1.5], [2.75, -0.5], [0.5, 0.5]]), np.zeros((3, 2)), 0
    updates = [given] * 5
    updates[2] = np.where(np.arange(3)[:, None] == 1, np.nan, given)
    for number, (results, state) in enumerate(steps(aggregate(remainders()), updates, mode)):
        whole = np.full((3, 2), np.nan)
        if number != 2:
            whole = np.trunc(given + own)
            own, shared = given + own - whole, shared + whole.mean(axis=0)
        np.testing.assert_allclose(results, np.tile(whole.mean(axis=0), (3, 1)), rtol=1e-6)
        np.testing.assert_allclose(state.own.per_worker["data"][0], own)
        np.testing.assert_allclose(state.shared[0], shared, rtol=1e-6)
        assert state.step == number + 1
    np.testing.assert_allclose(shared, 4 * given.mean(0) - own.mean(0), rtol=1e-6)


@AGGREGATORS
def test_each_worker_holds_its_slice(aggregate: Any) -> None:
    tx, params = aggregate(remainders()), {"w": jnp.zeros(3)}
    residual = jaxcomm.init(tx, params, mesh_of(4)).own.per_worker["data"][0]
    assert residual.shape == (4, 3)
    assert [shard.data.shape for shard in residual.addressable_shards] == [(1, 3)] * 4
    assert jaxcomm.init(tx, params, 4).own.per_worker["data"][0].shape == (4, 3)


def test_a_weight_must_be_a_scalar() -> None:
    tx, message = jaxcomm.mean(), r"`weight` must be a scalar on each worker, got shape \(2,\)"
    refuse(message, lambda: simulated(tx, jnp.ones((2, 3)), weight=jnp.ones(2)))


def test_a_codec_that_cannot_be_summed_is_refused() -> None:
    codec = remainders().replace(combine=None)
    refuse(r"`combine`=None\. Use `all_gather_mean`", lambda: jaxcomm.all_reduce_mean(codec))


@pytest.mark.parametrize(
    ("aggregate", "options", "message"),
    [
        (jaxcomm.all_reduce_mean, {"scope": "tree"}, "`scope`='tree' shares statistics"),
        (jaxcomm.all_gather_mean, {"share_statistics": True}, "`share_statistics`=True shares"),
    ],
)
def test_feedback_needs_separate_statistics(aggregate: Any, options: dict, message: str) -> None:
    codec = error_feedback(dither(bits=8))
    refuse(message, lambda: jaxcomm.init(aggregate(codec, **options), jnp.zeros(3), 4))
