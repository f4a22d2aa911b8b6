"""Means whose payloads are gathered and decoded separately, with statistics of each worker."""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._collectives import gather_contents
from jaxcomm._contract import (
    AxisName,
    Codec,
    Context,
    Diagnostics,
    Entries,
    Memory,
    PyTree,
)
from jaxcomm._require import checked
from jaxcomm.aggregation._coded import (
    AggregatorOptions,
    coded_mean,
    require_own_statistics,
    takes_options,
)
from jaxcomm.aggregation._exchange import (
    Exchange,
    Exchanged,
    Part,
    all_finite,
    decoded_payloads,
    over_units,
    reduce_statistics,
    stage_of,
)
from jaxcomm.compression._blockwise import stacked


def local_memory(codec: Codec, x: jax.Array, aggregator: str, holders: str) -> PyTree:
    """The initial per-worker memory of a codec for `x`.

    Raises:
      ValueError: If the codec also has shared memory. The error says that in the `aggregator` only
        the `holders` would have it.
    """
    memory = codec.init(x)
    if jax.tree.leaves(memory.shared):
        raise ValueError(
            f"`{aggregator}` takes codecs whose memory is each worker's own, since only {holders} "
            "would update that of all workers. Use `all_gather_mean`."
        )
    return memory.own


def without_global_diagnostics(codec: Codec) -> Codec:
    """The codec without the metric `union_density`, since bitmaps are not reduced over workers."""

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        metrics = codec.diagnose(context, x, after)
        local = {name: ratio for name, ratio in metrics.ratios.items() if name != "union_density"}
        return metrics._replace(ratios=local)

    return codec.replace(diagnose=diagnose)


def encode_local(
    codec: Codec, context: Context, x: jax.Array
) -> tuple[tuple[PyTree, PyTree], Memory]:
    """The payload and the statistics, and the memory after encoding."""
    measured = codec.measure(context, x)
    payload, after = codec.encode(context.replace(statistics=measured), x)
    return (payload, measured), after


def decode_local(codec: Codec, context: Context, content: tuple[PyTree, PyTree]) -> jax.Array:
    """Decodes the payload of one worker with its statistics."""
    payload, measured = content
    return codec.decode(context.received().replace(statistics=measured), payload)


Decoded = TypeVar("Decoded")


def decoded_mean(
    decode: Callable[[PyTree], jax.Array],
    contents: PyTree,
    context: Context,
    shape: tuple[int, ...],
    entries: Callable[[PyTree], Entries] | None = None,
    added: Callable[[PyTree, jax.Array, float], jax.Array] | None = None,
    start: jax.Array | float = 0.0,
) -> jax.Array:
    """The mean of the decoded `contents[i]`, leaves `[workers, ...]`, summed in worker order.

    `entries` returns the same as `decode` in sparse form; if it is passed, only these entries are
    added. `added(content, total, divisor)` is `total + decode(content) / divisor` in one pass.
    `start` is the initial value of the sum: 0, or NaN to make the mean NaN.
    """
    workers = jax.tree.leaves(contents)[0].shape[0]

    # Divides before it adds, because the sum of huge updates may overflow.
    def add(total: jax.Array, content: PyTree) -> tuple[jax.Array, None]:
        if added is not None:
            return added(content, total, workers), None
        if entries is None:
            return total + decode(content) / workers, None
        indices, values = entries(content)
        more = total.ravel().at[indices].add(values / workers, mode="drop")
        return more.reshape(shape), None

    inputs = (contents, context.keys.shared, context.statistics)
    first = _axis.varying_like(jnp.full(shape, start, jnp.float32), inputs)
    total, _ = lax.scan(add, first, contents)
    return total


