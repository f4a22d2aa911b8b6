"""Barriers: which workers wait for each other, and the resulting clocks."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise, gossip
from jaxcomm.synchronization._exchange import period_of
from jaxcomm.synchronization._require import require_seconds


class Barrier(NamedTuple):
    """The barrier at the end of a step."""

    waits_for: jax.Array  # bool[workers, workers], row i: the workers that worker i waits for
    seconds: jax.Array  # float32[workers], the communication time of each worker


BarrierSchedule: TypeAlias = Callable[[jax.Array], Barrier]
"""A function from the number of steps so far, int32[], to the barrier of the next step."""


def global_barrier(workers: int, *, period: int = 1, seconds: float = 0.0) -> BarrierSchedule:
    """All workers wait for each other after every `period` steps, and at no other time.

    This is the barrier of synchronous SGD, or of local SGD.

    Args:
      workers: The number of workers.
      period: The number of steps between barriers.
      seconds: The communication time of a barrier.

    Returns:
      A function from the number of steps so far, int32[], to the :class:`Barrier` at the end of the
      next step.

    Raises:
      ValueError: If `period` is not a positive int, or `seconds` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import global_barrier
      >>> global_barrier(2, period=3)(jnp.int32(2)).waits_for.tolist()
      [[True, True], [True, True]]
    """
    period_of(period)
    require_seconds(seconds, "seconds")
    identity = jnp.eye(workers, dtype=bool)

    def barrier(step: jax.Array) -> Barrier:
        due = step % period == period - 1
        return Barrier(identity | due, jnp.where(due, jnp.full(workers, seconds, jnp.float32), 0))

    return barrier


def neighbor_barrier(mixing: Any, *, seconds: float = 0.0, seed: int = 0) -> BarrierSchedule:
    """Workers wait for the neighbors from which they receive messages in a step.

    Args:
      mixing: As for :func:`jaxcomm.gossip.dpsgd`. With the same `seed`, random graphs are the same
        as in the gossip method.
      seconds: The time of a message. A worker receives its messages one after the other.
      seed: Seed for random mixing.

    Returns:
      A function from the number of steps so far, int32[], to the :class:`Barrier` at the end of the
      next step.

    Raises:
      ValueError: If `mixing` is invalid, or `seconds` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import neighbor_barrier
      >>> neighbor_barrier(gossip.ring(4), seconds=1.0)(jnp.int32(0)).seconds.tolist()
      [2.0, 2.0, 2.0, 2.0]
    """
    require_seconds(seconds, "seconds")
    resolved = gossip.to_mixing(mixing)
    identity = np.eye(resolved.workers, dtype=bool)
    links = np.stack([matrix != 0 for matrix in resolved.matrices]) & ~identity
    key = _noise.make_key(seed, None)

    def barrier(step: jax.Array) -> Barrier:
        active = jnp.asarray(links)
        if resolved.active:
            (coins,) = _noise.make_coins(key, step, 1, jnp.zeros((), jnp.int32))
            flags = resolved.active(coins.public, step.astype(jnp.uint32))
            active = active & flags[:, None, None]
        messages = jnp.sum(active, axis=(0, 2), dtype=jnp.int32)
        return Barrier(jnp.any(active, axis=0) | identity, seconds * messages.astype(jnp.float32))

    return barrier


def wait_at_barrier(clocks: jax.Array, work: jax.Array, barrier: Barrier) -> jax.Array:
    r"""The clocks of workers after a step and the barrier at its end.

    .. math:: T_i \gets \max_{j \in \{i\} \cup \mathrm{waits}(i)} (T_j + w_j) + c_i

    Args:
      clocks: :math:`T`, float32[workers], seconds.
      work: :math:`w`, float32[workers], seconds of the step.
      barrier: The barrier: which workers wait for which, and :math:`c`.

    Returns:
      float32[workers], seconds.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import neighbor_barrier, wait_at_barrier
      >>> barrier = neighbor_barrier(gossip.path(3))(jnp.int32(0))
      >>> print(wait_at_barrier(jnp.zeros(3), jnp.array([1.0, 2.0, 5.0]), barrier))
      [2. 5. 5.]
    """
    done = clocks + work
    return (
        jnp.max(jnp.where(barrier.waits_for, done[None, :], done[:, None]), axis=1)
        + barrier.seconds
    )
