"""Which examples are in a worker's mini-batches."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._base import PyTree
from jaxcomm.synchronization._require import require_int


def _examples(shards: PyTree) -> tuple[int, int]:
    shapes = {x.shape[:2] for x in jax.tree.leaves(shards)}
    if len(shapes) != 1 or any(len(shape) < 2 or not all(shape) for shape in shapes):
        raise ValueError(
            "`shards` must be `[workers, examples, ...]`, as many in each leaf, got "
            f"{[x.shape for x in jax.tree.leaves(shards)]}."
        )
    return next(iter(shapes))


def window_batches(
    key: jax.Array, shards: PyTree, first: jax.Array, *, minibatches: int, size: int
) -> PyTree:
    r"""The mini-batches that workers are to do in a window, each from its own examples.

    A worker goes through its examples in a new random order in each epoch, and its mini-batches are
    the next so many of that order: number :math:`p` holds examples :math:`pb` to
    :math:`(p+1) b - 1`, counted over epochs. As long as :func:`close_window` leaves what is
    unfinished in the queue, an epoch holds each example just once, whoever is slow. A function of
    the position alone, so that there is nothing to save.

    Args:
      key: key[], which decides the orders.
      shards: Leaves [workers, examples, ...]. All of them are held in memory, and an epoch's order
        is drawn anew in each window: for data sets of which this is much, read :attr:`Window.first`
        in a loader of one's own.
      first: int32[workers], the number of the first mini-batch of each: :attr:`Window.first`.
      minibatches: M, of each worker.
      size: b, examples of a mini-batch; :math:`pb` must fit an int32.

    Returns:
      Leaves [workers M, b, ...], a `batch` for steps with :func:`window_gradients`.

    Raises:
      ValueError: If leaves are not of as many workers and examples, or a number is not positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization import window_batches
      >>> shards = jnp.arange(4).reshape(2, 2)
      >>> dealt = window_batches(
      ...     jax.random.key(0), shards, jnp.array([0, 5]), minibatches=2, size=1
      ... )
      >>> sorted(dealt[:2, 0].tolist()), dealt.shape
      ([0, 1], (4, 1))
    """
    require_int(minibatches, "minibatches")
    require_int(size, "size")
    workers, examples = _examples(shards)
    window = minibatches * size
    epochs = (window + examples - 2) // examples + 1

    def rows(worker: jax.Array, number: jax.Array) -> jax.Array:
        begin = number * size
        own = jax.random.fold_in(key, worker)

        def order(epoch: jax.Array) -> jax.Array:
            return jax.random.permutation(jax.random.fold_in(own, epoch), examples)

        orders = jax.vmap(order)(begin // examples + jnp.arange(epochs, dtype=jnp.int32))
        return jax.lax.dynamic_slice(orders.ravel(), (begin % examples,), (window,))

    chosen = jax.vmap(rows)(jnp.arange(workers, dtype=jnp.int32), first)

    def take(shard: jax.Array, own: jax.Array) -> Any:
        return shard[own]

    def of_leaf(x: jax.Array) -> jax.Array:
        dealt = jax.vmap(take)(jnp.asarray(x), chosen)
        return dealt.reshape(workers * minibatches, size, *x.shape[2:])

    return jax.tree.map(of_leaf, shards)
