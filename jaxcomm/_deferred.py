"""Gradients of a backward pass that has not run yet.

A transformation that aggregates inside the backward pass, or evaluates the loss only, needs its
state before the gradients exist. So a step may pass deferred gradients to `tx.update`: the
transformation runs the backward pass, with what it adds to it, or the loss.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax

from jaxcomm._base import PyTree


class Taker(NamedTuple):
    """A transformation that takes deferred gradients, and what its errors say.

    Attributes:
      name: Its name.
      divided: Why it needs all parameters, and what to do.
      touched: Why no other transformation may come before it, and what to do.
    """

    name: str
    divided: str
    touched: str


class Backward:
    """A backward pass that runs once, when a transformation asks for the gradients.

    Attributes:
      taker: The transformation that is to run it.
      loss: `(params, rows) -> value`, by default of the same rows: the forward pass alone.
      evaluate: `(params, batch, part) -> (value, gradient)`. If a batch has several parts, `part`
        is the number of this one, and changes the key of the loss.
      params: The parameters at which the gradient is taken.
      batch: The rows of this device.
      has_model_state: Whether the loss changes a model state.
      axes: All axes over which a local gradient differs.
      inner: Those of `axes` that index the devices of one worker.
      is_own: Whether each worker has parameters of its own.
      value: What the loss returned; `None` before the backward pass.
      finite: Whether all means were finite, bool[], equal on all workers. The transformation sets
        it.
    """

    finite: jax.Array

    def __init__(
        self,
        taker: Taker,
        loss: Callable[..., Any],
        value_and_gradient: Callable[..., tuple[Any, PyTree]],
        params: PyTree,
        batch: PyTree,
        axes: tuple[str, ...],
        inner: tuple[str, ...],
        has_model_state: bool = False,
        is_own: bool = False,
    ):
        self.taker = taker
        self.loss = loss
        self.evaluate = value_and_gradient
        self.params = params
        self.batch = batch
        self.has_model_state = has_model_state
        self.axes = axes
        self.inner = inner
        self.is_own = is_own
        self.has_run = False
        self.value: Any = None

    def deferred(self) -> PyTree:
        """A deferred gradient in place of each parameter."""
        return jax.tree.map(lambda _: DeferredGradient(self), self.params)

    def begin(self, updates: PyTree) -> None:
        """Raises if a transformation has some of the gradients, or another one has run this."""
        found: Any = jax.tree.structure(updates)
        if found != jax.tree.structure(self.params):
            raise ValueError(self.taker.divided)
        if self.has_run:
            raise ValueError(
                f"`tx` has several `{self.taker.name}`, and one backward pass serves one only."
            )
        self.has_run = True


_RUNNING: contextvars.ContextVar[Backward | None] = contextvars.ContextVar("running", default=None)


@contextlib.contextmanager
def running(backward: Backward) -> Iterator[None]:
    """States, while a step is traced, which backward pass its transformations may run."""
    token = _RUNNING.set(backward)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def are_averaged() -> bool:
    """Whether the transformation that ran the backward pass has averaged its gradients."""
    backward = _RUNNING.get()
    return backward is not None and hasattr(backward, "finite")


def _refuse(deferred: "DeferredGradient", *args: object, **kwargs: object) -> NoReturn:
    del args, kwargs
    raise ValueError(deferred.backward.taker.touched)


class DeferredGradient:
    """One leaf of the gradient of a backward pass that has not run; it refuses arithmetic."""

    def __init__(self, backward: Backward):
        self.backward = backward

    __jax_array__ = property(_refuse)
    shape = dtype = size = ndim = real = T = property(_refuse)
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = astype = _refuse


def backward_of(updates: PyTree) -> Backward | None:
    """The backward pass of deferred gradients; `None` for gradients that are arrays."""
    for leaf in jax.tree.leaves(updates):
        if isinstance(leaf, DeferredGradient):
            return leaf.backward
    return None
