"""Gradients of a batch in parts, one after the other; the last part aggregates."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import PyTree
from jaxcomm._gradients import Backward
from jaxcomm.aggregation import mean
from jaxcomm.metrics._reduced import added, divided


def _split(batch: PyTree, parts: int) -> PyTree:
    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % parts:
            raise ValueError(
                f"A device has {x.shape[0]} rows of the batch, which `micro_batches`={parts} does "
                "not divide."
            )
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return jax.tree.map(split, batch)


def joined(parts: int, gradient: PyTree, sums: PyTree) -> PyTree:
    """The mean gradient of all parts, from that of the last part and the sum of the others."""
    if sums is None:
        return gradient
    return jax.tree.map(lambda x, y: (x + y) / parts, gradient, sums)


def mean_of_devices(backward: Backward, axes: tuple[str, ...], gradient: PyTree) -> PyTree:
    """The mean over the devices of one worker, each of which has a part of its rows."""
    if not backward.inner:
        return gradient
    average = mean(backward.inner)
    return average.update(gradient, average.init(gradient), outer_axes=axes)[0]


def run_in_parts(backward: Backward, parts: int, with_hooks: Callable[[PyTree], PyTree]) -> PyTree:
    """The gradient of the last part of a batch, after those of the other parts.

    Args:
      backward: The backward pass.
      parts: The number of parts.
      with_hooks: The function from the sum of earlier gradients to the parameters for the last
        part; the sum is `None` if there is only one part.

    Returns:
      The gradient of the last part, at `with_hooks(sum)`.
    """
    if parts == 1:
        backward.value, gradient = backward.evaluate(with_hooks(None), backward.batch)
        return gradient
    if backward.has_model_state:
        raise ValueError(
            "`wait_free` with `micro_batches` does not support `has_model_state=True`: each part "
            "would change the state that the next one reads."
        )
    rows = _split(backward.batch, parts)
    local = _axis.local_params(backward.params, axis_name=backward.axes)

    def body(sums: PyTree, part: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        number, batch = part
        value, gradient = backward.evaluate(local, batch, number)
        return jax.tree.map(jnp.add, sums, gradient), value

    zeros = _axis.local_params(
        jax.tree.map(jnp.zeros_like, backward.params), axis_name=backward.axes
    )
    earlier = (jnp.arange(parts - 1), jax.tree.map(lambda x: x[:-1], rows))
    sums, values = lax.scan(body, zeros, earlier)
    last = jax.tree.map(lambda x: x[-1], rows)
    value, gradient = backward.evaluate(with_hooks(sums), last, jnp.asarray(parts - 1))
    each = [jax.tree.map(lambda x, part=part: x[part], values) for part in range(parts - 1)]
    backward.value = divided(functools.reduce(added, [*each, value]), parts)
    return gradient
