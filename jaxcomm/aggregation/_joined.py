"""What summed and merged means share: payloads are joined on the way and decoded once."""

from collections.abc import Callable
from typing import TypeAlias

import jax

from jaxcomm import _axis
from jaxcomm._base import AxisName, Codec, Coins, Memory, PyTree
from jaxcomm.aggregation._agreement import agree, all_finite, over_units
from jaxcomm.aggregation._coded import Exchange, Exchanged

Join: TypeAlias = Callable[[Coins, PyTree], PyTree]
"""`(coins, payload)` of a unit to the payload that stands for the sum over workers."""


def join_payloads(axis_name: AxisName, codec: Codec, join: Join, scope: str | None) -> Exchange:
    """Agrees on statistics, encodes with what is agreed, joins the payloads, and decodes once."""

    def exchange(coins: list[Coins], memories: list[Memory], units: list[jax.Array]) -> Exchanged:
        workers = _axis.size(axis_name)
        measured = [*map(codec.measure, coins, memories, units)]
        if scope == "tree":
            measured = over_units(codec.agree, measured)
        agreed, finite = agree(axis_name, codec.agree, measured, all_finite(units))
        means, after, sent = [], [], []
        for coin, memory, x, agreement in zip(coins, memories, units, agreed, strict=True):
            payload, memory = codec.encode(coin, memory, x, agreement, workers)
            total = join(coin, payload)
            means.append(codec.decode(coin.public, total, agreement, workers, workers, x.shape))
            after.append(memory)
            sent.append((coin.public, payload, agreement, workers, 1, x.shape))
        return Exchanged(
            means,
            after,
            finite,
            lambda: [codec.decode(*each) for each in sent],
            [(coin.public, agreement) for coin, agreement in zip(coins, agreed, strict=True)],
            workers,
        )

    return exchange
