"""The interface of an exchange, the step in which aggregators with a codec differ."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax

from jaxcomm._contract import Codec, Context, Memory, PyTree
from jaxcomm._units import Unit


class Part(NamedTuple):
    """One unit of this worker's updates, before the exchange."""

    codec: Codec
    context: Context
    x: jax.Array
    unit: Unit


class Encoded(NamedTuple):
    """One unit after the exchange."""

    context: Context  # the context of `encode`, with the memory before the step
    memory: Memory  # after encoding
    mean: jax.Array  # over all workers
    payload: PyTree = None  # the payload decoded to the mean, if payloads were combined


class Exchanged(NamedTuple):
    """The result of an exchange."""

    units: list[Encoded]
    finite: jax.Array  # bool[], whether the parts of all workers are finite
    # This worker's payloads, decoded, for `diagnostics`.
    sent: Callable[[], list[jax.Array]] | None = None


Exchange: TypeAlias = Callable[[list[Part]], Exchanged]


def decoded_payloads(
    parts: Sequence[Part], contexts: Sequence[Context], payloads: Sequence[PyTree]
) -> Callable[[], list[jax.Array]]:
    """The function `sent` of an exchange: it decodes this worker's own payloads."""
    return lambda: [
        part.codec.decode(context.received(), payload)
        for part, context, payload in zip(parts, contexts, payloads, strict=True)
    ]
