"""AD-PSGD on a mesh: random pairs average, and updates are applied with a delay."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName
from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._matchings import require_matchings, to_matchings
from jaxcomm.gossip._neighbors import MixingStep
from jaxcomm.gossip._to_mixing import randomized
from jaxcomm.gossip._topologies import require_graph


@names_itself
def ad_psgd(
    graph: nx.Graph | Sequence[Sequence[Sequence[int]]],
    *,
    staleness: int = 1,
    axis_name: AxisName = "data",
    seed: int = 0,
    key: jax.Array | None = None,
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
      key: A typed threefry key that replaces `seed`.
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
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        raise ValueError(f"`staleness` must be a Python int of at least 0, got {staleness!r}.")
    if is_graph(graph):
        if graph.is_directed():
            raise ValueError(
                "`graph` is directed, but `ad_psgd` averages pairs: use `graph.to_undirected()`."
            )
        matchings = to_matchings(graph)
        base = graph
    else:
        matchings = require_matchings(graph)
        base = nx.Graph(edge for matching in matchings for edge in matching)
    workers = require_graph(base)
    parts = []
    for matching in matchings or [()]:
        part = nx.empty_graph(workers)
        part.add_edges_from(matching)
        parts.append(part)
    mixing = require_symmetric(randomized(parts), "ad_psgd")

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
        return Mixed([a + b for a, b in zip(due, differences, strict=True)], later, disagreement)

    return gossiped(
        mixing, start, method, seed=seed, key=key, diagnostics=diagnostics, axis_name=axis_name
    )
