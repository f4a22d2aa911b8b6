"""GASLoC: local steps, and an outer step with momentum that averages with neighbors only."""

from typing import Any

import jax
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import AboveZero, BelowOne, Positive, checked
from jaxcomm.gossip._gossiped import require_symmetric
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._outer import Units, outer_gossip
from jaxcomm.gossip._to_mixing import agreeing


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

    def outer(
        mixing_step: MixingStep, anchor: Units, before: Units, moved: Units
    ) -> tuple[Units, Units, jax.Array]:
        proposed = [a + learning_rate * d for a, d in zip(anchor, moved, strict=True)]
        differences, disagreement = mixing_step.sum_of_differences(proposed, proposed)
        anchor = [
            y + difference + momentum * (y - old)
            for y, difference, old in zip(proposed, differences, before, strict=True)
        ]
        return anchor, proposed, disagreement

    return outer_gossip(
        symmetric,
        period,
        lambda units: units,
        outer,
        seed=seed,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
