"""Methods without a server: asynchronous pairs (AD-PSGD), and consensus by ADMM on a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._contract import PyTree
from jaxcomm._require import AboveZero, require_option, require_transformation
from jaxcomm.gossip._extras import networkx
from jaxcomm.gossip._neighbors import toward
from jaxcomm.gossip._topologies import require_graph
from jaxcomm.synchronization._trees import (
    empty,
    minus,
    narrow,
    plus,
    row,
    row_before,
    rows_of,
    scaled,
    wide,
    with_row,
)
from jaxcomm.synchronization.events._engine import Event, Policy
from jaxcomm.synchronization.events._messages import Sent, bytes_of, sent
from jaxcomm.synchronization.events._pairs import Member, Pairs

if TYPE_CHECKING:
    import networkx as nx


class Neighbors(NamedTuple):
    """The neighbors of each worker, padded with the worker itself to the largest degree."""

    table: np.ndarray  # int32[workers, degree]
    linked: np.ndarray  # bool[workers, degree], false for the padding
    degrees: np.ndarray  # int32[workers]


def to_neighbors(graph: nx.Graph) -> Neighbors:
    """The table of an undirected, connected graph.

    Raises:
      ValueError: If the graph is directed or not connected, or has other nodes than 0 to n - 1.
    """
    workers = require_graph(graph)
    if graph.is_directed():
        raise ValueError("`graph` is directed: use `graph.to_undirected()`.")
    own = [sorted(set(graph[worker]) - {worker}) for worker in range(workers)]
    degrees = np.array([len(others) for others in own], np.int32)
    table = np.tile(np.arange(workers, dtype=np.int32)[:, None], (1, max(int(degrees.max()), 1)))
    for worker, others in enumerate(own):
        table[worker, : len(others)] = others
    linked = np.arange(table.shape[1])[None] < degrees[:, None]
    return Neighbors(table, linked, degrees)


def require_size(neighbors: Neighbors, workers: int) -> None:
    """Raises unless the graph has this number of workers."""
    if len(neighbors.table) != workers:
        raise ValueError(f"`graph` has {len(neighbors.table)} nodes, for {workers} workers.")


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
      A policy, for :func:`event_loop` and :func:`jaxcomm.asynchronous.train`. Its model is the mean
      of the workers. On processes, the worker of lower index locks its parameters first and waits
      for the other, so no circle of workers waits. Among the neighbors, only those that take part
      are drawn; a worker without one steps alone.

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

    Differs from the paper: the graph need not be bipartite. Here an average happens at once, and on
    processes the order of indices replaces the two sides of the graph.
    """
    require_transformation(tx)
    neighbors = to_neighbors(graph)

    def join(params: PyTree) -> Member:
        return Member(wide(params), params, tx.init(params))

    def partner(worker: jax.Array, key: jax.Array, present: jax.Array) -> jax.Array:
        others = jnp.asarray(neighbors.table)[worker]
        among = jnp.asarray(neighbors.linked)[worker] & present[others]
        count = jnp.sum(among, dtype=jnp.int32)
        drawn = jax.random.randint(key, (), 0, jnp.maximum(count, 1))
        chosen = jnp.argmax(among & (jnp.cumsum(among) == drawn + 1))
        return jnp.where(count > 0, others[chosen], -1)

    def meet(own: PyTree, other: PyTree) -> tuple[PyTree, PyTree]:
        half, _ = toward(own, other, jnp.asarray(0.5, jax.tree.leaves(own)[0].dtype))
        return plus(own, half), minus(other, half)

    def step(member: Member, gradient: PyTree) -> Member:
        params, _, optimizer = member
        updates, optimizer = tx.update(gradient, optimizer, narrow(params, gradient))
        params = plus(params, updates)
        return Member(params, narrow(params, gradient), optimizer)

    def mean(params: PyTree, like: PyTree) -> PyTree:
        return narrow(jax.tree.map(lambda x: jnp.mean(x, axis=0), params), like)

    def init(params: PyTree, workers: int) -> Member:
        require_size(neighbors, workers)
        return rows_of(join(params), workers)

    def finish(state: Member, event: Event, gradient: PyTree) -> tuple[Member, PyTree, Sent]:
        worker = event.worker
        drawn = partner(worker, event.key, jnp.ones(len(neighbors.table), bool))
        meets = drawn >= 0
        at = jnp.where(meets, drawn, worker)
        average, other = meet(row(state.params, worker), row(state.params, at))
        own = Member(average, (), row(state.optimizer, worker))
        params = state._replace(params=with_row(state.params, at, other))
        size = jnp.where(meets, bytes_of(gradient), 0)
        return with_row(params, worker, step(own, gradient)), (), sent(meets, size, meets, size)

    return Policy(
        init=init,
        view=lambda state, worker: row(state.read, worker),
        finish=finish,
        model=lambda state: mean(state.params, state.read),
        pairs=Pairs(join, partner, meet, step, mean),
    )


