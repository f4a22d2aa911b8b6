"""NoLoCo: local steps, and an outer momentum step of pairs without an all-reduce."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import AboveZero, BelowOne, Positive, checked
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._mixing import Mixing
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._to_mixing import agreeing


class NoLoCoMemory(NamedTuple):
    """The memory of one worker, unit by unit."""

    anchor: list[jax.Array]  # phi, the parameters after the last exchange
    momentum: list[jax.Array]  # delta
    weight: jax.Array  # [] in their dtype, the sum of the steps' weights since the last exchange


def every(mixing: Mixing, period: int) -> Mixing:
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


@checked
def noloco(
    mixing: Any,
    period: Positive = 50,
    *,
    momentum: BelowOne | jax.Array = 0.5,
    learning_rate: AboveZero | jax.Array = 0.7,
    pull: AboveZero | jax.Array | None = None,
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Local steps, and a momentum step with one other worker in every H-th step (NoLoCo).

    With the displacement :math:`\Delta_i = x_i - \varphi_i` since the last exchange, worker i and
    its partner j set

    .. math:: \delta_i \gets \alpha \delta_i + \frac{\beta}{2} (\Delta_i + \Delta_j)
              - \gamma \Big(\varphi_i - \frac{\varphi_i + \varphi_j}{2}\Big), \qquad
              \varphi_i \gets \varphi_i + \delta_i, \qquad x_i \gets \varphi_i

    The last term pulls the two workers together; there is no all-reduce. A worker without a partner
    steps alone. An exchange sends one array of the size of the parameters, in float32 at least:
    :math:`\beta \Delta_j + \gamma \varphi_j`. Other steps send nothing. A step in which a random
    mixing activates no link is no exchange.

    Args:
      mixing: Who meets whom, such as :func:`random_pairs`; or anything symmetric that :func:`dpsgd`
        takes, whose weights then replace 1/2. Of a list, each exchange uses one item.
      period: H, an int of at least 1.
      momentum: :math:`\alpha` in [0, 1); may be traced, as the next two.
      learning_rate: :math:`\beta`, above 0.
      pull: :math:`\gamma`, above 0. Default: :math:`\beta`. In the analysis of the paper, workers
        stay together for :math:`\alpha < \gamma < 2 + \alpha` with pairs.
      axis_name: The mesh axis, or axes, of the workers.
      seed: Seed of the pairs.
      diagnostics: As for :func:`dpsgd`; the disagreement is that of what is sent.

    Returns:
      A transformation as returned by :func:`dpsgd`. It keeps two arrays of the size of the
      parameters on each worker. A weight counts as for :func:`jaxcomm.synchronization.local_sgd`:
      steps of weight 0 are not applied, and a displacement is scaled by the sum of its steps'
      weights relative to that of the partner. With a period of 1, `momentum=0` and the other
      numbers 1, it is :func:`dpsgd` in the order `"adapt_then_combine"`.

    Raises:
      ValueError: If a number is out of range, weights are not symmetric, or workers never agree.

    Example:
      >>> import jaxcomm, optax
      >>> from jaxcomm import gossip
      >>> inner = jaxcomm.per_worker(optax.adamw(1e-3))
      >>> tx = optax.chain(inner, gossip.noloco(gossip.random_pairs(8)))

    References:
      Kolehmainen et al., `NoLoCo: No-all-reduce Low Communication Training Method for Large Models
      <https://arxiv.org/abs/2506.10911>`_, 2025. The defaults are those of the authors' code for
      C4: H = 50, pairs, :math:`\alpha = 0.5`, and :math:`\beta = \gamma = 0.7`.

    Differs from the paper: one message takes the place of two, :math:`\varphi_j` and
    :math:`\Delta_j`, of which only this sum is needed. Pairs are rounds of a tournament instead of
    random permutations. Activations are not routed between replicas.
    """
    pull = learning_rate if pull is None else pull
    symmetric = require_symmetric(agreeing(mixing), "noloco")

    def start(units: list[jax.Array]) -> NoLoCoMemory:
        zero = jnp.zeros((), units[0].dtype if units else jnp.float32)
        return NoLoCoMemory(units, [*map(jnp.zeros_like, units)], zero)

    def method(
        mixing_step: MixingStep, memory: NoLoCoMemory, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        # The displacement since the last exchange.
        moved = [a + b - c for a, b, c in zip(x, steps, memory.anchor, strict=True)]
        total = memory.weight
        if mixing_step.weight is not None:
            total = total + mixing_step.weight
            share = mixing_step.relative(total)
            moved = [jnp.where(share == 0, 0, share * d) for d in moved]
        message = [learning_rate * d + pull * a for d, a in zip(moved, memory.anchor, strict=True)]
        differences, disagreement = mixing_step.sum_of_differences(message, message)
        exchanges = mixing_step.exchanges()
        velocity = [
            momentum * v + learning_rate * d + difference
            for v, d, difference in zip(memory.momentum, moved, differences, strict=True)
        ]
        anchor = jax.tree.map(jnp.add, memory.anchor, velocity)
        changes = [jnp.where(exchanges, a - b, c) for a, b, c in zip(anchor, x, steps, strict=True)]
        kept = jax.tree.map(
            lambda new, old: jnp.where(exchanges, new, old),
            (anchor, velocity, jnp.zeros_like(total)),
            (memory.anchor, memory.momentum, total),
        )
        return Mixed(changes, NoLoCoMemory(*kept), disagreement)

    def average(
        mixing_step: MixingStep, memory: NoLoCoMemory, x: list[jax.Array]
    ) -> tuple[list[jax.Array], NoLoCoMemory]:
        means, momenta = mixing_step.mean((x, memory.momentum))
        return means, NoLoCoMemory(means, momenta, jnp.zeros_like(memory.weight))

    return gossiped(
        every(symmetric, period),
        start,
        method,
        average=average,
        seed=seed,
        diagnostics=diagnostics,
        weighs_steps=False,
        axis_name=axis_name,
    )
