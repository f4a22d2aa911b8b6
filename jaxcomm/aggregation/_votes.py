"""The majority vote of signs: one bit a coordinate, there and back."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _buckets
from jaxcomm._base import AxisName, PyTree
from jaxcomm.aggregation._agreement import agree, all_finite
from jaxcomm.aggregation._stages import averages_over

_WORD = 32


def _pack(bits: jax.Array, words: int) -> jax.Array:
    """bool[d] as uint32[words], the first bit lowest; zeros fill the rest."""
    filled = jnp.pad(bits, (0, words * _WORD - bits.size)).reshape(words, _WORD)
    shifts = jnp.arange(_WORD, dtype=jnp.uint32)[None]
    return jnp.sum(filled.astype(jnp.uint32) << shifts, axis=1, dtype=jnp.uint32)


def _unpack(words: jax.Array) -> jax.Array:
    """uint32[..., words] as bits 0 and 1, uint32[..., 32 words]."""
    shifts = jnp.arange(_WORD, dtype=jnp.uint32).reshape((1,) * words.ndim + (_WORD,))
    return ((words[..., None] >> shifts) & jnp.uint32(1)).reshape(*words.shape[:-1], -1)


def _majority(axis_name: AxisName, x: jax.Array) -> jax.Array:
    """The majority of `x >= 0` over workers, +1 or -1 as float32, equal on all workers."""
    if x.size == 0:
        return lax.psum(x, _axis.names(axis_name))  # Sends nothing, and types the result as equal.
    workers = _axis.size(axis_name)
    width = math.ceil(x.size / (_WORD * workers))
    rows = _pack(x >= 0, workers * width).reshape(workers, width)
    received = _unpack(_axis.exchange(rows, axis_name))
    for_plus = jnp.sum(received, axis=0, dtype=jnp.uint32)
    elected = _pack(2 * for_plus >= workers, width)
    signs = _unpack(_axis.gather(elected, axis_name)).ravel()[: x.size]
    return jnp.where(signs == 1, 1.0, -1.0).astype(jnp.float32)


def votes(axis_name: AxisName = "data") -> optax.GradientTransformationExtraArgs:
    r"""Replaces each worker's update by the sign that most workers see: +1 or -1.

    .. math:: v = \operatorname{sgn} \sum_{i=1}^n \operatorname{sgn}(x_i), \qquad
              \operatorname{sgn}(0) = +1

    A zero is a vote for +1, and so is -0.0; where the votes of an even number of workers tie, +1
    wins. No mean and not unbiased: magnitudes are lost, so that the step is as long as the learning
    rate says, whatever the gradient. A coordinate that is 0 on all workers moves all the same.

    Of :math:`n` workers, each counts the votes of one :math:`n`-th of the :math:`d` coordinates and
    all gather the winners, a bit a coordinate both ways: a worker sends :math:`2 (n-1)/n` times
    :math:`d / 8` bytes, :math:`d` padded to a multiple of :math:`32 n` a bucket of 32 MiB of
    float32, in uint32 words; besides, :math:`2 (n-1)/n` times 4 bytes for a flag. Against a float32
    all-reduce that is 32 times less, at any :math:`n`.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation to place before the optimizer, without state. Updates come back equal on all
      workers, in their shape and dtype; a non-finite coordinate on any worker makes them NaN on
      all.

    Raises:
      ValueError: In `update`, if a `weight` is given, since votes have none; if `axis_name` is not
        bound, or an update is already summed or not floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.votes("data")
      >>> elect = lambda x: tx.update(x, tx.init(x))[0]
      >>> gradients = jnp.array([[0.1, -2.0], [0.2, 5.0], [-9.0, -1.0]])
      >>> print(jax.vmap(elect, axis_name="data")(gradients))
      [[ 1. -1.]
       [ 1. -1.]
       [ 1. -1.]]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.

    Differs from the paper: no server counts, each worker does for its part; zeros and ties are
    +1, where the paper's sign leaves them at 0, which one bit cannot say.
    """

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    @averages_over(axis_name)
    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, optax.EmptyState]:
        del params, extra_args
        if weight is not None:
            raise ValueError(
                "`votes` takes no `weight`: one bit a coordinate counts each worker once. Leave "
                "the weight out, or use an aggregator that forms a mean."
            )
        _axis.require_local(updates, axis_name, outer_axes)
        units, join = _buckets.split(updates, "bucket", _buckets.BUCKET_BYTES)
        if not units:
            return updates, state
        _, finite = agree(axis_name, (), [], all_finite(units))
        elected = [_majority(axis_name, x) for x in units]
        return join([jnp.where(finite, signs, jnp.nan) for signs in elected]), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
