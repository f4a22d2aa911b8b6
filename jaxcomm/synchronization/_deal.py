"""Which examples each worker takes, exactly, also when the number of workers changes."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import PyTree

_NEXT_DEAL = 0x0DEA1  # Folded into the key, so that later orders are others.


def window_batches(
    key: jax.Array, shards: PyTree, first: jax.Array, *, minibatches: int, batch_size: int
) -> PyTree:
    r"""Selects the mini-batches of a window from each worker's own examples.

    A worker uses its examples in a new random order in each epoch. Its mini-batches are consecutive
    blocks of that order: number :math:`p` holds examples :math:`pb` to :math:`(p+1) b - 1`, counted
    over epochs. Since :func:`windows` keeps unfinished mini-batches in order, an epoch
    contains each example exactly once, however slow a worker is. The result depends only on the
    position, so there is no state to save.

    Args:
      key: key[], which determines the orders.
      shards: Leaves [workers, examples, ...]. All of them are held in memory, and each window draws
        the order of an epoch again. If a data set is too large for this, read `window.first` in a
        custom data loader.
      first: int32[workers], the number of the first mini-batch of each worker: `window.first`.
      minibatches: M, the number of mini-batches per worker.
      batch_size: b, the number of examples per mini-batch; :math:`pb` must fit an int32.

    Returns:
      Leaves [workers M, b, ...], a `batch` for steps with :func:`window_gradients`.

    Raises:
      ValueError: If leaves differ in the number of workers or examples, or a number is not
        positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization import window_batches
      >>> shards = jnp.arange(4).reshape(2, 2)
      >>> dealt = window_batches(
      ...     jax.random.key(0), shards, jnp.array([0, 5]), minibatches=2, batch_size=1
      ... )
      >>> sorted(dealt[:2, 0].tolist()), dealt.shape
      ([0, 1], (4, 1))
    """
    ((workers, examples),) = {x.shape[:2] for x in jax.tree.leaves(shards)}
    window = minibatches * batch_size
    epochs = (window + examples - 2) // examples + 1

    def rows(worker: jax.Array, number: jax.Array) -> jax.Array:
        begin = number * batch_size
        worker_key = jax.random.fold_in(key, worker)

        def order(epoch: jax.Array) -> jax.Array:
            return jax.random.permutation(jax.random.fold_in(worker_key, epoch), examples)

        orders = jax.vmap(order)(begin // examples + jnp.arange(epochs, dtype=jnp.int32))
        return jax.lax.dynamic_slice(orders.ravel(), (begin % examples,), (window,))

    chosen = jax.vmap(rows)(jnp.arange(workers, dtype=jnp.int32), first)

    def take(shard: jax.Array, indices: jax.Array) -> Any:
        return shard[indices]

    def of_leaf(x: jax.Array) -> jax.Array:
        batches = jax.vmap(take)(jnp.asarray(x), chosen)
        return batches.reshape(workers * minibatches, batch_size, *x.shape[2:])

    return jax.tree.map(of_leaf, shards)


class Deal(NamedTuple):
    """Who takes which examples: what is left of epochs begun by others, then epochs of its own.

    It is small, equal on all workers, and part of a state that a checkpoint holds.
    """

    key: jax.Array  # key[], of the orders
    examples: jax.Array  # int32[], N, the number of examples
    left: jax.Array  # int32[workers, ceil(N / workers)], numbers of examples; -1 after the last
    taken: jax.Array  # int32[workers], how many examples each worker has taken since the deal


def new_deal(key: jax.Array, examples: int, workers: int) -> Deal:
    r"""The deal before the first window.

    Worker i has :math:`N / n` examples that follow each other; the first workers have one more if n
    does not divide N. It takes all of them in a new random order in each epoch. If n divides N, the
    orders are those of :func:`window_batches`.

    Args:
      key: key[], which determines the orders.
      examples: N, the number of examples of all workers.
      workers: n, at most N.

    Returns:
      The deal, of which nothing is taken: `key`, key[]; `examples`, int32[], N; `left`,
      int32[workers, ceil(N / n)], the examples that are left of epochs that others have begun, -1
      after the last; and `taken`, int32[workers], how many each worker has taken. It is small and
      equal on all workers: a checkpoint holds it.

    Raises:
      ValueError: If a number is not positive, or there are more workers than examples.

    Example:
      >>> import jax
      >>> from jaxcomm.synchronization import next_examples, new_deal
      >>> print(next_examples(new_deal(jax.random.key(0), 6, 2), 3).sum(axis=1))  # 0 1 2, 3 4 5
      [ 3 12]
    """
    if workers > examples:
        raise ValueError(f"`examples` must be at least `workers`={workers}, got {examples}.")
    left = jnp.full((workers, -(-examples // workers)), -1, jnp.int32)
    return Deal(key, jnp.asarray(examples, jnp.int32), left, jnp.zeros(workers, jnp.int32))


def _shard(deal: Deal, worker: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(first example, number of examples)` of a worker."""
    each, more = jnp.divmod(deal.examples, jnp.int32(len(deal.taken)))
    return worker * each + jnp.minimum(worker, more), each + (worker < more).astype(jnp.int32)


