"""AD-PSGD, worker by worker: a worker averages with one random neighbor after each gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import PyTree
from jaxcomm._require import require_transformation
from jaxcomm.gossip._neighbors import toward
from jaxcomm.synchronization._wide import narrow, wide
from jaxcomm.synchronization.events._graph import require_size, to_neighbors
from jaxcomm.synchronization.events._messages import bytes_of
from jaxcomm.synchronization.events._policy import Event, Policy, Sent, sent
from jaxcomm.synchronization.events._rows import minus, plus, row, rows_of, with_row

if TYPE_CHECKING:
    import networkx as nx


class PairState(NamedTuple):
    """The parameters of each worker, and those at which it computes."""

    params: PyTree  # leaves [workers, ...], in float32 at least
    read: PyTree  # leaves [workers, ...], in the dtypes of the parameters
    optimizer: Any  # leaves [workers, ...]


def asynchronous_pairs(tx: optax.GradientTransformation, graph: nx.Graph) -> Policy:
    r"""Asynchronous decentralized SGD (AD-PSGD) with its own event for each gradient.

    .. math:: x_i, x_j \gets \tfrac{1}{2} (x_i + x_j), \qquad
              x_i \gets x_i + \mathrm{tx}_i(g_i(\hat x_i)), \qquad j \sim \mathcal{U}(N_i)

    Here :math:`\hat x_i` is the worker's parameters when it began. Others may average with it
    meanwhile. The average keeps :math:`\sum_i x_i`. It is that of :func:`jaxcomm.gossip.ad_psgd`,
    whose workers step together. A worker and its neighbor send their parameters to each other: one
    message and one reply. No worker waits.

    Args:
      tx: The optimizer of each worker.
      graph: A connected, undirected networkx graph of the workers.

    Returns:
      A policy, for :func:`event_loop`. Its model is the mean of the workers.

    Raises:
      ValueError: If `tx` is not an optax transformation, or the graph is directed or not connected;
        when started, if it has another number of workers.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import events
      >>> policy = events.asynchronous_pairs(optax.sgd(0.1), gossip.ring(8))

    References:
      Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient Descent
      <https://arxiv.org/abs/1710.06952>`_, 2018.

    Differs from the paper: an average happens at once, so no two of them can wait for each other,
    and the graph need not be bipartite.
    """
    require_transformation(tx)
    neighbors = to_neighbors(graph, "asynchronous_pairs")

    def init(params: PyTree, workers: int) -> PairState:
        require_size(neighbors, workers)
        return PairState(
            params=rows_of(wide(params), workers),
            read=rows_of(params, workers),
            optimizer=rows_of(tx.init(params), workers),
        )

    def finish(state: PairState, event: Event, gradient: PyTree) -> tuple[PairState, Sent]:
        worker = event.worker
        degree = jnp.asarray(neighbors.degrees)[worker]
        drawn = jax.random.randint(event.key, (), 0, jnp.maximum(degree, 1))
        partner = jnp.asarray(neighbors.table)[worker, drawn]
        own, other = row(state.params, worker), row(state.params, partner)
        units, treedef = jax.tree.flatten(own)
        halves, _ = toward(units, jax.tree.leaves(other), jnp.asarray(0.5, units[0].dtype))
        half = jax.tree.unflatten(treedef, halves)
        average = plus(own, half)
        updates, optimizer = tx.update(
            gradient, row(state.optimizer, worker), narrow(average, gradient)
        )
        after = plus(average, updates)
        params = with_row(state.params, partner, minus(other, half))
        size = jnp.where(degree > 0, bytes_of(gradient), 0)
        return PairState(
            params=with_row(params, worker, after),
            read=with_row(state.read, worker, narrow(after, gradient)),
            optimizer=with_row(state.optimizer, worker, optimizer),
        ), sent(degree > 0, size, degree > 0, size)

    def model(state: PairState) -> PyTree:
        return narrow(jax.tree.map(lambda x: jnp.mean(x, axis=0), state.params), state.read)

    return Policy(
        init=init,
        point=lambda state, event: row(state.read, event.worker),
        finish=finish,
        model=model,
    )
