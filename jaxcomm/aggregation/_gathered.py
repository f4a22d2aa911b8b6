"""The exchange of payloads that are gathered: each is decoded separately."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._collectives import gather_contents
from jaxcomm._contract import (
    AxisName,
    Codec,
    Context,
    Entries,
    PyTree,
)
from jaxcomm.aggregation._agreement import all_finite, over_units, reduce_statistics
from jaxcomm.aggregation._exchange import (
    Encoded,
    Exchange,
    Exchanged,
    Part,
    decoded_payloads,
)
from pallas_kernels._dispatch import target

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

    inputs = (contents, context.coins.public, context.statistics)
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
        contexts = [part.context.replace(statistics=of_groups[part.unit.group]) for part in parts]
        encoded = [
            part.codec.encode(context, part.x)
            for context, part in zip(contexts, parts, strict=True)
        ]
        payloads = [payload for payload, _ in encoded]
        # Statistics that were reduced over workers need not travel.
        content = (payloads, *(() if share_statistics else (of_groups, finite.astype(jnp.uint32))))
        received, *others = gather_contents(axis_name, content)
        statistics = [others[0][group] if others else () for group in groups]
        if others:
            finite = jnp.all(others[1] == 1)
        # On CPUs it depends on the received message, so that XLA allocates the mean only then.
        start = jnp.where(finite, 0.0, jnp.nan) if target().platform == "cpu" else 0.0

        def decoded(
            part: Part, context: Context, payloads: PyTree, statistics: PyTree
        ) -> jax.Array:
            fast, mapped = part.codec.fast, part.codec.fast.mapped
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

        units = [
            Encoded(context, memory, decoded(part, context, *contents))
            for part, context, (_, memory), *contents in zip(
                parts, contexts, encoded, received, statistics, strict=True
            )
        ]

        return Exchanged(units, finite, decoded_payloads(parts, contexts, payloads))

    return exchange
