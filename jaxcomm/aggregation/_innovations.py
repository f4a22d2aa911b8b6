"""The memory of lazy uploads, and when the difference to the last upload is worth sending."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Fast, Memory, PyTree
from jaxcomm.compression._means import headroom
from jaxcomm.compression.feedback._shifted import add, no_sum


class ExactPayload(NamedTuple):
    """The payload of one unit, or a sum of such payloads over workers."""

    values: jax.Array  # float32[shape], scaled so that the sum cannot overflow


def _encode_exactly(context: Context, x: jax.Array) -> tuple[ExactPayload, Memory]:
    return ExactPayload(x * headroom(context.workers)), context.memory


def _decode_exactly(context: Context, payload: ExactPayload) -> jax.Array:
    # `workers` is that of `encode`; `count` payloads were added.
    return payload.values / (context.count * headroom(context.workers))


EXACT = Codec(
    encode=_encode_exactly,
    decode=_decode_exactly,
    combine="sum",
    layout="shared_statistics",
    fast=Fast(linear=("encode",), exposes_nonfinite=("encode",)),
)
"""All coordinates in float32."""


class Upload(NamedTuple):
    """What a worker keeps for one unit: `Memory.own`. All units have one `skipped`."""

    last: Any  # Sum, of all uploaded innovations: what the others know of this worker
    error: Any  # float32[], the mean square of the rounding error of the last upload
    skipped: Any  # float32[], steps since then; a float, so that it has a mean over workers


class Aggregate(NamedTuple):
    """What all workers keep for one unit: `Memory.shared`."""

    mean: Any  # Sum, the mean over workers of their last uploads
    squares: Any  # float32[memory], the mean squares of the last aggregates, the newest first


def first_memory(x: jax.Array, memory: int, max_skip: int) -> Memory:
    """Nothing was uploaded, all aggregates were 0, and all must upload in the first step."""
    zero, overdue = jnp.zeros((), jnp.float32), jnp.array(max_skip, jnp.float32)
    squares = jnp.zeros(memory, jnp.float32)
    return Memory(Upload(no_sum(x), zero, overdue), Aggregate(no_sum(x), squares))


def mean_square(x: jax.Array) -> jax.Array:
    """The mean of the squares, float32[]."""
    return jnp.mean(jnp.square(x))


def is_worth_it(
    memories: list[Memory], sent: list[jax.Array], errors: list[jax.Array], threshold: float
) -> jax.Array:
    r"""Whether a worker uploads its innovation, bool[].

    .. math:: \|\delta_i\|^2 \ge \frac{\xi}{D} \sum_{d=1}^{D} \|\bar x^{t-d}\|^2
              + 3 \big(\|\epsilon_i\|^2 + \|\hat\epsilon_i\|^2\big)

    Sums are over all units. With a threshold of 0, it is always.

    Args:
      memories: The memory of each unit.
      sent: The innovation of each unit, as others would decode it.
      errors: float32[] each, the mean square of its rounding error.
      threshold: The number :math:`\xi`.
    """
    if threshold == 0:
        return jnp.array(True)

    def total(mean_squares: Iterable[jax.Array]) -> jax.Array:
        """The squared norm of all units together."""
        each = zip(sent, mean_squares, strict=True)
        return sum((x.size * square for x, square in each), jnp.float32(0))

    change = total(jnp.mean(each.shared.squares) for each in memories)
    rounding = total(errors) + total(each.own.error for each in memories)
    return total(map(mean_square, sent)) >= threshold * change + 3 * rounding


def uploaded(own: Upload, uploads: jax.Array, innovation: jax.Array, sent: jax.Array) -> Upload:
    """The memory after a step in which `sent` was decoded, which is 0 if nothing was uploaded."""
    return Upload(
        add(own.last, sent),
        jnp.where(uploads, mean_square(innovation - sent), own.error),
        jnp.where(uploads, 0, own.skipped + 1),
    )


def aggregated(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
    """The `finalize` of lazy uploads: the mean of innovations is added to the aggregate."""
    del payload
    before = context.memory.shared
    total = add(before.mean, mean)
    newest = mean_square(total.total)[None]
    squares = jnp.concatenate([newest, before.squares[:-1]])
    return total.total, Memory(context.memory.own, Aggregate(total, squares))