class Subproblem(NamedTuple):
    r"""What a worker of ADMM solves: :math:`\min_x f_i(x) + v^\top x + \frac{c}{2} \|x\|^2`."""

    linear: PyTree  # v, in float32 at least
    curvature: jax.Array  # c, a scalar of the dtype of the first leaf of `linear`


class ConsensusState(NamedTuple):
    """The iterates and the duals."""

    params: PyTree  # leaves [workers, 2, ...], the iterates of even and of odd number
    dual: PyTree  # leaves [workers, ...]
    solved: jax.Array  # int32[workers], the subproblems that each worker has solved
    missing: jax.Array  # int32[workers], the neighbors whose iterates a worker still needs
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


def d_admm(graph: nx.Graph, penalty: float, colors: Sequence[int] | None = None) -> Policy:
    r"""D-ADMM: neighbors have different colors, and colors take turns.

    .. math:: v_i = \gamma_i - \rho \sum_{j \in N_i,\, C_j < C_i} x_j^{k+1}
                    - \rho \sum_{j \in N_i,\, C_j > C_i} x_j^k, \qquad
              x_i^{k+1} = \arg\min_x f_i(x) + v_i^\top x + \frac{\rho D_i}{2} \|x\|^2

    .. math:: \gamma_i \gets \gamma_i + \rho \sum_{j \in N_i} (x_i^{k+1} - x_j^{k+1})

    A worker begins when its :math:`D_i` neighbors have sent the iterates that it needs; no other
    worker matters. :math:`\sum_i \gamma_i = 0` always. Converges for bipartite graphs, or if each
    :math:`f_i` is strongly convex. A worker sends its iterate to each neighbor.

    The user's function solves the subproblem: it receives a :class:`Subproblem` and the event, and
    returns any loss and :math:`x_i`.

    Args:
      graph: A connected, undirected networkx graph of the workers.
      penalty: :math:`\rho`, above 0.
      colors: :math:`C_i`, one int per worker, different for neighbors. By default a greedy
        coloring.

    Returns:
      A policy, for :func:`event_loop`. Its model is the mean of the workers. An event reads the
      rows of all neighbors, so it costs the degree times the parameters. Not for
      :func:`jaxcomm.asynchronous.train`: the work of a worker is an exact minimum over its own
      examples, not a gradient, and its neighbors wait for its dual also if it has died.

    Raises:
      ValueError: If `penalty` is not positive, neighbors have the same color, or the graph is
        directed or not connected; when started, if it has another number of workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import deterministic, events
      >>> def solve(problem, event):  # f_i(x) = (x - i)^2 / 2
      ...     target = event.worker.astype(jnp.float32)
      ...     return jnp.float32(0), (target - problem.linear) / (1 + problem.curvature)
      >>> loop = events.event_loop(
      ...     events.d_admm(gossip.ring(4), 0.5), solve, deterministic([1.0] * 4), workers=4
      ... )
      >>> progress, _ = loop.run(loop.start(jnp.float32(0)), 100)
      >>> print(round(float(loop.model(progress)), 4))
      1.5

    References:
      Mota et al., `D-ADMM: A Communication-Efficient Distributed Algorithm for Separable
      Optimization <https://arxiv.org/abs/1202.2805>`_, 2013.
    """
    neighbors = to_neighbors(graph)
    if colors is None:
        greedy = networkx.greedy_color(graph)
        colors = [greedy[worker] for worker in range(len(neighbors.table))]
    color = np.asarray(colors)
    if np.any((color[neighbors.table] == color[:, None]) & neighbors.linked):
        raise ValueError("`colors` must be different for neighbors.")
    return _consensus(neighbors, penalty, color, proximal=False)


def jacobi_admm(graph: nx.Graph, penalty: float) -> Policy:
    r"""Decentralized consensus ADMM in which all workers solve at once (Jacobi).

    .. math:: x_i^{k+1} = \arg\min_x f_i(x) + \alpha_i^\top x
              + \rho \sum_{j \in N_i} \Big\|x - \frac{x_i^k + x_j^k}{2}\Big\|^2, \qquad
              \alpha_i \gets \alpha_i + \rho \sum_{j \in N_i} (x_i^{k+1} - x_j^{k+1})

    A worker begins when its neighbors have sent their last iterates. So it is at most one iterate
    ahead of a neighbor. :math:`\sum_i \alpha_i = 0` whenever all workers have the same count. It
    needs no coloring, and more iterations than :func:`d_admm`. Messages and the user's function
    are as for :func:`d_admm`.

    Args:
      graph: As for :func:`d_admm`.
      penalty: :math:`\rho`, above 0.

    Returns:
      A policy, as of :func:`d_admm`.

    Raises:
      ValueError: As :func:`d_admm`.

    Example:
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import events
      >>> policy = events.jacobi_admm(gossip.ring(8), penalty=0.5)

    References:
      Shi et al., `On the Linear Convergence of the ADMM in Decentralized Consensus Optimization
      <https://arxiv.org/abs/1307.5561>`_, 2014.
    """
    neighbors = to_neighbors(graph)
    return _consensus(neighbors, penalty, np.zeros(len(neighbors.table)), proximal=True)