def gather_payloads(axis_name: AxisName, codec: Codec, share_statistics: bool) -> Exchange:
    """Gathers every worker's payload, decodes each, and averages.

    Args:
      axis_name: The mesh axes of the workers.
      codec: The codec of all parts, or the one that is stacked.
      share_statistics: Whether to reduce statistics over workers first. Otherwise they travel with
        the payload of their worker.
    """

    def exchange(parts: list[Part]) -> Exchanged:
        measured = [part.codec.measure(part.context, part.x) for part in parts]
        groups = [part.unit.group for part in parts]
        of_groups = over_units(codec.reduce_statistics, measured, groups)
        finite = all_finite(part.x for part in parts)
        if share_statistics:
            of_groups, finite = reduce_statistics(
                axis_name, codec.reduce_statistics, of_groups, finite
            )
        parts = [
            part._replace(context=part.context.replace(statistics=of_groups[part.unit.group]))
            for part in parts
        ]
        encoded = [part.codec.encode(part.context, part.x) for part in parts]
        payloads = [payload for payload, _ in encoded]
        # Statistics that were reduced over workers need not travel.
        content = (payloads, *(() if share_statistics else (of_groups, finite.astype(jnp.uint32))))
        with jax.named_scope(stage_of(payloads[0], "payload")):
            received, *others = gather_contents(content, axis_name)
        statistics = [others[0][group] if others else () for group in groups]
        if others:
            finite = jnp.all(others[1] == 1)
        # It depends on the received message, so that XLA allocates the mean only then.
        start = jnp.where(finite, 0.0, jnp.nan)

        def decoded(part: Part, payloads: PyTree, statistics: PyTree) -> jax.Array:
            context, fast, mapped = part.context, part.codec.fast, part.codec.fast.mapped
            entries = mapped.entries if mapped else fast.entries

            def from_sender(decode: Callable[..., Decoded]) -> Callable[..., Decoded]:
                def apply(content: tuple[PyTree, PyTree], *rest: Any) -> Decoded:
                    payload, own = content
                    sender = context if share_statistics else context.replace(statistics=own)
                    received = sender.received()
                    return decode(mapped.within(received) if mapped else received, payload, *rest)

                return apply

            common = context if share_statistics else context.replace(statistics=())
            mean = decoded_mean(
                from_sender(mapped.decode if mapped else part.codec.decode),
                (payloads, statistics),
                common,
                mapped.within(context).shape if mapped else part.x.shape,
                from_sender(entries) if entries else None,
                from_sender(fast.add) if fast.add else None,
                start,
            )
            return mapped.back(mean, part.x.shape) if mapped else mean

        sent = decoded_payloads(parts, payloads)
        parts = [
            part._replace(memory=memory, mean=decoded(part, *contents))
            for part, (_, memory), *contents in zip(
                parts, encoded, received, statistics, strict=True
            )
        ]
        return Exchanged(parts, finite, sent, are_nan=True)

    return exchange


@checked
@takes_options
def all_gather_mean(
    codec: Codec,
    *,
    share_statistics: bool = False,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Gathers every worker's payload, decodes each, and averages.

    .. math:: \bar x \approx \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_i, a_i), a_i),
              \qquad a_i = \mathrm{measure}(x_i)

    It works with any codec, since workers need no common statistics. A worker sends :math:`n - 1`
    payloads (it forwards those of other workers), so the saving shrinks with :math:`n`: against a
    float32 all-reduce, one byte per coordinate saves nothing at :math:`n = 8`. The payloads of all
    buckets or leaves travel in one message, with their statistics and 4 bytes for a flag that
    reports non-finite updates. A message of 2^16 words or more is padded to a multiple of 4096
    words. Payloads are decoded one at a time, in worker order. Replicas therefore stay bit-equal,
    and only the payloads take memory that grows with :math:`n`.

    Args:
      codec: Any codec.
      share_statistics: Whether to reduce statistics over workers first, as
        :func:`jaxcomm.all_reduce_mean` does. Default: each worker sends its own statistics.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers and keep
      their shape and dtype. A non-finite coordinate on any worker makes them NaN on all workers.
      `update(..., weight=w)` computes a weighted mean.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import all_gather_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = all_gather_mean(dither(levels=1))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [0.0, 5.0]])))
      [[1.5 2.5]
       [1.5 2.5]]
    """

    exchange = gather_payloads(axis_name, codec, share_statistics)
    unit_codec = (
        require_own_statistics(codec, "`share_statistics`=True")
        if share_statistics
        else without_global_diagnostics(codec)
    )
    return coded_mean(axis_name, unit_codec, exchange, options, stack=stacked(unit_codec))
