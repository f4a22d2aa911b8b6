"""Stale synchronous parallel (SSP): a bound on how far the fastest worker is ahead."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm._contract import PyTree
from jaxcomm._require import Natural, checked
from jaxcomm.synchronization._trees import empty, narrow, plus, row, rows_of, wide, with_row
from jaxcomm.synchronization.events._engine import Event, Policy, Steps, Task, Work
from jaxcomm.synchronization.events._messages import Sent, bytes_of, sent


class TableState(NamedTuple):
    """The parameters as a sum of updates by clock."""

    base: PyTree  # the first parameters and all updates before those in `by_clock`
    by_clock: PyTree  # leaves [2 s + 1, ...], the sums of the updates of the clocks after `base`
    clocks: jax.Array  # int32[workers], the updates that each worker has made
    present: jax.Array  # bool[workers]
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters

    @property
    def slowest(self) -> jax.Array:
        """The clock of the slowest worker, int32[]."""
        none = jnp.where(jnp.any(self.present), jnp.iinfo(jnp.int32).max, self.clocks)
        return jnp.min(jnp.where(self.present, self.clocks, none))


class Client(NamedTuple):
    """The memory of a worker."""

    updates: PyTree  # leaves [s + 1, ...], its last updates over n
    clock: jax.Array  # int32[], the updates so far
    optimizer: Any
    workers: jax.Array  # int32[], n
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


@checked
def stale_synchronous(tx: optax.GradientTransformation, staleness: Natural) -> Policy:
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
      A policy, for :func:`event_loop`. Each worker keeps its s + 1 last updates and an optimizer
      state.

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
    slots, kept = 2 * staleness + 1, staleness + 1

    def init(params: PyTree, workers: int) -> TableState:
        base = wide(params)
        return TableState(
            base=base,
            by_clock=rows_of(jax.tree.map(jnp.zeros_like, base), slots),
            clocks=jnp.zeros(workers, jnp.int32),
            present=jnp.ones(workers, bool),
            dtypes=empty(params),
        )

    def join(params: PyTree, workers: int) -> Client:
        return Client(
            updates=rows_of(jax.tree.map(jnp.zeros_like, wide(params)), kept),
            clock=jnp.zeros((), jnp.int32),
            optimizer=tx.init(params),
            workers=jnp.asarray(workers, jnp.int32),
            dtypes=empty(params),
        )

    def numbers(least: jax.Array, count: int) -> jax.Array:
        """The clock of each slot of a ring whose earliest clock is `least`."""
        return least + (jnp.arange(count, dtype=jnp.int32) - least) % count

    def add(x: jax.Array, ring: jax.Array, mask: jax.Array) -> jax.Array:
        return x + jnp.tensordot(mask.astype(ring.dtype), ring, axes=1)

    def view(state: TableState, worker: jax.Array) -> PyTree:
        """The first parameters and all updates that every worker may read."""
        clock = state.clocks[worker]
        guaranteed = numbers(state.slowest - staleness, slots) <= clock - staleness - 1
        return jax.tree.map(lambda x, ring: add(x, ring, guaranteed), state.base, state.by_clock)

    def share(update: PyTree, workers: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: x * (1 / workers.astype(x.dtype)), wide(update))

    def steps(work: Work) -> Steps:
        def step(own: Client, view: PyTree, task: Task) -> tuple[jax.Array, PyTree, Client]:
            mine = numbers(own.clock - staleness, kept) < own.clock
            x = jax.tree.map(lambda x, ring: add(x, ring, mine), view, own.updates)
            read = narrow(x, own.dtypes)
            loss, gradient = work(read, task)
            update, optimizer = tx.update(gradient, own.optimizer, read)
            return (
                loss,
                update,
                own._replace(
                    updates=with_row(own.updates, own.clock % kept, share(update, own.workers)),
                    clock=own.clock + 1,
                    optimizer=optimizer,
                ),
            )

        return step

    def folded(state: TableState, after: TableState) -> TableState:
        """The state after `slowest` has advanced: the clocks that are complete become the base."""

        def fold(clock: jax.Array, sums: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            base, by_clock = sums
            oldest = (clock - staleness) % slots
            complete = row(by_clock, oldest)
            zeros = jax.tree.map(jnp.zeros_like, complete)
            return plus(base, complete), with_row(by_clock, oldest, zeros)

        base, by_clock = lax.fori_loop(
            state.slowest, after.slowest, fold, (after.base, after.by_clock)
        )
        return after._replace(base=base, by_clock=by_clock)

    def finish(state: TableState, event: Event, update: PyTree) -> tuple[TableState, PyTree, Sent]:
        worker, clock = event.worker, state.clocks[event.worker]
        mine = share(update, jnp.asarray(len(state.clocks), jnp.int32))
        by_clock = jax.tree.map(lambda ring, u: ring.at[clock % slots].add(u), state.by_clock, mine)
        after = state._replace(by_clock=by_clock, clocks=state.clocks.at[worker].add(1))
        return folded(state, after), (), sent(1, bytes_of(update), 1, bytes_of(state.base))

    def attend(state: TableState, present: jax.Array, seconds: jax.Array) -> TableState:
        left = folded(state, state._replace(present=present & state.present))
        joins = present & ~state.present
        return left._replace(present=present, clocks=jnp.where(joins, left.slowest, left.clocks))

    def begins(state: TableState, idle: jax.Array) -> jax.Array:
        return idle & (state.clocks - state.slowest <= staleness)

    def model(state: TableState) -> PyTree:
        """The parameters with all updates."""
        everything = jnp.ones(slots, bool)
        x = jax.tree.map(lambda x, ring: add(x, ring, everything), state.base, state.by_clock)
        return narrow(x, state.dtypes)

    return Policy(
        init=init,
        view=view,
        steps=steps,
        finish=finish,
        model=model,
        join=join,
        begins=begins,
        attend=attend,
        move=lambda state, change: state._replace(base=plus(state.base, change)),
    )