def _order(deal: Deal, worker: jax.Array, epoch: jax.Array) -> jax.Array:
    """int32[ceil(N / n)], a worker's examples in an epoch; the last is -1 if it has one less."""
    most = deal.left.shape[1]
    key = jax.random.fold_in(jax.random.fold_in(deal.key, worker), epoch)
    first, size = _shard(deal, worker)
    full = jax.random.permutation(key, most)
    less = jnp.pad(jax.random.permutation(key, most - 1), (0, 1)) if most > 1 else full
    return jnp.where(
        jnp.arange(most) < size, first + jnp.where(size == most, full, less), jnp.int32(-1)
    )


def _numbers(deal: Deal) -> jax.Array:
    return jnp.arange(len(deal.taken), dtype=jnp.int32)


def _examples_of(deal: Deal, worker: jax.Array, begin: jax.Array, count: int) -> jax.Array:
    """int32[count]: a worker's examples from the one with number `begin`."""
    most = deal.left.shape[1]
    left = jnp.sum(deal.left[worker] >= 0, dtype=jnp.int32)
    _, size = _shard(deal, worker)
    places = begin + jnp.arange(count, dtype=jnp.int32)
    own = jnp.maximum(places - left, 0)
    epochs = (count - 1) // max(most - 1, 1) + 2
    first = own[0] // size
    orders = jax.vmap(lambda epoch: _order(deal, worker, epoch))(
        first + jnp.arange(epochs, dtype=jnp.int32)
    )
    of_others = deal.left[worker, jnp.minimum(places, most - 1)]
    return jnp.where(places < left, of_others, orders[own // size - first, own % size])


@functools.partial(jax.jit, static_argnames="count")
def _next(deal: Deal, count: int) -> jax.Array:
    return jax.vmap(lambda worker, begin: _examples_of(deal, worker, begin, count))(
        _numbers(deal), deal.taken
    )


def next_examples(deal: Deal, count: int) -> jax.Array:
    """The numbers of the next examples of each worker; nothing is taken yet.

    Args:
      deal: The deal.
      count: How many examples: M mini-batches of b for a window.

    Returns:
      int32[workers, count]. Row i holds mini-batch p of the window of worker i at `p * b`.

    Raises:
      ValueError: If `count` is not positive.

    Example:
      >>> import jax
      >>> from jaxcomm.synchronization import new_deal, next_examples, take_examples
      >>> deal = new_deal(jax.random.key(0), 4, 2)
      >>> later = next_examples(take_examples(deal, jax.numpy.array([1, 0])), 1)
      >>> print((later[:, 0] == next_examples(deal, 2)[[0, 1], [1, 0]]).all())
      True
    """
    return _next(deal, count)


def take_examples(deal: Deal, counts: jax.Array) -> Deal:
    """The deal after workers have finished so many examples.

    Args:
      deal: The deal.
      counts: int32[workers], the examples of *finished* mini-batches: `window.finished * b`. With
        several processes, these are the counts of all workers. A worker may take at most 2^31 - 1
        examples in total.

    Returns:
      The deal, with these examples taken.

    Raises:
      ValueError: If there is not one count per worker.

    Example:
      >>> import jax
      >>> from jaxcomm.synchronization import new_deal, take_examples
      >>> print(take_examples(new_deal(jax.random.key(0), 4, 2), jax.numpy.array([3, 0])).taken)
      [3 0]
    """
    if counts.shape != deal.taken.shape:
        raise ValueError(f"`counts` must be int32{[*deal.taken.shape]}, got {[*counts.shape]}.")
    return deal._replace(taken=deal.taken + jnp.asarray(counts).astype(jnp.int32))


def redeal(deal: Deal, workers: int) -> Deal:
    r"""Deals the examples to another number of workers, without losing or repeating one.

    .. math:: \text{times that } x \text{ was taken} + [x \text{ is left}] = \text{epochs begun
              with } x

    What is left of the epochs that the old workers have begun is dealt in turn to the new workers,
    who take it before their own first epochs. An unfinished mini-batch is not taken, so its
    examples are among those. Calls may follow each other at any time. Nothing is sent.

    Args:
      deal: The deal of the old workers.
      workers: The number of new workers, at most that of examples. They start at position 0: use
        :func:`resize_clock` beside it.

    Returns:
      The deal of the new workers, with another key.

    Raises:
      ValueError: If `workers` is out of range.

    Example:
      >>> import jax
      >>> from jaxcomm.synchronization import new_deal, next_examples, redeal, take_examples
      >>> deal = new_deal(jax.random.key(0), 12, 4)
      >>> used = [*next_examples(deal, 2)[0].tolist(), *next_examples(deal, 1)[1].tolist()]
      >>> deal = redeal(take_examples(deal, jax.numpy.array([2, 1, 0, 0])), 3)
      >>> rest = deal.left[deal.left >= 0].tolist()
      >>> sorted(used + rest), deal.left.shape  # Workers 2 and 3 have not begun.
      ([0, 1, 2, 3, 4, 5], (3, 4))
    """
    fresh = new_deal(deal.key, int(deal.examples), workers)
    key, left = _dealt(deal, fresh.left.size, workers)
    return fresh._replace(key=key, left=left)


@functools.partial(jax.jit, static_argnames=("capacity", "workers"))
def _dealt(deal: Deal, capacity: int, workers: int) -> tuple[jax.Array, jax.Array]:
    """`(key, left)` of the new workers, whose `left` has `capacity` places."""

    def rest(worker: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
        places = jnp.arange(deal.left.shape[1], dtype=jnp.int32)
        left = jnp.sum(deal.left[worker] >= 0, dtype=jnp.int32)
        _, size = _shard(deal, worker)
        epoch, done = jnp.divmod(jnp.maximum(taken - left, 0), size)
        of_own = (done > 0) & (places >= done) & (places < size)
        of_others = (places >= taken) & (places < left)
        chosen = jnp.where(taken < left, deal.left[worker], _order(deal, worker, epoch))
        return chosen, jnp.where(taken < left, of_others, of_own)

    chosen, is_left = (x.ravel() for x in jax.vmap(rest)(_numbers(deal), deal.taken))
    numbers = jnp.where(is_left, chosen, -1)[jnp.argsort(~is_left, stable=True)]
    dealt = jnp.pad(numbers, (0, max(capacity - numbers.size, 0)), constant_values=-1)[:capacity]
    return jax.random.fold_in(deal.key, _NEXT_DEAL), dealt.reshape(-1, workers).T


def queues_of(deal: Deal, data: PyTree, batch_size: int) -> list[Iterator[PyTree]]:
    """For each worker, an endless iterator of its mini-batches, for :class:`RealTimeWindow`.

    Args:
      deal: The deal. It does not change: call :func:`take_examples` with what has finished.
      data: Leaves [examples, ...], all in memory.
      batch_size: b, the number of examples per mini-batch.

    Returns:
      One iterator per worker, of leaves [b, ...].

    Raises:
      ValueError: If `batch_size` is not positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization import new_deal, queues_of
      >>> first, second = queues_of(new_deal(jax.random.key(0), 4, 2), jnp.arange(4), 2)
      >>> print(sorted(next(first).tolist()), sorted(next(second).tolist()))
      [0, 1] [2, 3]
    """
    chunk = batch_size * max(deal.left.shape[1] // batch_size, 1)

    @jax.jit
    def numbers(worker: jax.Array, begin: jax.Array) -> jax.Array:
        return _examples_of(deal, worker, begin, chunk)

    def queue(worker: int) -> Iterator[PyTree]:
        begin = deal.taken[worker]
        while True:
            for rows in numbers(jnp.int32(worker), begin).reshape(-1, batch_size):
                yield jax.tree.map(lambda x, rows=rows: x[rows], data)
            begin = begin + chunk

    return [queue(worker) for worker in range(len(deal.taken))]
