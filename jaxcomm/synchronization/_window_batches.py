"""The assignment of examples to workers' mini-batches."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm._contract import PyTree
from jaxcomm.synchronization._require import require_int


def _examples(shards: PyTree) -> tuple[int, int]:
    shapes = {x.shape[:2] for x in jax.tree.leaves(shards)}
    if len(shapes) != 1 or any(len(shape) < 2 or not all(shape) for shape in shapes):
        raise ValueError(
            "`shards` must be leaves `[workers, examples, ...]` of equal leading sizes, got "
            f"{[x.shape for x in jax.tree.leaves(shards)]}."
        )
    return next(iter(shapes))


def window_batches(
    key: jax.Array, shards: PyTree, first: jax.Array, *, minibatches: int, batch_size: int
) -> PyTree:
    r"""Selects the mini-batches of a window from each worker's own examples.

    A worker uses its examples in a new random order in each epoch. Its mini-batches are consecutive
    blocks of that order: number :math:`p` holds examples :math:`pb` to :math:`(p+1) b - 1`, counted
    over epochs. Since :func:`close_window` keeps unfinished mini-batches in the queue, an epoch
    contains each example exactly once, however slow a worker is. The result depends only on the
    position, so there is no state to save.

    Args:
      key: key[], which determines the orders.
      shards: Leaves [workers, examples, ...]. All of them are held in memory, and each window draws
        the order of an epoch again. If a data set is too large for this, read :attr:`Window.first`
        in a custom data loader.
      first: int32[workers], the number of the first mini-batch of each worker:
        :attr:`Window.first`.
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
    require_int(minibatches, "minibatches")
    require_int(batch_size, "batch_size")
    workers, examples = _examples(shards)
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
