"""AD-PSGD on a mesh: random pairs average, and steps come late."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jaxcomm._base import AxisName
from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._matchings import require_matchings, to_matchings
from jaxcomm.gossip._neighbors import Talk
from jaxcomm.gossip._to_mixing import randomized
from jaxcomm.gossip._topologies import require_graph


def ad_psgd(
    graph: nx.Graph | Sequence[Sequence[Sequence[int]]],
    *,
    staleness: int = 1,
    axis_name: AxisName = "data",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Asynchronous decentralized SGD, as a mesh can run it: in steps, with late gradients.

    .. math:: x^{k+1} = W_k x^k + \Delta^{k - \tau}, \qquad
              x_i, x_j \gets \tfrac{1}{2} (x_i + x_j) \;\text{ for } \{i, j\} \in M_k

    with a matching :math:`M_k` drawn anew in each step by all workers alike. A worker sends its
    parameters once a step, or not at all if it has no partner.

    Args:
      graph: A connected networkx graph, decomposed into matchings; or matchings, lists of edges,
        used as given.
      staleness: :math:`\tau`, an int of at least 0. A worker keeps so many of its steps.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      seed: Seed of the draws.
      key: A typed threefry key, in place of `seed`.
      diagnostics: As for :func:`dpsgd`.

    Returns:
      A transformation like that of :func:`dpsgd`.

    Raises:
      ValueError: If `staleness` is negative, the graph is directed or not connected, or a matching
        has two edges of one worker.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.ad_psgd(gossip.hypercube(8), staleness=2))

    References:
      Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient Descent
      <https://arxiv.org/abs/1710.06952>`_, 2018.

    Differs from the paper: all workers step together, each with the same staleness, where the
    paper's do as they come; pairs are a whole matching at once.
    """
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        raise ValueError(f"`staleness` must be a Python int of at least 0, got {staleness!r}.")
    if is_graph(graph):
        if graph.is_directed():
            raise ValueError("`graph` is directed, and `ad_psgd` averages pairs.")
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
    given = require_symmetric(randomized(parts), "ad_psgd")

    def start(units: list[jax.Array]) -> list[list[jax.Array]]:
        return [[*map(jnp.zeros_like, units)] for _ in range(staleness)]

    def method(
        talk: Talk, waiting: list[list[jax.Array]], x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        due, *later = [*waiting, steps]
        apart, disagreement = talk.differences(x)
        return Mixed([a + b for a, b in zip(due, apart, strict=True)], later, disagreement)

    return gossiped(given, axis_name, start, method, seed=seed, key=key, diagnostics=diagnostics)
