"""Triggers: the rules that end a window."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.synchronization._require import require_int


class Trigger(NamedTuple):
    """The rule that ends a window; its input `float32[workers, M]` is each mini-batch's end time.

    Attributes:
      seconds: A function from these times to the seconds after which the window ends, float32[].
      max_seconds: An upper bound on the seconds of a window, if one exists.
      waits_for_all: Whether it waits for all workers, so that no mini-batch is half finished.
    """

    seconds: Callable[[jax.Array], jax.Array]
    max_seconds: float = math.inf
    waits_for_all: bool = False

    def __call__(self, done: jax.Array) -> jax.Array:
        """The seconds after which the window ends, float32[]."""
        return self.seconds(done)


def all_workers() -> Trigger:
    """The window ends when all workers have finished all their mini-batches, as in synchronous SGD.

    Returns:
      A trigger, for :func:`windows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import all_workers
      >>> print(all_workers()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      6.0
    """
    return Trigger(lambda done: jnp.max(done), waits_for_all=True)


def fastest_worker() -> Trigger:
    """The window ends when the first worker has finished all its mini-batches.

    Returns:
      A trigger, for :func:`windows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import fastest_worker
      >>> print(fastest_worker()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      2.0
    """
    return Trigger(lambda done: jnp.min(done[:, -1]))


def k_sync(workers: int) -> Trigger:
    """The window ends when k workers have finished all their mini-batches.

    Args:
      workers: k, an int of at least 1 and at most the number of workers.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If `workers` is not a positive int; when used, if there are fewer than k workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import k_sync
      >>> print(k_sync(2)(jnp.array([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]])))
      4.0
    """
    require_int(workers, "workers")

    def ends(done: jax.Array) -> jax.Array:
        if workers > len(done):
            raise ValueError(
                f"`k_sync` waits for {workers} workers, but the window has only {len(done)}."
            )
        return jnp.sort(done[:, -1])[workers - 1]

    return Trigger(ends)


def deadline(seconds: float) -> Trigger:
    """The window ends after a fixed time, or when all workers have finished, if that is earlier.

    Args:
      seconds: A positive number.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If `seconds` is not positive and finite; in :func:`windows`, if no worker can
        finish a mini-batch within it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import deadline
      >>> print(deadline(5.0)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      5.0
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"`seconds` must be positive and finite, got {seconds!r}.")
    return Trigger(lambda done: jnp.minimum(jnp.float32(seconds), jnp.max(done)), seconds)


def k_batch_sync(minibatches: int) -> Trigger:
    """The window ends when workers together have finished k mini-batches, or all of them.

    Args:
      minibatches: k, an int of at least 1.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If `minibatches` is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import k_batch_sync
      >>> print(k_batch_sync(3)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      3.0
    """
    require_int(minibatches, "minibatches")
    return Trigger(lambda done: jnp.sort(done.ravel())[min(minibatches, done.size) - 1])
