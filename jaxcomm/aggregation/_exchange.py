"""What aggregators of coded updates differ in: from parts to what workers make of them."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax

from jaxcomm._base import Codec, Context, Memory, PyTree
from jaxcomm._units import Unit


class Part(NamedTuple):
    """One unit of this worker's updates, and what is known of it before the exchange."""

    codec: Codec
    context: Context
    x: jax.Array
    unit: Unit


class Encoded(NamedTuple):
    """One unit after the exchange."""

    context: Context  # as it was encoded, with the memory before the step
    memory: Memory  # after encoding
    mean: jax.Array  # over all workers
    payload: PyTree = None  # which was decoded to the mean, where payloads were joined


class Exchanged(NamedTuple):
    """What workers make of their parts together."""

    units: list[Encoded]
    finite: jax.Array  # bool[], whether all workers' parts were
    sent: Callable[[], list[jax.Array]] | None = (
        None  # what this worker sent, decoded; for `diagnostics`
    )


Exchange: TypeAlias = Callable[[list[Part]], Exchanged]
