"""D-PSGD: local steps, followed by averages over neighbors."""

from typing import Any, Literal, get_args

import jax
import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName, PyTree
from jaxcomm.gossip._agreeing import agreeing
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._matcha_plan import MatchaPlan
from jaxcomm.gossip._neighbors import MixingStep

Order = Literal["combine_then_adapt", "adapt_then_combine"]


@names_itself
def dpsgd(
    mixing: Any,
    *,
    axis_name: AxisName = "data",
    order: Order = "combine_then_adapt",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralized parallel SGD (D-PSGD): workers average only with their neighbors.

    Let :math:`\Delta_i = -\gamma\, g_i(x_i)` be the update of the preceding optimizer:

    .. math:: x_i \gets \sum_j W_{ij} x_j + \Delta_i \quad\text{(as published)}, \qquad
              x_i \gets \sum_j W_{ij} (x_j + \Delta_j) \quad\text{(adapt, then combine)}

    In both forms, the mean over workers moves by the mean of the updates. The first form can send
    messages while the gradient is computed. A worker sends its parameters once to each neighbor, in
    their dtype. A step has as many sequential message rounds as the largest degree, and no
    all-reduce.

    Args:
      mixing: A networkx graph, a symmetric matrix [n, n], a list of them to cycle through, or a
        :class:`Mixing`.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      order: `"combine_then_adapt"` or `"adapt_then_combine"`.
      seed: Seed for random mixing.
      key: A typed threefry key that replaces `seed`.
      diagnostics: Whether the state's field `diagnostics` reports the `disagreement`
        :math:`\sum_{ij} W_{ij} \|x_i - x_j\|^2` of the step and the `skipped_steps` of all workers
        so far. Each of these two adds one float32 to an all-reduce. The field also reports
        `rounds`, the number of sequential message rounds.

    Returns:
      A transformation to place *after* the optimizer, for parameters that differ by worker
      (:func:`jaxcomm.replicate`). `update(..., weight=w)` scales the update of this worker by
      :math:`w / \bar w`. The mean :math:`\bar w` is over the weights of this worker and of the
      neighbors that it hears in this step, so only ratios of weights count. Where all workers are
      neighbors, the mean then moves by the weighted mean of the updates. Each message has one
      float32 more. A worker of weight 0 only mixes, even if its update is not finite. A negative or
      non-finite weight makes the parameters of the worker and of these neighbors NaN. `update(...,
      present=mask)` removes workers from the step. The mask has one bool per worker and is equal on
      all workers. The messages of absent workers have weight 0, and the mean is preserved. The
      number of bytes decreases only if a whole matrix is inactive. `update(..., exact=flag)`, a
      bool that is equal on all workers, sets the parameters of all workers to their exact mean at
      the end of the step. :func:`periodic_averaging` uses this flag.

      If an update would make a worker's parameters non-finite, for example after a NaN batch, only
      that worker skips it. The worker continues to mix, and the state counts the skipped steps.

      Float64 parameters are mixed in float64, all others in float32. Parameters of 16 bits are
      sent in 16 bits, and the change is rounded to 16 bits. Neighbors that differ by less than
      :math:`1 / (2 W_{ij})` units in the last place then no longer mix. Rounding moves the mean
      by at most half a unit per step. If this error is too large, keep the parameters in float32
      and cast them in the loss.

    Raises:
      ValueError: If the graph is directed, or the workers never agree: the graph, or those of a
        list together, are not connected, or an eigenvalue other than the 1 of the mean has a
        magnitude of 1 or more. In `init` and `update`, if the number of nodes is not the number of
        workers, or the parameters do not differ by worker.

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
    mixing = require_symmetric(agreeing(mixing), "dpsgd")

    def method(
        mixing_step: MixingStep, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        combines = order == "adapt_then_combine"
        mixed = [a + b for a, b in zip(x, steps, strict=True)] if combines else x
        differences, disagreement = mixing_step.weighted_differences(mixed)
        changes = [a + b for a, b in zip(steps, differences, strict=True)]
        return Mixed(changes, memory, disagreement)

    return gossiped(
        mixing,
        lambda units: (),
        method,
        seed=seed,
        key=key,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )


@names_itself
def matcha(
    plan: MatchaPlan,
    *,
    axis_name: AxisName = "data",
    order: Order = "adapt_then_combine",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""D-PSGD in which each matching of the graph is active in only a fraction of the steps.

    .. math:: x_i \gets \sum_j W_{ij} (x_j + \Delta_j), \qquad
              W = I - \alpha \sum_k b_k L_k, \quad P(b_k = 1) = p_k

    Here :math:`L_k` is the Laplacian of matching :math:`k`. All workers draw the same :math:`b`. An
    inactive matching sends nothing. Weights may be negative. A worker sends its parameters once for
    each active matching that contains it.

    Args:
      plan: The result of :func:`matcha_plan`.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      order: As for :func:`dpsgd`.
      seed: Seed of the draws.
      key: A typed threefry key that replaces `seed`.
      diagnostics: As for :func:`dpsgd`; `rounds` is the number of active matchings.

    Returns:
      A transformation as returned by :func:`dpsgd`.

    Raises:
      ValueError: As :func:`dpsgd` does, or if `plan` is not a :class:`MatchaPlan`.

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
