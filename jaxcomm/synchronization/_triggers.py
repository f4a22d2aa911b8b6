"""What closes a window."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.synchronization._require import require_int


class Trigger(NamedTuple):
    """What closes a window; called with `float32[workers, M]`, when each mini-batch is done.

    Attributes:
      ends: From these times to the seconds after which the window ends, float32[].
      longest: Seconds that no window is longer than, where that is known.
      waits: Whether it waits for all, so that nothing is half done.
    """

    ends: Callable[[jax.Array], jax.Array]
    longest: float = math.inf
    waits: bool = False

    def __call__(self, done: jax.Array) -> jax.Array:
        """When the window ends, float32[] seconds."""
        return self.ends(done)


def all_workers() -> Trigger:
    """The window ends when all workers are done: the synchronous baseline.

    Returns:
      A trigger, for :func:`windows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import all_workers
      >>> print(all_workers()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      6.0
    """
    return Trigger(lambda done: jnp.max(done), waits=True)


def fastest_worker() -> Trigger:
    """The window ends when the first worker is done.

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
    """The window ends when so many workers are done.

    Args:
      workers: An int of at least 1, and at most all.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If it is not; when used, if there are fewer.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import k_sync
      >>> print(k_sync(2)(jnp.array([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]])))
      4.0
    """
    require_int(workers, "workers")

    def ends(done: jax.Array) -> jax.Array:
        if workers > len(done):
            raise ValueError(f"A quorum of {workers} is more than all {len(done)} workers.")
        return jnp.sort(done[:, -1])[workers - 1]

    return Trigger(ends)


def deadline(seconds: float) -> Trigger:
    """The window ends after a time, or before if all are done.

    Args:
      seconds: A positive number.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If it is not; in :func:`windows`, if no worker can do one mini-batch in it.

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
    """The window ends when all workers together have done so many mini-batches, or all of them.

    Args:
      minibatches: An int of at least 1.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If it is not.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import k_batch_sync
      >>> print(k_batch_sync(3)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      3.0
    """
    require_int(minibatches, "minibatches")
    return Trigger(lambda done: jnp.sort(done.ravel())[min(minibatches, done.size) - 1])
