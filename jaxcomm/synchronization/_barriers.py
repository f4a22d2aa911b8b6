"""Who waits for whom where workers meet, and what their clocks then show."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise, gossip
from jaxcomm.synchronization._exchange import period_of
from jaxcomm.synchronization._require import require_seconds


class Barrier(NamedTuple):
    """What happens at the end of a step."""

    waits_for: jax.Array  # bool[workers, workers], from whom each takes something in
    seconds: jax.Array  # float32[workers], that this takes each


BarrierSchedule: TypeAlias = Callable[[jax.Array], Barrier]
"""From the steps taken, int32[], to the meeting of the next."""


def global_barrier(workers: int, *, period: int = 1, seconds: float = 0.0) -> BarrierSchedule:
    """Everybody waits for everybody at the end of every so many steps, and for nobody else.

    Synchronous SGD, or local SGD.

    Args:
      workers: How many.
      period: Steps from one meeting to the next.
      seconds: That a meeting takes.

    Returns:
      A function of the steps taken, int32[], to who hears whom at the end of that one, and the
      seconds that it takes.

    Raises:
      ValueError: If `period` is no positive int or `seconds` negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import global_barrier
      >>> global_barrier(2, period=3)(jnp.int32(2)).waits_for.tolist()
      [[True, True], [True, True]]
    """
    period_of(period)
    require_seconds(seconds, "seconds")
    alone = jnp.eye(workers, dtype=bool)

    def meeting(step: jax.Array) -> Barrier:
        due = (step + 1) % period == 0
        return Barrier(alone | due, jnp.where(due, jnp.full(workers, seconds), 0))

    return meeting


def neighbor_barrier(mixing: Any, *, seconds: float = 0.0, seed: int = 0) -> BarrierSchedule:
    """Workers wait for the neighbors that they hear in a step.

    Args:
      mixing: As for :func:`jaxcomm.gossip.dpsgd`; a graph that is drawn is drawn alike here and
        there, of the same `seed`.
      seconds: That a message takes; a worker receives one after the other.
      seed: Seed of what is drawn.

    Returns:
      A function of the steps taken, int32[], to who hears whom at the end of that one, and the
      seconds that it takes each.

    Raises:
      ValueError: If it is no mixing, or `seconds` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import neighbor_barrier
      >>> neighbor_barrier(gossip.ring(4), seconds=1.0)(jnp.int32(0)).seconds.tolist()
      [2.0, 2.0, 2.0, 2.0]
    """
    require_seconds(seconds, "seconds")
    given = gossip.to_mixing(mixing)
    alone = np.eye(given.workers, dtype=bool)
    links = np.stack([matrix != 0 for matrix in given.matrices]) & ~alone
    key = _noise.make_key(seed, None)

    def meeting(step: jax.Array) -> Barrier:
        active = jnp.asarray(links)
        if given.active:
            (coins,) = _noise.make_coins(key, step, 1, jnp.zeros((), jnp.int32))
            flags = given.active(coins.public, step.astype(jnp.uint32))
            active = active & flags[:, None, None]
        messages = jnp.sum(active, axis=(0, 2))
        return Barrier(jnp.any(active, axis=0) | alone, seconds * messages.astype(jnp.float32))

    return meeting


def wait_at_barrier(clocks: jax.Array, work: jax.Array, meeting: Barrier) -> jax.Array:
    r"""Clocks of workers after a step and the meeting at its end.

    .. math:: T_i \gets \max_{j \in \{i\} \cup \mathrm{hears}(i)} (T_j + w_j) + c_i

    Args:
      clocks: :math:`T`, float32[workers], seconds.
      work: :math:`w`, float32[workers], seconds of the step.
      meeting: Who hears whom, and :math:`c`.

    Returns:
      float32[workers], seconds.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import neighbor_barrier, wait_at_barrier
      >>> meeting = neighbor_barrier(gossip.path(3))(jnp.int32(0))
      >>> print(wait_at_barrier(jnp.zeros(3), jnp.array([1.0, 2.0, 5.0]), meeting))
      [2. 5. 5.]
    """
    done = clocks + work
    return (
        jnp.max(jnp.where(meeting.waits_for, done[None, :], done[:, None]), axis=1)
        + meeting.seconds
    )
