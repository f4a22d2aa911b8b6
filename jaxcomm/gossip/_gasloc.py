"""GASLoC: local steps, and an outer step with momentum that averages with neighbors only."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import AboveZero, BelowOne, Positive, checked
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._noloco import every
from jaxcomm.gossip._to_mixing import agreeing


class GaslocMemory(NamedTuple):
    """The memory of one worker, unit by unit."""

    anchor: list[jax.Array]  # theta, the parameters after the last exchange
    proposed: list[jax.Array]  # y of the last exchange
    weight: jax.Array  # [] in their dtype, the sum of the steps' weights since the last exchange


@checked
def gasloc(
    mixing: Any,
    period: Positive = 50,
    *,
    learning_rate: AboveZero | jax.Array = 0.7,
    momentum: BelowOne | jax.Array = 0.5,
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Local steps, and gossip with an outer momentum in every H-th step (GASLoC).

    .. math:: y_i = \theta_i + \eta (x_i - \theta_i), \qquad
              \theta_i \gets \sum_j W_{ij} y_j + \gamma (y_i - y_i^-), \qquad x_i \gets \theta_i

    :math:`\theta_i` is what worker i had after the last exchange, and :math:`y_i^-` is its
    :math:`y_i` of then, at first :math:`\theta_i`. The momentum accelerates gossip: on a graph
    whose mixing matrix has the spectral gap :math:`\rho`, disagreement decays in about
    :math:`1 / \sqrt \rho` exchanges instead of :math:`1 / \rho`. A worker sends :math:`y_i`, one
    array of the size of the parameters in float32 at least, to each neighbor. Other steps send
    nothing. A step in which a random mixing activates no link is no exchange.

    Args:
      mixing: Anything symmetric that :func:`dpsgd` takes: :math:`W = I - \alpha \Lambda` for a
        step size :math:`\alpha` and a Laplacian :math:`\Lambda`; or :func:`random_pairs`.
      period: H, an int of at least 1.
      learning_rate: :math:`\eta`, above 0; may be traced.
      momentum: :math:`\gamma` in [0, 1); may be traced.
      axis_name: The mesh axis, or axes, of the workers.
      seed: Seed of random mixings.
      diagnostics: As for :func:`dpsgd`; the disagreement is that of :math:`y`.

    Returns:
      A transformation as returned by :func:`dpsgd`. It keeps two arrays of the size of the
      parameters on each worker. Weights count as for :func:`noloco`. On a complete graph, the mean
      over workers follows :func:`jaxcomm.synchronization.diloco` with the outer optimizer
      `optax.sgd(learning_rate, momentum, nesterov=True)` at the displacements of the workers. With
      `momentum=0`, all workers equal it.

    Raises:
      ValueError: If a number is out of range, weights are not symmetric, or workers never agree.

    Example:
      >>> import jaxcomm, optax
      >>> from jaxcomm import gossip
      >>> inner = jaxcomm.per_worker(optax.adamw(1e-3))
      >>> tx = optax.chain(inner, gossip.gasloc(gossip.ring(8)))

    References:
      Cagnasso, Belilovsky and Oyallon, `Unifying Local Communications and Local Updates for LLM
      Pretraining <https://arxiv.org/abs/2606.11081>`_, 2026.

    Differs from the paper: all workers take as many local steps, unless `weight` says otherwise.
    """
    symmetric = require_symmetric(agreeing(mixing), "gasloc")

    def start(units: list[jax.Array]) -> GaslocMemory:
        return GaslocMemory(units, units, jnp.zeros((), units[0].dtype if units else jnp.float32))

    def method(
        mixing_step: MixingStep, memory: GaslocMemory, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        moved = [a + b - c for a, b, c in zip(x, steps, memory.anchor, strict=True)]
        total = memory.weight
        if mixing_step.weight is not None:
            total = total + mixing_step.weight
            share = mixing_step.relative(total)
            moved = [jnp.where(share == 0, 0, share * d) for d in moved]
        proposed = [a + learning_rate * d for a, d in zip(memory.anchor, moved, strict=True)]
        differences, disagreement = mixing_step.sum_of_differences(proposed, proposed)
        exchanges = mixing_step.exchanges()
        anchor = [
            y + difference + momentum * (y - before)
            for y, difference, before in zip(proposed, differences, memory.proposed, strict=True)
        ]
        changes = [jnp.where(exchanges, a - b, c) for a, b, c in zip(anchor, x, steps, strict=True)]
        after = GaslocMemory(anchor, proposed, jnp.zeros_like(total))
        before = memory._replace(weight=total)
        kept = jax.tree.map(lambda new, old: jnp.where(exchanges, new, old), after, before)
        return Mixed(changes, kept, disagreement)

    def average(
        mixing_step: MixingStep, memory: GaslocMemory, x: list[jax.Array]
    ) -> tuple[list[jax.Array], GaslocMemory]:
        means, proposed = mixing_step.mean((x, memory.proposed))
        return means, GaslocMemory(means, proposed, jnp.zeros_like(memory.weight))

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
