"""Gossip of whole parameters: D-PSGD, MATCHA, AD-PSGD with stale updates, and D2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._contract import AxisName, PyTree
from jaxcomm._require import Natural, checked, named, require_option
from jaxcomm.compression.feedback._shifted import Sum, add, no_sum
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_fixed, require_symmetric
from jaxcomm.gossip._matcha_plan import MatchaPlan
from jaxcomm.gossip._matchings import matchings_of
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._to_mixing import agreeing, one_of_pairs

Order = Literal["combine_then_adapt", "adapt_then_combine"]


@checked
def dpsgd(
    mixing: Any,
    *,
    axis_name: AxisName = "data",
    order: Order = "combine_then_adapt",
    seed: int | jax.Array = 0,
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
    mixing = require_symmetric(agreeing(mixing), "dpsgd")

    def method(
        mixing_step: MixingStep, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        combines = order == "adapt_then_combine"
        mixed = jax.tree.map(jnp.add, x, steps) if combines else x
        differences, disagreement = mixing_step.weighted_differences(mixed)
        return Mixed(jax.tree.map(jnp.add, steps, differences), memory, disagreement)

    return gossiped(
        mixing,
        lambda units: (),
        method,
        seed=seed,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )


@named
def matcha(
    plan: MatchaPlan,
    *,
    axis_name: AxisName = "data",
    order: Order = "adapt_then_combine",
    seed: int = 0,
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
      diagnostics: As for :func:`dpsgd`; `rounds` is the number of active matchings.

    Returns:
      A transformation as returned by :func:`dpsgd`.

    Raises:
      ValueError: As :func:`dpsgd` does, or if `plan` is not from :func:`matcha_plan`.

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
    return dpsgd(plan, axis_name=axis_name, order=order, seed=seed, diagnostics=diagnostics)


@named
def ad_psgd(
    graph: nx.Graph | Sequence[Sequence[Sequence[int]]],
    *,
    staleness: int = 1,
    axis_name: AxisName = "data",
    seed: int = 0,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Asynchronous decentralized SGD (AD-PSGD) on a mesh: synchronous steps with stale gradients.

    .. math:: x^{k+1} = W_k x^k + \Delta^{k - \tau}, \qquad
              x_i, x_j \gets \tfrac{1}{2} (x_i + x_j) \;\text{ for } \{i, j\} \in M_k

    All workers draw the same random matching :math:`M_k` in each step. A worker sends its
    parameters once per step, or not at all if it has no partner.

    Args:
      graph: A connected networkx graph, which is decomposed into matchings; or the matchings
        themselves, as lists of edges.
      staleness: :math:`\tau`, an int of at least 0. A worker stores this number of its updates.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      seed: Seed of the draws.
      diagnostics: As for :func:`dpsgd`.

    Returns:
      A transformation as returned by :func:`dpsgd`.

    Raises:
      ValueError: If `staleness` is negative, the graph is directed or not connected, or a matching
        contains two edges of the same worker. In `update`, if the state has another `staleness`.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.ad_psgd(gossip.hypercube(8), staleness=2))

    References:
      Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient Descent
      <https://arxiv.org/abs/1710.06952>`_, 2018.

    Differs from the paper: all workers step together and have the same staleness. In the paper,
    workers proceed asynchronously. Here, all pairs of a matching average at once.
    """
    require_option(staleness, "staleness", Natural)
    mixing = one_of_pairs(*matchings_of(graph))

    def start(units: list[jax.Array]) -> list[list[jax.Array]]:
        return [[*map(jnp.zeros_like, units)] for _ in range(staleness)]

    def method(
        mixing_step: MixingStep,
        pending: list[list[jax.Array]],
        x: list[jax.Array],
        steps: list[jax.Array],
    ) -> Mixed:
        due, *later = [*pending, steps]
        differences, disagreement = mixing_step.weighted_differences(x)
        return Mixed(jax.tree.map(jnp.add, due, differences), later, disagreement)

    return gossiped(mixing, start, method, seed=seed, diagnostics=diagnostics, axis_name=axis_name)


@checked
def d2(
    mixing: Any, *, axis_name: AxisName = "data", diagnostics: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralized SGD that removes the effect of gradient variance between workers (D2).

    .. math:: x_i^{k+1} = \sum_j W_{ij} y_j, \qquad
              y_i = 2 x_i^k - x_i^{k-1} + \Delta_i^k - \Delta_i^{k-1}, \qquad y_i^0 = x_i^0 +
              \Delta_i^0

    It is computed as :math:`c_i \gets c_i + \sum_j W_{ij} (y_j - y_i)` with :math:`y_i = x_i +
    \Delta_i + c_i`, then :math:`x_i \gets x_i + \Delta_i + c_i`. The corrections :math:`c_i` add to
    0 over workers. Each is stored with its rounding error, so that the mean does not drift.

    With updates :math:`\Delta = -\gamma g` at a constant learning rate :math:`\gamma`, D2 converges
    to the optimum of the mean loss, while D-PSGD does not. A worker sends its parameters once to
    each neighbor.

    Args:
      mixing: A networkx graph, or a symmetric matrix [n, n] whose eigenvalues are above -1/3.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      diagnostics: As for :func:`dpsgd`.

    Returns:
      A transformation as returned by :func:`dpsgd`. It stores two arrays of the size of the
      parameters on each worker. Use it after plain SGD without momentum.

    Raises:
      ValueError: If the graph is directed or not connected, the mixing changes between steps, or
        an eigenvalue is -1/3 or less. D2 then diverges; use `gossip.lazy_mixing(mixing)`.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.d2(gossip.lazy_mixing(gossip.ring(8))))

    References:
      Tang et al., `D2: Decentralized Training over Decentralized Data
      <https://arxiv.org/abs/1803.07068>`_, 2018.
    """
    mixing = require_fixed(require_symmetric(agreeing(mixing), "d2"), "d2")
    smallest = float(np.linalg.eigvalsh(mixing.matrices[0])[0])
    if smallest <= -1 / 3 + 1e-9:
        raise ValueError(f"`d2` diverges by eigenvalue {smallest:.4f}: use `gossip.lazy_mixing`.")

    def start(units: list[jax.Array]) -> list[Sum]:
        return [*map(no_sum, units)]

    def method(
        mixing_step: MixingStep, memory: list[Sum], x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        corrected = [a + b + c.total for a, b, c in zip(x, steps, memory, strict=True)]
        differences, disagreement = mixing_step.weighted_differences(corrected)
        after = [*map(add, memory, differences)]
        changes = [b + c.total for b, c in zip(steps, after, strict=True)]
        return Mixed(changes, after, disagreement)

    return gossiped(mixing, start, method, diagnostics=diagnostics, axis_name=axis_name)
