"""The plain mean, in the dtype of the update; 16-bit leaves in two stages."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName, Codec, PyTree
from jaxcomm._mesh import is_all_manual
from jaxcomm._require import checked, own_weight
from jaxcomm._units import LARGE
from jaxcomm.aggregation._aggregator import stateless
from jaxcomm.aggregation._coded import weigh, weighted
from jaxcomm.aggregation._exchange import join_small, sum_together
from jaxcomm.aggregation._rows import ROW_CUTS
from jaxcomm.aggregation._two_stage import two_stage_mean
from jaxcomm.compression import blockwise
from jaxcomm.compression._means import headroom
from jaxcomm.compression.quantizers import cast, scaled_cast

_ROWS = ROW_CUTS["block"]


def is_narrow(x: jax.Array) -> bool:
    """Whether an update has 16-bit floats, at least one."""
    return x.dtype.itemsize == 2 and x.size > 0


def mean_of_rows(rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """The mean over the first axis, in at least float32, rounded once to the dtype of `rows`."""
    workers = len(rows)
    small = headroom(workers)
    wide = (rows if rows.dtype.itemsize >= 4 else rows.astype(jnp.float32)) * small
    if weights is not None:
        each = weights.reshape(-1, *[1] * (rows.ndim - 1))
        wide = weighted(wide, each, jnp.sum(weights), workers)
    return (jnp.sum(wide, axis=0) / (workers * small)).astype(rows.dtype)


def _exchanged(
    axis_name: AxisName, vectors: list[jax.Array], own: jax.Array | None
) -> list[jax.Array]:
    """The means of the vectors, in two collectives; weights travel beside the rows."""
    workers = _axis.size(axis_name)
    rows = [_ROWS.split(x, workers) for x in vectors]
    sent = rows, None if own is None else jnp.broadcast_to(own, (workers,))
    with jax.named_scope("rows"):
        received, weights = exchange_rows(sent, axis_name)
    with jax.named_scope("means"):
        gathered = gather_contents([mean_of_rows(x, weights) for x in received], axis_name)
    return [_ROWS.join(mean, x.shape) for mean, x in zip(gathered, vectors, strict=True)]


def narrow_mean(
    axis_name: AxisName, leaves: list[jax.Array], weight: jax.Array | float | None
) -> list[jax.Array]:
    """The mean over workers of 16-bit leaves, rounded once.

    Each worker owns a part of the leaves. It receives this part from all workers, sums in float32,
    rounds to nearest, and sends the result to all workers. Both messages have 16-bit words.

    Args:
      axis_name: The axis of the mean, of at least two workers.
      leaves: Arrays for which `is_narrow` is true.
      weight: This worker's weight, or `None`.
    """
    own = None if weight is None else own_weight(weight)
    vectors, restore = join_small(leaves, LARGE)
    # A message has one type: a result must not vary over outer axes only because others do.
    together: dict[frozenset[str], list[int]] = {}
    for position, vector in enumerate(vectors):
        together.setdefault(_axis.varying(vector), []).append(position)
    means = [*vectors]
    for positions in together.values():
        exchanged = _exchanged(axis_name, [vectors[i] for i in positions], own)
        for position, mean in zip(positions, exchanged, strict=True):
            means[position] = mean
    return restore(means)


def _wire_codec(wire_dtype: Any, block_size: int) -> Codec:
    dtype = jnp.dtype(wire_dtype)
    if dtype == jnp.bfloat16:
        return cast(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
        return blockwise(scaled_cast(dtype), block_size)
    raise ValueError(
        f"`wire_dtype` must be bfloat16 or a float8, such as 'float8_e4m3fn', got {dtype}."
    )


def _summed(
    axis_name: AxisName, leaves: list[jax.Array], weight: jax.Array | float | None
) -> list[jax.Array]:
    """The mean over workers by an all-reduce in at least float32."""
    workers = _axis.size(axis_name)
    small = headroom(workers)
    weighed = (lambda x: x) if weight is None else weigh(axis_name, weight, leaves)

    def widened(x: jax.Array) -> jax.Array:
        wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
        return weighed(wide * small)

    wide = [widened(x) for x in leaves]
    # Concatenation would gather leaves that are sharded over an automatic axis.
    concatenated = _axis.by_gloo() and is_all_manual()
    with jax.named_scope("values"):
        totals = (
            sum_together(axis_name, wide)
            if concatenated
            else [lax.psum(x, axis_name) for x in wide]
        )
    rest = workers * small  # 1 for powers of two, by which 292 leaves need no division.
    means = totals if rest == 1 else [total / rest for total in totals]
    return [each.astype(x.dtype) for x, each in zip(leaves, means, strict=True)]


@checked
def mean(
    axis_name: AxisName = "data", *, wire_dtype: Any = None, block_size: int = 256
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces each worker's update by the mean over workers, in float32.

    .. math:: \bar x = \frac{1}{n} \sum_{i=1}^n x_i

    float32 leaves travel in a ring all-reduce: a worker sends :math:`2 (n-1)/n` times 4 bytes per
    coordinate. This holds for float8 leaves too; float64 leaves take 8 bytes.

    bfloat16 and float16 leaves travel as 16-bit words: :math:`2 (n-1)/n` times 2 bytes per
    coordinate, with the leaves padded to n equal parts. Each worker owns a part. It receives this
    part from all workers, sums in float32, rounds the mean to nearest, and sends it to all workers.
    The result equals that of a float32 all-reduce that is rounded to the dtype of the leaf, up to
    the order of the sum. Weights travel beside the parts, 4 bytes for each other worker. The owner
    multiplies by them in float32, before the only rounding. Each stage of
    :func:`jaxcomm.hierarchical` rounds once. A tree of mixed dtypes takes three collectives, and
    one more with weights.

    If an axis of the mesh is automatic, as with `jax.shard_map(axis_names={"data"})`, 16-bit leaves
    are sent as float32 in an all-reduce, since the parts would gather sharded leaves.
    :func:`jaxcomm.shard_local` sends 16-bit words there.

    With `wire_dtype`, all leaves are rounded to that dtype before and after the sum, and travel in
    the same two stages. This is :func:`jaxcomm.two_stage_mean` with a cast. A worker sends
    :math:`2 (n-1)/n` times 2 bytes (bfloat16) or 1 byte (float8) per coordinate. For float8 it also
    sends 4 bytes per block, since each block has one scale.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      wire_dtype: `jnp.bfloat16`, or a float8 such as `jnp.float8_e4m3fn`. Default: no
        rounding before the sum, and the mean has the dtype of the leaf.
      block_size: The number of coordinates that share a scale, for float8.

    Returns:
      A transformation to place before the optimizer, and before `optax.clip_by_global_norm`, which
      then clips the mean. Updates are equal on all workers and keep
      their shape and dtype. `update(..., weight=w)` computes a weighted mean. NaN and infinity
      propagate to every worker.

    Raises:
      ValueError: If `wire_dtype` is neither bfloat16 nor a float8. In `update`, if `axis_name` is
        not bound, or an update is already summed or not floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.mean("data")
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]
    """
    if wire_dtype is not None:
        return two_stage_mean(_wire_codec(wire_dtype, block_size), axis_name=axis_name)

    def average(updates: PyTree, weight: jax.Array | float | None) -> PyTree:
        leaves, treedef = jax.tree.flatten(updates)
        # Rows would gather leaves that are sharded over an automatic axis.
        in_rows = _axis.size(axis_name) > 1 and is_all_manual()
        narrow = [in_rows and is_narrow(x) for x in leaves]
        wide = [x for x, each in zip(leaves, narrow, strict=True) if not each]
        short = [x for x, each in zip(leaves, narrow, strict=True) if each]
        summed = iter(_summed(axis_name, wide, weight) if wide or not short else [])
        rounded = iter(narrow_mean(axis_name, short, weight) if short else [])
        results = [next(rounded if each else summed) for each in narrow]
        return jax.tree.unflatten(treedef, results)

    return stateless(axis_name, "the exact mean", average)
