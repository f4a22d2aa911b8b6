"""Builds aggregators from an exchange: of arrays, or of units that a codec encodes."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxcomm import _units
from jaxcomm._contract import Aggregator, AxisName, Codec, PyTree
from jaxcomm._require import checked
from jaxcomm.aggregation._aggregator import require_no_weight, stateless
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options, weigh
from jaxcomm.aggregation._exchange import Exchanged, all_finite, everywhere


@checked
def aggregator(
    exchange: Callable[[list[jax.Array]], list[jax.Array]],
    *,
    weighted: bool = True,
    bucket_bytes: int = _units.BUCKET_BYTES,
    axis_name: AxisName = "data",
) -> Aggregator:
    r"""Makes an aggregator without a codec from what workers exchange for a few arrays.

    .. math:: (u_1, u_2, \ldots) = \mathrm{exchange}(x_{i,1}, x_{i,2}, \ldots)

    It sends what `exchange` sends, and a flag of 4 bytes: a non-finite coordinate on any worker
    makes the update NaN on all workers. With `weight=`, workers first scale their updates so that
    the plain mean becomes the weighted one.

    Args:
      exchange: From the float32 arrays of this worker, in which leaves are concatenated, to as many
        arrays of the same shapes, equal on all workers bit for bit. Use the functions of
        :mod:`jaxcomm.collectives`, which work in every mode, or those of `jax.lax`.
      weighted: Whether `update` accepts `weight=`: not if the result is no mean.
      bucket_bytes: The maximum size of an array in bytes; a larger leaf is one array.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A stateless transformation to place before the optimizer.

    Raises:
      ValueError: In `update`, if `axis_name` is not bound, an update is already summed or not
        floating-point, or `weight` is passed and not accepted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import aggregation, collectives
      >>> def median(axis_name="data"):
      ...     def exchange(arrays):
      ...         rows = [collectives.gather(x, axis_name) for x in arrays]
      ...         return [jnp.median(each, axis=0) for each in rows]
      ...
      ...     return aggregation.aggregator(exchange, weighted=False, axis_name=axis_name)
      >>> tx = median()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [2. 2. 2.]
    """

    def average(updates: PyTree, weight: jax.Array | float | None) -> PyTree:
        if not weighted:
            require_no_weight(weight)
        arrays, _, join = _units.split(updates, "bucket", bucket_bytes)
        if not arrays:
            return updates
        if weight is not None:
            arrays = [*map(weigh(axis_name, weight, arrays), arrays)]
        finite = everywhere(axis_name, all_finite(arrays))
        with jax.named_scope("exchange"):
            results = exchange(arrays)
        return join([jnp.where(finite, x, jnp.nan) for x in results])

    return stateless(axis_name, "this aggregator", average)


@checked
@takes_options
def coded_aggregator(
    codec: Codec,
    exchange: Callable[[list[Any]], tuple[Any, ...]],
    *,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> Aggregator:
    r"""Makes an aggregator from a codec and an exchange of what it encodes.

    .. math:: \bar x \approx \mathrm{exchange}(x_i, \text{codec})

    It divides updates into units, keeps the codec's memory, makes PRNG keys, and applies weights.
    If the exchange says that a unit of one worker is not finite, the update is NaN on all workers,
    and no memory changes. It sends what `exchange` sends.

    Args:
      codec: The codec that supplies the memory, `finalize` and `diagnose` of a unit.
      exchange: `parts -> (parts, finite)`: measures and encodes each part, sends the payloads, and
        sets the fields `memory`, after encoding, and `mean`, over all workers, by `_replace`. A
        part is one unit of this worker's updates: a named tuple with its `codec`, its `context`,
        with the memory before the step, and `x`; after encoding, `context` is that of `encode`, and
        `payload` the one that was decoded to the mean, if payloads were combined. `finite`, bool[],
        says whether the parts of all workers are finite. A third element may be a function without
        arguments that returns this worker's own payloads, decoded, for `diagnostics`.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import aggregation, collectives
      >>> from jaxcomm.compression.quantizers import cast
      >>> codec = cast("bfloat16")
      >>> def exchange(parts):  # The payload of the first worker, for all.
      ...     payloads = [part.codec.encode(part.context, part.x)[0] for part in parts]
      ...     received = collectives.gather_contents(payloads, "data")
      ...     first = jax.tree.map(lambda x: x[0], received)
      ...     means = [
      ...         part._replace(
      ...             memory=part.context.memory, mean=part.codec.decode(part.context, p)
      ...         )
      ...         for part, p in zip(parts, first)
      ...     ]
      ...     return means, jnp.array(True)
      >>> tx = aggregation.coded_aggregator(codec, exchange)
      >>> update = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(update, axis_name="data")(jnp.array([1.0, 2.0])))
      [1. 1.]
    """
    in_scope = jax.named_scope("exchange")(exchange)
    return coded_mean(axis_name, codec, lambda parts: Exchanged(*in_scope(parts)), options)
