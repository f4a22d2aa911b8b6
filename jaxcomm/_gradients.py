"""Gradients that JAX does not sum over workers; those of a backward pass that has not run yet.

A transformation that aggregates inside the backward pass, or evaluates the loss only, needs its
state before the gradients exist. So a step may pass deferred gradients to `tx.update`: the
transformation runs the backward pass, with what it adds to it, or the loss.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree

LossFn: TypeAlias = Callable[..., Any]

LOCAL = "jaxcomm_local_gradient"
"""The name of local gradients in a program whose types do not say that they are local."""


def _named(tree: PyTree, axis_name: AxisName) -> PyTree:
    """The tree, marked as local where no types say so."""
    if all(_axis.mode(name) != "unchecked" for name in _axis.names(axis_name)):
        return tree
    return jax.tree.map(lambda x: checkpoint_name(x, LOCAL), tree)


def local_value_and_grad(
    loss_fn: LossFn, has_aux: bool = False, *, axis_name: AxisName = "data"
) -> LossFn:
    r"""Like `jax.value_and_grad`, but the gradient is local to this worker.

    .. math:: (f_i(x), \nabla f_i(x)) \quad\text{and not}\quad
              (f_i(x), \textstyle\sum_j \nabla f_j(x)),

    where `jax.value_and_grad` returns the latter inside `jax.shard_map`. Nothing is sent. If
    `loss_fn` itself averages over workers, as with `jax.lax.pmean`, the mean of the gradients over
    workers is that of the mean loss.

    Args:
      loss_fn: `(params, *args) -> loss`, or `(loss, aux)` with `has_aux=True`.
      has_aux: Whether `loss_fn` returns a pair.
      axis_name: The mesh axis, or axes, of the workers. JAX still sums the gradient over
        other axes of the mesh.

    Returns:
      A function `(params, *args) -> (value, gradient)`. Under `jax.shard_map(check_vma=False)` it
      takes every loss. Otherwise the loss follows JAX's rules for types there.

    Raises:
      ValueError: If `axis_name` is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> def gradient(x):
      ...     return jaxcomm.local_value_and_grad(lambda w, x: w * x)(jnp.float32(1), x)[1]
      >>> print(jax.vmap(gradient, axis_name="data")(jnp.arange(3.0)))
      [0. 1. 2.]
    """

    def loss(params: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # The variables of flax.nnx belong to the trace in which they were last unflattened.
        rebuilt = {name: jax.tree.map(lambda x: x, value) for name, value in kwargs.items()}
        value = loss_fn(params, *jax.tree.map(lambda x: x, args), **rebuilt)
        own, *aux = value if has_aux else (value,)
        # Otherwise the gradient of a mean over workers would be divided once too often.
        own = _named(_axis.local_params(own, axis_name=axis_name), axis_name)
        return (own, *aux) if has_aux else own

    value_and_grad = jax.value_and_grad(loss, has_aux=has_aux)

    @functools.wraps(loss_fn)
    def local(params: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        own = _axis.local_params(params, axis_name=axis_name)
        value, gradient = value_and_grad(own, *args, **kwargs)
        return value, _named(gradient, axis_name)

    return local


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


@dataclasses.dataclass(eq=False)
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
      has_run: Whether a transformation has asked for the gradients.
      value: What the loss returned; `None` before the backward pass.
      finite: Whether all means were finite, bool[], equal on all workers. The transformation sets
        it.
    """

    taker: Taker
    loss: Callable[..., Any]
    evaluate: Callable[..., tuple[Any, PyTree]]
    params: PyTree
    batch: PyTree
    axes: tuple[str, ...]
    inner: tuple[str, ...]
    has_model_state: bool = False
    is_own: bool = False
    has_run: bool = False
    value: Any = None
    finite: jax.Array = dataclasses.field(init=False)

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


@contextlib.contextmanager
def running(backward: Backward) -> Iterator[None]:
    """States, while a step is traced, which backward pass its transformations may run."""
    token = _axis.BACKWARD.set(backward)
    try:
        yield
    finally:
        _axis.BACKWARD.reset(token)


def _refuse(deferred: "DeferredGradient", *args: object, **kwargs: object) -> NoReturn:
    del args, kwargs
    raise ValueError(deferred.backward.taker.touched)


@dataclasses.dataclass(eq=False)
class DeferredGradient:
    """One leaf of the gradient of a backward pass that has not run; it refuses arithmetic."""

    backward: Backward

    __getattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _refuse


def backward_of(updates: PyTree) -> Backward | None:
    """The backward pass of deferred gradients; `None` for gradients that are arrays."""
    for leaf in jax.tree.leaves(updates):
        if isinstance(leaf, DeferredGradient):
            return leaf.backward
    return None


def parts_of_value(value: Any, has_model_state: bool, has_aux: bool) -> tuple[Any, PyTree, PyTree]:
    """`(loss, model_state, aux)` of what a loss returned; `None` for the parts that it lacks."""
    if not (has_model_state or has_aux):
        return value, None, None
    loss, rest = value
    if has_model_state and has_aux:
        model_state, aux = rest
        return loss, model_state, aux
    return (loss, rest, None) if has_model_state else (loss, None, rest)


def same_model_state(returned: Any, received: Any) -> Any:
    """The model state that a loss returned, as arrays.

    Raises:
      ValueError: Unless it has the structure, shapes and dtypes of the one that the loss received.
    """

    def same(path: tuple[Any, ...], old: jax.Array, x: Any) -> jax.Array:
        if not isinstance(x, jax.Array):
            x = jnp.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
        if (x.shape, x.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"`loss_fn` returned `model_state{jax.tree_util.keystr(path)}` as {x.dtype}"
                f"{[*x.shape]}, but received it as {old.dtype}{[*old.shape]}."
            )
        return x

    return jax.tree_util.tree_map_with_path(same, received, returned)
