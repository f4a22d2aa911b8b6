"""Gradients that JAX does not sum over workers."""

import functools

import jax

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PyTree


def own_loss(value: PyTree, has_aux: bool, axis_name: AxisName) -> PyTree:
    """A loss, or `(loss, aux)`, of which the loss is typed as varying over `axis_name`.

    Otherwise the gradient of a loss that is a mean over workers, as after `jax.lax.pmean`, would be
    divided by their number once too often.
    """
    if not has_aux:
        return _axis.local_params(value, axis_name)
    loss, aux = value
    return _axis.local_params(loss, axis_name), aux


def rebuilt_value_and_grad(
    loss_fn: LossFn, has_aux: bool = False, *, axis_name: AxisName = ()
) -> LossFn:
    """`jax.value_and_grad` of a worker's loss whose arguments are rebuilt when it is traced."""

    def loss(params: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # The variables of flax.nnx belong to the trace in which they were last unflattened.
        rebuilt = {name: jax.tree.map(lambda x: x, value) for name, value in kwargs.items()}
        value = loss_fn(params, *jax.tree.map(lambda x: x, args), **rebuilt)
        return own_loss(value, has_aux, axis_name)

    return jax.value_and_grad(loss, has_aux=has_aux)


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
      A function `(params, *args) -> (value, gradient)`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> def gradient(x):
      ...     return jaxcomm.local_value_and_grad(lambda w, x: w * x)(jnp.float32(1), x)[1]
      >>> print(jax.vmap(gradient, axis_name="data")(jnp.arange(3.0)))
      [0. 1. 2.]
    """

    value_and_grad = rebuilt_value_and_grad(loss_fn, has_aux, axis_name=axis_name)

    @functools.wraps(loss_fn)
    def local(params: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        return value_and_grad(_axis.local_params(params, axis_name), *args, **kwargs)

    return local