def _consensus(
    neighbors: Neighbors, penalty: float, color: np.ndarray, *, proximal: bool
) -> Policy:
    """ADMM on a graph.

    Args:
      neighbors: The graph.
      penalty: The weight of disagreement.
      color: [workers]; neighbors of lower colors solve before a worker.
      proximal: Whether a worker is also held by its own last iterate.
    """
    require_option(penalty, "penalty", AboveZero)
    # bool[workers, degree]; the padding has a worker's own color.
    earlier, later = (
        less(color[neighbors.table], color[:, None]) for less in (np.less, np.greater)
    )

    def init(params: PyTree, workers: int) -> ConsensusState:
        require_size(neighbors, workers)
        start = rows_of(wide(params), workers)
        return ConsensusState(
            params=jax.tree.map(lambda x: jnp.repeat(x[:, None], 2, axis=1), start),
            dual=jax.tree.map(jnp.zeros_like, start),
            solved=jnp.zeros(workers, jnp.int32),
            missing=jnp.asarray(earlier.sum(axis=1), jnp.int32),
            dtypes=empty(params),
        )

    def iterate(state: ConsensusState, worker: jax.Array, number: jax.Array) -> PyTree:
        """Iterates of workers, each of its own number."""
        return row(state.params, (worker, number % 2))

    def total(rows: PyTree, mask: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: jnp.tensordot(mask.astype(x.dtype), x, axes=1), rows)

    def view(state: ConsensusState, worker: jax.Array) -> Subproblem:
        count = state.solved[worker]
        others, linked, first = (
            jnp.asarray(x)[worker] for x in (neighbors.table, neighbors.linked, earlier)
        )
        pull = total(iterate(state, others, count + first.astype(jnp.int32)), linked)
        dtype = jax.tree.leaves(pull)[0].dtype
        degree = jnp.sum(linked).astype(dtype)
        if proximal:
            pull = plus(pull, scaled(iterate(state, worker, count), degree))
        curvature = penalty * degree * (2 if proximal else 1)
        return Subproblem(minus(row(state.dual, worker), scaled(pull, penalty)), curvature)

    def finish(
        state: ConsensusState, event: Event, x: PyTree
    ) -> tuple[ConsensusState, PyTree, Sent]:
        worker, number = event.worker, state.solved[event.worker] + 1
        others, linked, first, last = (
            jnp.asarray(x)[worker] for x in (neighbors.table, neighbors.linked, earlier, later)
        )
        solved = wide(x)
        # The second end of a link to reach a number updates the duals of both ends.
        both = linked & (state.solved[others] >= number)
        at = others, jnp.broadcast_to(number % 2, others.shape)
        theirs, solved = row_before(state.params, at, solved)
        steps = jax.tree.map(
            lambda x, y: jnp.where(
                both.reshape(-1, *[1] * x.ndim), jnp.asarray(penalty, y.dtype) * (x[None] - y), 0
            ),
            solved,
            theirs,
        )
        dual = jax.tree.map(lambda x, d: x.at[others].add(-d), state.dual, steps)
        dual = jax.tree.map(lambda x, d: x.at[worker].add(jnp.sum(d, axis=0)), dual, steps)
        count = state.solved.at[worker].set(number)
        satisfied = linked & (number == state.solved[others] + last.astype(jnp.int32))
        missing = state.missing.at[others].add(-satisfied.astype(jnp.int32))
        needed = linked & (state.solved[others] < number + first.astype(jnp.int32))
        degree = jnp.sum(linked, dtype=jnp.int32)
        after = ConsensusState(
            params=with_row(state.params, (worker, number % 2), solved),
            dual=dual,
            solved=count,
            missing=missing.at[worker].set(jnp.sum(needed, dtype=jnp.int32)),
            dtypes=state.dtypes,
        )
        return after, (), sent(degree, degree * bytes_of(narrow(solved, state.dtypes)))

    def model(state: ConsensusState) -> PyTree:
        workers = jnp.arange(len(state.solved))
        latest = iterate(state, workers, state.solved)
        return narrow(jax.tree.map(lambda x: jnp.mean(x, axis=0), latest), state.dtypes)

    return Policy(
        init=init,
        view=view,
        finish=finish,
        model=model,
        begins=lambda state, idle: idle & (state.missing == 0),
    )
