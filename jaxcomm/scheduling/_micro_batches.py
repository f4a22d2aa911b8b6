"""Gradients of a batch in parts, one after the other; the last part aggregates."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import PyTree
from jaxcomm._deferred import Backward


def _split(batch: PyTree, parts: int) -> PyTree:
    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % parts:
            raise ValueError(
                f"A device has {x.shape[0]} rows of the batch, which `micro_batches`={parts} does "
                "not divide."
            )
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return jax.tree.map(split, batch)


def run_in_parts(
    backward: Backward, params: PyTree, parts: int, with_hooks: Callable[[PyTree], PyTree]
) -> PyTree:
    """The gradient of the last part; those of earlier parts are added to it, or in its hooks.

    Args:
      backward: The backward pass.
      params: The parameters, typed as local.
      parts: The number of parts.
      with_hooks: The function from the sum of earlier gradients to the parameters for the last
        part; the sum is `None` if there is only one part.

    Returns:
      The gradient of the last part, at `with_hooks(sum)`, and the sum.
    """
    backward.begin()
    if parts == 1:
        backward.value, gradient = backward.evaluate(with_hooks(None), backward.batch)
        return gradient, None
    if backward.has_model_state:
        raise ValueError(
            "`wait_free` with `micro_batches` does not support `has_model_state=True`: each part "
            "would change the state that the next one reads."
        )
    rows = _split(backward.batch, parts)
    zeros = _axis.local_params(jax.tree.map(jnp.zeros_like, params), backward.axes)

    def body(total: PyTree, part: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        number, batch = part
        value, gradient = backward.evaluate(params, batch, number)
        return jax.tree.map(jnp.add, total, gradient), value

    earlier = jax.tree.map(lambda x: x[:-1], rows)
    total, values = lax.scan(body, zeros, (jnp.arange(parts - 1), earlier))
    last = jax.tree.map(lambda x: x[-1], rows)
    value, gradient = backward.evaluate(with_hooks(total), last, jnp.asarray(parts - 1))

    def mean(before: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.sum(before, axis=0) + x) / parts

    backward.value = jax.tree.map(mean, values, value)
    return gradient, total
