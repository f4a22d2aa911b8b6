"""What a policy is: the functions that decide what an event changes, and who begins after it."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm._contract import PyTree


class Event(NamedTuple):
    """A worker finishes a gradient."""

    worker: jax.Array  # int32[]
    number: jax.Array  # int32[], the gradients that it finished before: its clock
    position: jax.Array  # int32[], the events before this one
    staleness: jax.Array  # int32[], the events of others since it began this gradient
    seconds: jax.Array  # float32[], the simulated time
    key: jax.Array  # key[], different for each event


class Sent(NamedTuple):
    """The messages of an event: what the worker sends, and what it receives in reply."""

    uploads: jax.Array  # int32[], messages
    upload_bytes: jax.Array  # int32[]
    downloads: jax.Array  # int32[], messages
    download_bytes: jax.Array  # int32[]


Work: TypeAlias = Callable[[PyTree, Event], tuple[jax.Array, PyTree]]
"""`(point, event) -> (loss, result)`; for most policies, a loss and its gradient at `point`."""


def sent(
    uploads: jax.Array | int = 0,
    upload_bytes: jax.Array | int = 0,
    downloads: jax.Array | int = 0,
    download_bytes: jax.Array | int = 0,
) -> Sent:
    """The messages of an event.

    Args:
      uploads: The number of messages that the worker sends.
      upload_bytes: Their bytes together.
      downloads: The number of messages that it receives.
      download_bytes: Their bytes together.

    Returns:
      The counts, int32[] each.

    Example:
      >>> from jaxcomm.synchronization.events import sent
      >>> print(sent(uploads=1, upload_bytes=400).upload_bytes)
      400
    """
    counts = (uploads, upload_bytes, downloads, download_bytes)
    return Sent(*(jnp.asarray(count, jnp.int32) for count in counts))


def all_idle(state: PyTree, idle: jax.Array) -> jax.Array:
    """The `begins` of a policy whose workers never wait."""
    return idle


def unchanged(work: Work) -> Work:
    """The `work` of a policy whose workers compute what the user's function computes."""
    return work


class Policy(NamedTuple):
    """Who waits for whom, and what the parameters become: pure functions of one state.

    All but `init` run in a `jax.lax.scan`, once per event. They may read and write a few rows of
    arrays [workers, ...]. They must not compute new arrays of that size, except arrays [workers].

    Attributes:
      init: `(params, workers) -> state`, before the first event.
      point: `(state, event) -> point`, what the gradient of the event is evaluated at. It is called
        when the gradient is finished. So it must not depend on what changed since the worker began:
        a policy keeps a copy for the worker if others may change it meanwhile.
      finish: `(state, event, result) -> (state, Sent)`, the effect of the event and its messages.
      model: `state -> params`, the parameters that the method returns; called outside the scan.
      begins: `(state, idle) -> bool[workers]`, the workers that now begin their next gradient.
        `idle`, bool[workers], has the workers that compute nothing. By default, all of them. If no
        worker computes, all later times are NaN.
      work: A function from the user's `(point, event) -> (loss, result)` to that of the policy,
        such as one that evaluates a gradient at two points. By default, the same.
      restarts: Whether a worker in `begins` that is not idle abandons its gradient and restarts.
    """

    init: Callable[[PyTree, int], Any]
    point: Callable[[Any, Event], PyTree]
    finish: Callable[[Any, Event, PyTree], tuple[Any, Sent]]
    model: Callable[[Any], PyTree]
    begins: Callable[[Any, jax.Array], jax.Array] = all_idle
    work: Callable[[Work], Work] = unchanged
    restarts: bool = False
