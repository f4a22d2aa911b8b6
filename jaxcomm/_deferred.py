"""Gradients of a backward pass that has not run yet.

A transformation that aggregates inside the backward pass needs its state before the gradients
exist. So a step may pass deferred gradients to `tx.update`: the transformation runs the backward
pass, with what it adds to it.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax

from jaxcomm._base import PyTree


class Backward:
    """A backward pass that runs once, when a transformation asks for the gradients.

    Attributes:
      evaluate: `(params, batch, part) -> (value, gradient)`. If a batch has several parts, `part`
        is the number of this one, and changes the key of the loss.
      params: The parameters at which the gradient is taken.
      batch: The rows of this device.
      has_model_state: Whether the loss changes a model state.
      axes: All axes over which a local gradient differs.
      inner: Those of `axes` that index the devices of one worker.
      value: What the loss returned; `None` before the backward pass.
      finite: Whether all means were finite, bool[], equal on all workers. The transformation sets
        it.
    """

    finite: jax.Array

    def __init__(
        self,
        value_and_gradient: Callable[..., tuple[Any, PyTree]],
        params: PyTree,
        batch: PyTree,
        axes: tuple[str, ...],
        inner: tuple[str, ...],
        has_model_state: bool = False,
    ):
        self.evaluate = value_and_gradient
        self.params = params
        self.batch = batch
        self.has_model_state = has_model_state
        self.axes = axes
        self.inner = inner
        self.has_run = False
        self.value: Any = None

    def deferred(self) -> PyTree:
        """A deferred gradient in place of each parameter."""
        return jax.tree.map(lambda _: DeferredGradient(self), self.params)

    def begin(self, updates: PyTree) -> None:
        """Raises if a transformation has some of the gradients, or another one has run this."""
        found: Any = jax.tree.structure(updates)
        if found != jax.tree.structure(self.params):
            raise ValueError(
                "`wait_free` runs the backward pass, so it needs all parameters, and not the part "
                "that `optax.masked` or `optax.multi_transform` gives it. Place it before them, "
                "with one aggregator for each group: `wait_free([first, second], plan=...)`."
            )
        if self.has_run:
            raise ValueError("`tx` has several `wait_free`, and one backward pass serves one only.")
        self.has_run = True


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    del args, kwargs
    raise ValueError(
        "`wait_free` aggregates inside the backward pass, so a transformation before it cannot see "
        "whole gradients. Place `wait_free` first in `optax.chain`, and what needs all gradients, "
        "such as `optax.clip_by_global_norm`, after it; or use the aggregator without `wait_free`."
    )


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
