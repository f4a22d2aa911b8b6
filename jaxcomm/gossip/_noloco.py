"""NoLoCo: local steps, and an outer momentum step of pairs without an all-reduce."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import AboveZero, BelowOne, Positive, checked
from jaxcomm.gossip._gossiped import require_symmetric
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._outer import Units, outer_gossip
from jaxcomm.gossip._to_mixing import agreeing


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

    def outer(
        mixing_step: MixingStep, anchor: Units, velocity: Units, moved: Units
    ) -> tuple[Units, Units, jax.Array]:
        message = [learning_rate * d + pull * a for d, a in zip(moved, anchor, strict=True)]
        differences, disagreement = mixing_step.sum_of_differences(message, message)
        velocity = [
            momentum * v + learning_rate * d + difference
            for v, d, difference in zip(velocity, moved, differences, strict=True)
        ]
        return jax.tree.map(jnp.add, anchor, velocity), velocity, disagreement

    return outer_gossip(
        symmetric,
        period,
        lambda units: [*map(jnp.zeros_like, units)],
        outer,
        seed=seed,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
