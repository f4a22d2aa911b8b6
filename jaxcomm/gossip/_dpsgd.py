"""D-PSGD: local steps, and averages with neighbours."""

from typing import Any, Literal, get_args

import jax
import optax

from jaxcomm._base import AxisName, PyTree
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._matcha_plan import MatchaPlan
from jaxcomm.gossip._neighbors import Talk
from jaxcomm.gossip._to_mixing import to_mixing

Order = Literal["mix_then_adapt", "adapt_then_combine"]


def dpsgd(
    mixing: Any,
    *,
    axis_name: AxisName = "data",
    order: Order = "mix_then_adapt",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralized parallel SGD: workers average with their neighbours only.

    With the step :math:`\Delta_i = -\gamma\, g_i(x_i)` of the optimizer before it,

    .. math:: x_i \gets \sum_j W_{ij} x_j + \Delta_i \quad\text{(as published)}, \qquad
              x_i \gets \sum_j W_{ij} (x_j + \Delta_j) \quad\text{(adapt, then combine)}

    The mean over workers moves by the mean of steps in both. The first can send while the gradient
    is computed. A worker sends its parameters once to each neighbour, in their dtype, in as many
    rounds as the largest degree; nothing is an all-reduce.

    Args:
      mixing: A networkx graph, a symmetric matrix [n, n], a list of them to take in turns, or a
        :class:`Mixing`.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      order: `"mix_then_adapt"` or `"adapt_then_combine"`.
      seed: Seed of what is drawn where mixing is at random.
      key: A typed threefry key, in place of `seed`.
      diagnostics: Whether the state's field `diagnostics` tells of the step `disagreement`,
        :math:`\sum_{ij} W_{ij} \|x_i - x_j\|^2`, and how many steps of all workers were
        `skipped_steps` so far, for two float32 more; and `rounds`, of messages that were sent one
        after the other.

    Returns:
      A transformation to place *after* the optimizer, on parameters that differ by worker
      (:func:`jaxcomm.replicate`). `update(..., weight=w)` scales this worker's step by w, so that a
      worker of weight 0 only mixes, whatever its step holds; a weight below 0 or not finite makes
      its parameters NaN. `update(..., present=mask)`, a bool a worker that all know, takes workers
      out of the step: their messages have weight 0, and the mean is kept. Bytes fall only where a
      whole matrix is inactive. `update(..., exact=flag)`, a bool that all know, ends a step at the
      exact mean of all, as :func:`periodic_averaging` asks for now and then.

      A step after which parameters would not be finite, of a NaN batch, is left out by its worker
      alone, which goes on mixing; the state counts such steps.

      Float64 parameters are mixed in float64, others in float32. Of 16 bits, they are sent in 16
      bits and the change is rounded to them: neighbours that differ by less than :math:`1 / (2
      W_{ij})` units in the last place are not mixed any more, and the mean moves by rounding, half
      a unit a step at most. Where that is too much, keep parameters in float32 and cast them in the
      loss.

    Raises:
      ValueError: If the graph is directed or not connected; in `init` and `update`, if its nodes
        are not as many as the workers, or parameters do not differ by worker.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(
      ...     optax.sgd(0.5), gossip.dpsgd(gossip.ring(8), order="adapt_then_combine")
      ... )
      >>> params = jaxcomm.replicate(jnp.float32(3), 8)
      >>> opt_state = jaxcomm.init(tx, params, 8)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, 8)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones(8))
      >>> print(jaxcomm.consensus(params))
      1.0

    References:
      Lian et al., `Can Decentralized Algorithms Outperform Centralized Algorithms?
      <https://arxiv.org/abs/1705.09056>`_, 2017.
    """
    if order not in get_args(Order):
        raise ValueError(f"`order` must be one of {get_args(Order)}, got {order!r}.")
    given = require_symmetric(to_mixing(mixing), "dpsgd")

    def method(talk: Talk, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]) -> Mixed:
        combines = order == "adapt_then_combine"
        mixed = [a + b for a, b in zip(x, steps, strict=True)] if combines else x
        apart, disagreement = talk.differences(mixed)
        return Mixed([a + b for a, b in zip(steps, apart, strict=True)], memory, disagreement)

    return gossiped(
        given, axis_name, lambda units: (), method, seed=seed, key=key, diagnostics=diagnostics
    )


def matcha(
    plan: MatchaPlan,
    *,
    axis_name: AxisName = "data",
    order: Order = "adapt_then_combine",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""D-PSGD in which each matching of the graph is active in a part of the steps.

    .. math:: x_i \gets \sum_j W_{ij} (x_j + \Delta_j), \qquad
              W = I - \alpha \sum_k b_k L_k, \quad P(b_k = 1) = p_k

    All workers draw the same :math:`b`, and a matching that is not active sends nothing; weights
    may be negative. Bytes are the parameters once for each active matching that a worker is in.

    Args:
      plan: Of :func:`matcha_plan`.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      order: As for :func:`dpsgd`.
      seed: Seed of the draws.
      key: A typed threefry key, in place of `seed`.
      diagnostics: As for :func:`dpsgd`; `rounds` is the number of active matchings.

    Returns:
      A transformation like that of :func:`dpsgd`.

    Raises:
      ValueError: As :func:`dpsgd` does, or if `plan` is none.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> plan = gossip.matcha_plan(gossip.ring(8), budget=0.5)
      >>> tx = optax.chain(optax.sgd(0.1), gossip.matcha(plan))

    References:
      Wang et al., `MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling
      <https://arxiv.org/abs/1905.09435>`_, 2019.
    """
    if not isinstance(plan, MatchaPlan):
        raise ValueError(f"`plan` must be a plan of `gossip.matcha_plan`, got {plan!r}.")
    return dpsgd(
        plan, axis_name=axis_name, order=order, seed=seed, key=key, diagnostics=diagnostics
    )
