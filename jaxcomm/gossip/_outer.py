"""Local steps, and an outer step with neighbors in every H-th step; methods differ in that step."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _axis
from jaxcomm.gossip._gossiped import Mixed, gossiped
from jaxcomm.gossip._mixing import Mixing
from jaxcomm.gossip._neighbors import MixingStep

Units: TypeAlias = list[jax.Array]


class OuterMemory(NamedTuple):
    """The memory of one worker, unit by unit."""

    anchor: Units  # the parameters after the last exchange
    own: Units  # that of the outer step
    weight: jax.Array  # [] in their dtype, the sum of the steps' weights since the last exchange


def _every(mixing: Mixing, period: int) -> Mixing:
    """The next step of the mixing in every `period`-th step; nothing is sent in the others."""
    always = np.ones(len(mixing.matrices), bool)

    def active(key: jax.Array, step: jax.Array) -> jax.Array:
        exchange, since = jnp.divmod(step, jnp.uint32(period))
        flags = mixing.active(key, exchange) if mixing.active else jnp.asarray(always)
        return flags & (since == period - 1)

    if period == 1:
        return mixing
    chances = tuple(each / period for each in mixing.probabilities)
    return mixing._replace(probabilities=chances, active=active, period=period * mixing.period)


def outer_gossip(
    mixing: Mixing,
    period: int,
    first: Callable[[Units], Units],
    outer: Callable[[MixingStep, Units, Units, Units], tuple[Units, Units, jax.Array]],
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation, to place after the optimizer, from an outer step.

    A step in which no link is active, or the worker is absent, is no exchange. Displacements are
    scaled by the sum of their steps' weights, relative to those of the neighbors.

    Args:
      mixing: The mixing of the exchanges.
      period: The steps between them.
      first: From the parameters to the first memory of the outer step.
      outer: `(mixing_step, anchor, own, moved) -> (anchor, own, disagreement)`; `moved` is what the
        worker has moved since the last exchange.
      **options: Those of `gossiped`.
    """

    def start(units: Units) -> OuterMemory:
        zero = jnp.zeros((), units[0].dtype if units else jnp.float32)
        return OuterMemory(units, first(units), zero)

    def method(mixing_step: MixingStep, memory: OuterMemory, x: Units, steps: Units) -> Mixed:
        moved = [a + b - c for a, b, c in zip(x, steps, memory.anchor, strict=True)]
        total = memory.weight
        if mixing_step.weight is not None:
            total = total + mixing_step.weight
            share = mixing_step.relative(total)
            moved = [jnp.where(share == 0, 0, share * d) for d in moved]
        anchor, own, disagreement = outer(mixing_step, memory.anchor, memory.own, moved)
        flags, present = mixing_step.flags, mixing_step.present
        exchanges = jnp.ones((), bool) if flags is None else jnp.any(flags)
        if present is not None:
            exchanges &= present[_axis.index(mixing_step.axis_name)]
        changes = [jnp.where(exchanges, a - b, c) for a, b, c in zip(anchor, x, steps, strict=True)]
        after = OuterMemory(anchor, own, jnp.zeros_like(total))
        before = memory._replace(weight=total)
        kept = jax.tree.map(lambda new, old: jnp.where(exchanges, new, old), after, before)
        return Mixed(changes, kept, disagreement)

    def average(
        mixing_step: MixingStep, memory: OuterMemory, x: Units
    ) -> tuple[Units, OuterMemory]:
        means, own = mixing_step.mean((x, memory.own))
        return means, OuterMemory(means, own, jnp.zeros_like(memory.weight))

    return gossiped(
        _every(mixing, period), start, method, average=average, weighs_steps=False, **options
    )
