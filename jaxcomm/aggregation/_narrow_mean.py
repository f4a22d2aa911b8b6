"""The mean of 16-bit updates: 16-bit words on the wire, sums in float32."""

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName
from jaxcomm._require import own_weight
from jaxcomm._units import LARGE
from jaxcomm.aggregation._agreement import join_small
from jaxcomm.aggregation._rows import ROW_LAYOUTS
from jaxcomm.aggregation._weights import weighted
from jaxcomm.compression._means import headroom

_ROWS = ROW_LAYOUTS["block"]


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
    rows = [_ROWS.apart(x, workers) for x in vectors]
    sent = rows, None if own is None else jnp.broadcast_to(own, (workers,))
    received, weights = exchange_rows(axis_name, sent)
    gathered = gather_contents(axis_name, [mean_of_rows(x, weights) for x in received])
    return [_ROWS.together(mean, x.shape) for mean, x in zip(gathered, vectors, strict=True)]


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
