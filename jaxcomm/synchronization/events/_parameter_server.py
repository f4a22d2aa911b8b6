"""Asynchronous SGD: the server applies each gradient when it arrives."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import Codec, PyTree
from jaxcomm._require import require_transformation
from jaxcomm.synchronization._trees import row, rows_of, scaled, with_row
from jaxcomm.synchronization.events._policy import Event, Policy, Sent, bytes_of, message, sent


class ServerState(NamedTuple):
    """A server, and what each worker has read from it."""

    params: PyTree
    optimizer: Any
    read: PyTree  # leaves [workers, ...], the parameters at which each worker computes
    memory: Any  # leaves [workers, ...], of the codec


def inverse_staleness(staleness: jax.Array) -> jax.Array:
    r"""The weight of a gradient in staleness-aware asynchronous SGD.

    .. math:: w(\tau) = \frac{1}{\max(\tau, 1)}

    Args:
      staleness: :math:`\tau`, int32[], the updates of the server since the worker read from it.

    Returns:
      float32[].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization.events import inverse_staleness
      >>> print(inverse_staleness(jnp.int32(4)))
      0.25

    References:
      Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
      <https://arxiv.org/abs/1511.05950>`_, 2016.
    """
    return 1 / jnp.maximum(staleness, 1).astype(jnp.float32)


def parameter_server(
    tx: optax.GradientTransformation,
    *,
    weight: Callable[[jax.Array], jax.Array] | None = None,
    codec: Codec | None = None,
) -> Policy:
    r"""Asynchronous SGD (ASP): no worker waits, and gradients are stale.

    .. math:: x^{t+1} = x^t + \mathrm{tx}\big(w(\tau)\, g_i(x^{t - \tau})\big)

    Worker i has read the parameters :math:`\tau` updates ago. With one worker this is SGD. Each
    gradient is one message to the server, encoded by `codec`; the reply has the parameters.

    Args:
      tx: The optimizer of the server.
      weight: :math:`w`, a function from the staleness, int32[], to a float32[], such as
        :func:`inverse_staleness`. By default 1.
      codec: Encodes the gradients, leaf by leaf. By default they are sent exactly. Its memory, such
        as a residual, belongs to the worker.

    Returns:
      A policy, for :func:`event_loop`. It keeps the parameters that each worker has read.

    Raises:
      ValueError: If `tx` is not an optax transformation, or `codec` is not a codec.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import events
      >>> plain = events.parameter_server(optax.sgd(0.1))
      >>> aware = events.parameter_server(optax.sgd(0.1), weight=events.inverse_staleness)

    References:
      Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
      <https://arxiv.org/abs/1511.05950>`_, 2016.
      Niu et al., `Hogwild! <https://arxiv.org/abs/1106.5730>`_, 2011.

    Differs from Hogwild: an update is atomic. There, workers of one machine write coordinates
    without a lock, and may read half of an update.
    """
    require_transformation(tx)
    upload = message(codec)

    def init(params: PyTree, workers: int) -> ServerState:
        memory = rows_of(upload.init(params), workers)
        return ServerState(params, tx.init(params), rows_of(params, workers), memory)

    def finish(state: ServerState, event: Event, gradient: PyTree) -> tuple[ServerState, Sent]:
        own = row(state.memory, event.worker)
        received, own = upload.send(own, event.key, gradient)
        if weight is not None:
            received = scaled(received, weight(event.staleness))
        updates, optimizer = tx.update(received, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return ServerState(
            params=params,
            optimizer=optimizer,
            read=with_row(state.read, event.worker, params),
            memory=with_row(state.memory, event.worker, own),
        ), sent(1, upload.bytes(gradient), 1, bytes_of(params))

    return Policy(
        init=init,
        point=lambda state, event: row(state.read, event.worker),
        finish=finish,
        model=lambda state: state.params,
    )
