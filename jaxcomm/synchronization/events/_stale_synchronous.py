"""SSP: workers may be some clocks apart, and read what is certain to have arrived."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import PyTree
from jaxcomm._require import require_transformation
from jaxcomm.synchronization._require import require_int
from jaxcomm.synchronization._trees import (
    chosen,
    narrow,
    plus,
    row,
    rows_of,
    scaled,
    wide,
    with_row,
)
from jaxcomm.synchronization.events._policy import Event, Policy, Sent, bytes_of, sent


class TableState(NamedTuple):
    """The parameters as a sum of updates by clock."""

    base: PyTree  # the first parameters and all updates before those in `by_clock`
    by_clock: PyTree  # leaves [2 s + 1, ...], the sums of the updates of the clocks after `base`
    own: PyTree  # leaves [workers, s + 1, ...], each worker's last updates
    clocks: jax.Array  # int32[workers], the updates that each worker has made
    optimizer: Any  # leaves [workers, ...]
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


def stale_synchronous(tx: optax.GradientTransformation, staleness: int) -> Policy:
    r"""Stale synchronous parallel (SSP): the fastest worker is at most s clocks ahead.

    .. math:: \tilde x_{i, c} = x_0 + \frac{1}{n} \Big( \sum_{k \le c - s - 1} \sum_j u_{j, k}
              + \sum_{k = c - s}^{c - 1} u_{i, k} \Big), \qquad
              u_{i, c} = \mathrm{tx}_i(g_i(\tilde x_{i, c}))

    Worker i begins its clock c if all workers have finished clock :math:`c - s - 1`. It reads all
    updates up to that clock, and all of its own (read-my-writes). It reads no other update, even if
    some have arrived. So what it reads does not depend on the speeds. With :math:`s = 0` this is
    synchronous SGD. Clocks differ by at most s + 1, counting the gradient that a worker has just
    finished. Each gradient is one message to the server and one reply.

    Args:
      tx: The optimizer of each worker, whose updates are added up.
      staleness: s, at least 0.

    Returns:
      A policy, for :func:`event_loop`. It keeps the s + 1 last updates of each worker, and one
      optimizer state per worker.

    Raises:
      ValueError: If `staleness` is negative, or `tx` is not an optax transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxcomm.synchronization import deterministic, events
      >>> def work(x, event):
      ...     return jax.value_and_grad(lambda x: 0.5 * x**2)(x)
      >>> loop = events.event_loop(
      ...     events.stale_synchronous(optax.sgd(1.0), staleness=1),
      ...     work,
      ...     deterministic([1.0, 5.0]),
      ...     workers=2,
      ... )
      >>> progress, records = loop.run(loop.start(jnp.float32(8.0)), 4)
      >>> print(records.worker, records.seconds)
      [0 0 1 0] [1. 2. 5. 6.]

    References:
      Ho et al., `More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server
      <https://papers.nips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html>`_,
      2013.

    Differs from the paper: updates are divided by n; the paper adds them undivided. A read never
    includes an update that is newer than guaranteed; the paper permits it, as far as it has
    arrived.
    """
    require_transformation(tx)
    require_int(staleness, "staleness", least=0)
    slots, kept = 2 * staleness + 1, staleness + 1

    def init(params: PyTree, workers: int) -> TableState:
        base = wide(params)
        zeros = jax.tree.map(jnp.zeros_like, base)
        return TableState(
            base=base,
            by_clock=rows_of(zeros, slots),
            own=rows_of(rows_of(zeros, kept), workers),
            clocks=jnp.zeros(workers, jnp.int32),
            optimizer=rows_of(tx.init(params), workers),
            dtypes=jax.tree.map(lambda x: jnp.zeros(0, x.dtype), params),
        )

    def numbers(least: jax.Array, count: int) -> jax.Array:
        """The clock of each slot of a ring whose earliest clock is `least`."""
        return least + (jnp.arange(count, dtype=jnp.int32) - least) % count

    def add(x: jax.Array, ring: jax.Array, mask: jax.Array) -> jax.Array:
        return x + jnp.tensordot(mask.astype(ring.dtype), ring, axes=1)

    def read(state: TableState, worker: jax.Array, clock: jax.Array) -> PyTree:
        by_clock = numbers(jnp.min(state.clocks) - staleness, slots) <= clock - staleness - 1
        mine = numbers(clock - staleness, kept) < clock
        x = jax.tree.map(lambda x, ring: add(x, ring, by_clock), state.base, state.by_clock)
        own = row(state.own, worker)
        return narrow(jax.tree.map(lambda x, ring: add(x, ring, mine), x, own), state.dtypes)

    def finish(state: TableState, event: Event, gradient: PyTree) -> tuple[TableState, Sent]:
        worker, clock = event.worker, state.clocks[event.worker]
        read_params = read(state, worker, clock)
        update, optimizer = tx.update(gradient, row(state.optimizer, worker), read_params)
        update = scaled(wide(update), 1 / len(state.clocks))
        clocks = state.clocks.at[worker].add(1)
        by_clock = jax.tree.map(
            lambda ring, u: ring.at[clock % slots].add(u), state.by_clock, update
        )
        own = jax.tree.map(lambda ring, u: ring.at[worker, clock % kept].set(u), state.own, update)
        before = jnp.min(state.clocks)
        oldest, moves = (before - staleness) % slots, jnp.min(clocks) > before
        complete = row(by_clock, oldest)
        zeros = jax.tree.map(jnp.zeros_like, complete)
        size = bytes_of(read_params)
        return TableState(
            base=chosen(moves, plus(state.base, complete), state.base),
            by_clock=with_row(by_clock, oldest, chosen(moves, zeros, complete)),
            own=own,
            clocks=clocks,
            optimizer=with_row(state.optimizer, worker, optimizer),
            dtypes=state.dtypes,
        ), sent(1, size, 1, size)

    def begins(state: TableState, idle: jax.Array) -> jax.Array:
        return idle & (state.clocks - jnp.min(state.clocks) <= staleness)

    def model(state: TableState) -> PyTree:
        """The parameters with all updates."""
        everything = jnp.ones(slots, bool)
        x = jax.tree.map(lambda x, ring: add(x, ring, everything), state.base, state.by_clock)
        return narrow(x, state.dtypes)

    return Policy(
        init=init,
        point=lambda state, event: read(state, event.worker, state.clocks[event.worker]),
        finish=finish,
        model=model,
        begins=begins,
    )
