"""The mean of codes that every worker has to decode by itself."""

from collections.abc import Callable
from typing import TypeVar, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, Codec, Context, PyTree
from jaxcomm._entries import Entries, entries_of
from jaxcomm._message import from_message, to_message
from jaxcomm._require import checked
from jaxcomm.aggregation._agreement import all_finite, over_units, reduce_statistics
from jaxcomm.aggregation._coded import coded_mean, require_own_statistics
from jaxcomm.aggregation._exchange import Encoded, Exchanged, Part
from jaxcomm.aggregation._local import without_global_diagnostics
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from pallas_kernels._dispatch import target

Decoded = TypeVar("Decoded")


def decoded_mean(
    decode: Callable[[PyTree], jax.Array],
    contents: PyTree,
    context: Context,
    shape: tuple[int, ...],
    entries: Callable[[PyTree], Entries] | None = None,
    start: jax.Array | float = 0.0,
) -> jax.Array:
    """The mean of what contents `[workers, ...]` decode to, added in the workers' order.

    With `entries`, which tells the same as `decode`, only these are added. `start` is 0, or NaN
    where the mean is to be it.
    """
    workers = jax.tree.leaves(contents)[0].shape[0]

    # Divided before they are added: the sum of huge updates may overflow, their mean not.
    def add(total: jax.Array, content: PyTree) -> tuple[jax.Array, None]:
        if entries is None:
            return total + decode(content) / workers, None
        indices, values = entries(content)
        more = total.ravel().at[indices].add(values / workers, mode="drop")
        return more.reshape(shape), None

    known = (contents, context.coins.public, context.statistics)
    first = _axis.varying_like(jnp.full(shape, start, jnp.float32), known)
    total, _ = lax.scan(add, first, contents)
    return total


@checked()
@takes_options
def all_gather_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    share_statistics: bool = False,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Gathers every worker's payload, decodes each, and averages.

    .. math:: \bar x \approx \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_i, a_i), a_i),
              \qquad a_i = \mathrm{measure}(x_i)

    Any codec will do, since workers need not agree. A worker sends :math:`n - 1` payloads (it
    passes on those of the others), so the saving shrinks with :math:`n`: against a float32
    all-reduce, one byte a coordinate saves nothing at :math:`n = 8`. The payloads of all units
    travel in one message, with their statistics and one flag of 4 bytes; from 2^16 words on it is
    filled up to a multiple of 4096 words. Decoded one at a time, in the workers' order: replicas
    stay bit-equal, and memory does not grow with :math:`n` but for the payloads.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec: Any codec.
      share_statistics: Whether workers agree on statistics first, as for :func:`all_reduce_mean`,
        in place of sending each its own.
      **options: As :class:`AggregatorOptions` says.

    Returns:
      A transformation to place before the optimizer. Updates come back equal on all workers, in
      their shape and dtype; a non-finite coordinate on any worker makes them NaN on all.
      `update(..., weight=w)` makes the mean a weighted one.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import all_gather_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = all_gather_mean("data", dither(levels=1))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [0.0, 5.0]])))
      [[1.5 2.5]
       [1.5 2.5]]
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
        contexts = [part.context.replace(statistics=of_groups[part.unit.group]) for part in parts]
        encoded = [
            part.codec.encode(context, part.x)
            for context, part in zip(contexts, parts, strict=True)
        ]
        payloads = [payload for payload, _ in encoded]
        # What all have agreed on need not travel.
        content = (payloads, *(() if share_statistics else (of_groups, finite.astype(jnp.uint32))))
        received = _axis.gather(to_message(content), axis_name)
        of_all, *others = jax.vmap(lambda message: from_message(message, content))(received)
        statistics = [others[0][group] if others else () for group in groups]
        if others:
            finite = jnp.all(others[1] == 1)
        # On CPUs it comes of what was received, so that memory for the mean is taken only then.
        start = jnp.where(finite, 0.0, jnp.nan) if target().platform == "cpu" else 0.0

        def decoded(
            part: Part, context: Context, payloads: PyTree, statistics: PyTree
        ) -> jax.Array:
            def by(
                decode: Callable[[Context, PyTree], Decoded],
            ) -> Callable[[tuple[PyTree, PyTree]], Decoded]:
                def of_sender(content: tuple[PyTree, PyTree]) -> Decoded:
                    payload, own = content
                    sender = context if share_statistics else context.replace(statistics=own)
                    return decode(sender.received(), payload)

                return of_sender

            common = context if share_statistics else context.replace(statistics=())
            codec, shape = part.codec, part.x.shape
            told = entries_of(codec)
            entries = by(told) if told else None
            return decoded_mean(
                by(codec.decode), (payloads, statistics), common, shape, entries, start
            )

        units = [
            Encoded(context, memory, decoded(part, context, *contents))
            for part, context, (_, memory), *contents in zip(
                parts, contexts, encoded, of_all, statistics, strict=True
            )
        ]

        def sent() -> list[jax.Array]:
            return [
                part.codec.decode(context.received(), payload)
                for part, context, payload in zip(parts, contexts, payloads, strict=True)
            ]

        return Exchanged(units, finite, sent)

    of_units = (
        require_own_statistics(codec, "`share_statistics`=True")
        if share_statistics
        else without_global_diagnostics(codec)
    )
    return coded_mean(axis_name, of_units, exchange, options, stacks=True)
