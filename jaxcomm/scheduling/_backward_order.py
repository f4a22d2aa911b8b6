"""The order in which a backward pass completes the gradients, and when."""

import math
from typing import Any

import jax
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm._gradients import LossFn
from jaxcomm.scheduling._times import LayerTimes
from jaxcomm.wire._program import inlined, is_literal, jaxprs


def _operations(equation: Any) -> float:
    """The operations of an equation: those of products, and one per value of anything else."""
    name, params = equation.primitive.name, equation.params
    values = float(sum(math.prod(getattr(x.aval, "shape", ())) for x in equation.outvars))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * values * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2 * values * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    inside = [inner for value in params.values() for inner in jaxprs(value)]
    total = sum(_operations(each) for inner in inside for each in inner.eqns)
    return params.get("length", 1) * total or values


class _Trace:
    """The operations of a program in order, and the position at which each value is complete."""

    def __init__(self) -> None:
        self.backward: list[float] = []
        self.position: dict[Any, int] = {}

    def walk(self, jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            inner = inlined(equation)
            if inner is None:
                is_backward = "transpose(" in str(equation.source_info.name_stack)
                self.backward.append(_operations(equation) if is_backward else 0.0)
                for out in equation.outvars:
                    self.position[out] = len(self.backward) - 1
                continue
            for inside, outside in zip(inner.invars, equation.invars, strict=True):
                self.position[inside] = self.of(outside)
            self.walk(inner)
            for outside, inside in zip(equation.outvars, inner.outvars, strict=True):
                self.position[outside] = self.of(inside)

    def of(self, atom: Any) -> int:
        """The position of a value; -1 for literals and arguments."""
        return -1 if is_literal(atom) else self.position.get(atom, -1)


def _completions(
    loss_fn: LossFn, params: PyTree, args: tuple[Any, ...], has_aux: bool
) -> tuple[list[tuple[str, int, int]], list[float]]:
    """The leaves as `(path, bytes, position)` in backward order, and the operations before each."""
    jaxpr = jax.make_jaxpr(jax.grad(loss_fn, has_aux=has_aux))(params, *args).jaxpr
    trace = _Trace()
    trace.walk(jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = [
        (jax.tree_util.keystr(path), math.prod(leaf.shape) * leaf.dtype.itemsize, trace.of(out))
        for (path, leaf), out in zip(leaves, jaxpr.outvars, strict=False)  # After them comes aux.
    ]
    return sorted(found, key=lambda leaf: leaf[2]), trace.backward


def backward_order(
    loss_fn: LossFn, params: PyTree, *args: PyTree, has_aux: bool = False
) -> tuple[str, ...]:
    """The paths of the leaves in the order in which the backward pass completes their gradients.

    Nothing runs: the gradient of the loss is traced.

    Args:
      loss_fn: `(params, *args) -> loss`, or `(loss, aux)`, of one worker.
      params: The parameters, arrays or `jax.ShapeDtypeStruct`.
      *args: The other arguments, such as the rows of one worker.
      has_aux: Whether the loss returns a pair.

    Returns:
      Paths as `jax.tree_util.keystr` prints them, for the `plan` of :func:`wait_free`. Leaves that
      are complete at the same time keep the order of the tree, and so do stacked layers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import scheduling
      >>> params = {"a_last": jnp.ones(2), "b_first": jnp.ones((3, 2))}
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["b_first"]) @ p["a_last"])
      >>> scheduling.backward_order(loss, params, jnp.ones((1, 3)))
      ("['a_last']", "['b_first']")
    """
    found, _ = _completions(loss_fn, params, args, has_aux)
    return tuple(path for path, _, _ in found)


def estimated_times(
    loss_fn: LossFn,
    params: PyTree,
    *args: PyTree,
    forward_seconds: float,
    backward_seconds: float,
    has_aux: bool = False,
) -> LayerTimes:
    r"""Divides measured seconds among the leaves, by the operations between their gradients.

    .. math:: t_l = T\, \frac{\text{operations between the gradients of } l - 1 \text{ and } l}
              {\text{operations of the pass}}

    Products of matrices and convolutions count all their multiplications and additions, other
    operations one per value. Nothing runs. Measure each layer instead if memory, and not
    arithmetic, bounds its speed.

    Args:
      loss_fn: As for :func:`backward_order`.
      params: ...
      *args: ...
      forward_seconds: The measured seconds of the forward pass of one worker.
      backward_seconds: Those of its backward pass, after the forward pass.
      has_aux: ...

    Returns:
      One entry per leaf in backward order, with its path as its name and its bytes as its size.
      The plan of these times gives groups of paths: `plan.named(times)`.

    Raises:
      ValueError: If seconds are negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import scheduling
      >>> params = {"last": jnp.ones((8, 1)), "first": jnp.ones((8, 8))}
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["first"]) @ p["last"])
      >>> times = scheduling.estimated_times(
      ...     loss, params, jnp.ones((4, 8)), forward_seconds=1e-3, backward_seconds=2e-3
      ... )
      >>> times.names, times.sizes
      (("['last']", "['first']"), (32.0, 256.0))
    """
    found, backward = _completions(loss_fn, params, args, has_aux)
    done = np.concatenate([[0.0], np.cumsum(backward)])
    at = np.array([done[position + 1] for _, _, position in found])
    whole = (at[-1] if len(at) else 0.0) or 1.0
    parts = np.diff(np.concatenate([[0.0], at])) / whole
    return LayerTimes(
        sizes=[float(size) for _, size, _ in found],
        backward=(parts * backward_seconds).tolist(),
        forward=(parts * forward_seconds).tolist(),
        names=[path for path, _, _ in found],
    )
