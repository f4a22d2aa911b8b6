"""Gradients that JAX does not sum over workers."""

import functools
import re

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PyTree
from jaxcomm._unbound import names_itself

LOCAL = "jaxcomm_local_gradient"
"""The name of local gradients in a program whose types do not say that they are local."""

_UNTYPED = (
    "The loss does not follow JAX's rules for types in `jax.shard_map`: a loop must not begin with "
    "a constant, and a kernel must declare how its results vary. Pass `check_vma=False` to this "
    "`jax.shard_map`, under which every aggregator works; or use `jaxcomm.make_step`, which takes "
    "every loss."
)


_BOXED = (
    "The parameters are in boxes with names of axes, such as flax's `Partitioned`, which a loss "
    "may apply to the mesh of the workers: pass `flax.linen.meta.unbox(params)`."
)


def _is_boxed(node: object) -> bool:
    return hasattr(node, "unbox")


def _named(tree: PyTree, axis_name: AxisName) -> PyTree:
    """The tree, marked as local where no types say so."""
    if all(_axis.mode(name) != "unchecked" for name in _axis.names(axis_name)):
        return tree
    return jax.tree.map(lambda x: checkpoint_name(x, LOCAL), tree)


def own_loss(value: PyTree, has_aux: bool, axis_name: AxisName) -> PyTree:
    """A loss, or `(loss, aux)`, of which the loss is typed as varying over `axis_name`.

    Otherwise the gradient of a loss that is a mean over workers, as after `jax.lax.pmean`, would be
    divided by their number once too often.
    """
    loss, *aux = value if has_aux else (value,)
    loss = _named(_axis.local_params(loss, axis_name), axis_name)
    return (loss, *aux) if has_aux else loss


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


@names_itself
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

    value_and_grad = rebuilt_value_and_grad(loss_fn, has_aux, axis_name=axis_name)

    @functools.wraps(loss_fn)
    def local(params: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        try:
            value, gradient = value_and_grad(_axis.local_params(params, axis_name), *args, **kwargs)
        except (TypeError, ValueError) as error:
            if re.search("manual.axis.type", str(error)):
                error.add_note(_UNTYPED)
            if any(map(_is_boxed, jax.tree.leaves(params, is_leaf=_is_boxed))):
                error.add_note(_BOXED)
            raise
        return value, _named(gradient, axis_name)

    return local
