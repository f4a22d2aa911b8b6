"""Elastic averaging: workers are pulled to a center, and pull it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import PyTree
from jaxcomm._require import AboveZero, AtLeastZero, BelowOne, Positive, checked
from jaxcomm.synchronization._trees import (
    chosen,
    empty,
    minus,
    narrow,
    plus,
    scaled,
    wide,
)
from jaxcomm.synchronization.events._engine import Event, Policy, Steps, Task, Work
from jaxcomm.synchronization.events._messages import Sent, bytes_of, sent


class Center(NamedTuple):
    """The state of the center."""

    params: PyTree  # in float32 at least
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


class Elastic(NamedTuple):
    """The memory of a worker."""

    params: PyTree  # in float32 at least
    optimizer: Any
    updates: PyTree  # of the last gradient, which a message is followed by
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


@checked
def easgd(
    tx: optax.GradientTransformation, *, elasticity: AtLeastZero, period: Positive = 1
) -> Policy:
    r"""Asynchronous elastic averaging SGD (EASGD).

    .. math:: x_i \gets x_i - \alpha (x_i - c) + \mathrm{tx}_i(g_i(x_i)), \qquad
              c \gets c + \alpha (x_i - c)

    Both lines use the old :math:`x_i` and :math:`c`, so the elastic step keeps
    :math:`c + \sum_i x_i`. It takes place with the first and then every `period`-th gradient of a
    worker. Each elastic step is one message to the center and one reply; the other steps send
    nothing. No worker waits.

    Args:
      tx: The optimizer of each worker.
      elasticity: :math:`\alpha`, at least 0, with :math:`n \alpha \le 1` for n workers. The paper
        recommends :math:`n \alpha = 0.9`.
      period: The number of gradients of a worker between its elastic steps.

    Returns:
      A policy, for :func:`event_loop`. Its model is the center.

    Raises:
      ValueError: If `elasticity` is negative or `period` is not a positive int; when started, if
        :math:`n \alpha > 1`.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import events
      >>> policy = events.easgd(optax.sgd(0.1), elasticity=0.9 / 8, period=4)

    References:
      Zhang et al., `Deep learning with Elastic Averaging SGD <https://arxiv.org/abs/1412.6651>`_,
      2015.

    Differs from the paper: in Algorithm 1, the elastic step takes place when a worker begins a
    gradient, with the center of then; here when it has finished it. So the center is one gradient
    of each worker behind. As there, the gradient is taken at :math:`x_i` before the elastic step.
    """
    return _elastic(tx, lambda params, optimizer: params, elasticity, period)


@checked
def eamsgd(
    learning_rate: AboveZero, momentum: BelowOne, *, elasticity: AtLeastZero, period: Positive = 1
) -> Policy:
    r"""Elastic averaging SGD with Nesterov's momentum on each worker (EAMSGD).

    .. math:: v_i \gets \delta v_i - \eta\, g_i(x_i + \delta v_i), \qquad
              x_i \gets x_i - \alpha (x_i - c) + v_i, \qquad c \gets c + \alpha (x_i - c)

    The elastic step and its messages are those of :func:`easgd`.

    Args:
      learning_rate: :math:`\eta`, above 0.
      momentum: :math:`\delta` in [0, 1).
      elasticity: :math:`\alpha`, as for :func:`easgd`.
      period: As for :func:`easgd`.

    Returns:
      A policy, for :func:`event_loop`. Its model is the center.

    Raises:
      ValueError: As :func:`easgd`, or if `learning_rate` or `momentum` is out of range.

    Example:
      >>> from jaxcomm.synchronization import events
      >>> policy = events.eamsgd(0.1, momentum=0.9, elasticity=0.9 / 8, period=4)

    References:
      Zhang et al., `Deep learning with Elastic Averaging SGD <https://arxiv.org/abs/1412.6651>`_,
      2015.

    Differs from the paper: as :func:`easgd`.
    """
    tx = optax.chain(optax.scale(-learning_rate), optax.trace(momentum))

    def ahead(params: PyTree, optimizer: Any) -> PyTree:
        return plus(params, scaled(optimizer[1].trace, momentum))

    return _elastic(tx, ahead, elasticity, period)


def _elastic(
    tx: optax.GradientTransformation,
    look: Callable[[PyTree, Any], PyTree],
    elasticity: float,
    period: int,
) -> Policy:
    """Elastic averaging whose gradients are taken at `look(params, optimizer)`."""

    def init(params: PyTree, workers: int) -> Center:
        if workers * elasticity > 1 + 1e-9:
            raise ValueError(f"`elasticity`={elasticity:g} must be at most {1 / workers:g}, 1 / n.")
        return Center(wide(params), empty(params))

    def join(params: PyTree, workers: int) -> Elastic:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Elastic(wide(params), tx.init(params), zeros, empty(params))

    def talks(number: jax.Array) -> jax.Array:
        return number % period == 0

    def steps(work: Work) -> Steps:
        def step(own: Elastic, view: PyTree, task: Task) -> tuple[jax.Array, PyTree, Elastic]:
            point = narrow(own.params, own.dtypes)
            loss, gradient = work(look(point, own.optimizer), task)
            updates, optimizer = tx.update(gradient, own.optimizer, point)
            due = talks(task.number)
            params = chosen(due, own.params, plus(own.params, updates))
            return loss, own.params, Elastic(params, optimizer, updates, own.dtypes)

        return step

    def receive(own: Elastic, pull: PyTree) -> Elastic:
        return own._replace(params=plus(minus(own.params, pull), own.updates))

    def finish(state: Center, event: Event, params: PyTree) -> tuple[Center, PyTree, Sent]:
        pull = scaled(minus(params, state.params), elasticity)
        size = bytes_of(params)
        return state._replace(params=plus(state.params, pull)), pull, sent(1, size, 1, size)

    return Policy(
        init=init,
        view=lambda state, worker: (),
        steps=steps,
        finish=finish,
        model=lambda state: narrow(state.params, state.dtypes),
        join=join,
        receive=receive,
        talks=talks,
        attend=lambda state, present, seconds: state,
        move=lambda state, change: state._replace(params=plus(state.params, change)),
    )
