"""Aggregation at the point of the backward pass where the gradient of a layer is complete."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import PyTree
from jaxcomm.scheduling._as_floats import as_floats

Aggregate = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""`(gradient of a layer, state, params, extra arguments) -> (mean, next state)`."""


_GUARD = "unsafe_rbg"
"""A kind of keys that losses do not use, so that an error that names it is about a guard."""


class _Hook:
    """The identity on the parameters of a layer, whose derivative aggregates."""

    def __init__(
        self,
        aggregate: Aggregate,
        restore: Callable[[PyTree], PyTree],
        joined: Callable[[PyTree, PyTree], PyTree],
        axes: tuple[str, ...],
        shapes: PyTree,
        dtypes: list[Any],
        where: str,
    ):
        self.shapes, self.dtypes, self.where = shapes, dtypes, where

        @jax.custom_vjp
        def local(params: PyTree, carried: PyTree) -> PyTree:
            return _axis.local_params(params, axis_name=axes)

        def forward(params: PyTree, carried: PyTree) -> tuple[PyTree, Any]:
            return _axis.local_params(params, axis_name=axes), (params, carried)

        def backward(residuals: Any, gradient: PyTree) -> tuple[PyTree, PyTree]:
            params, carried = residuals
            state, extra = restore(carried["given"])
            mean, after = aggregate(joined(gradient, carried["earlier"]), state, params, extra)
            floats, _ = as_floats((after, extra))
            zeros = jax.tree.map(_zeros, carried)
            uses = jnp.ones_like(carried["uses"])
            mean = jax.tree.map(
                _axis.varying_like, mean, params
            )  # Parameters may differ by worker.
            return mean, {**zeros, "given": (floats[0], zeros["given"][1]), "uses": uses}

        local.defvjp(forward, backward)
        self.local = local

    def __call__(self, params: PyTree, carried: PyTree) -> PyTree:
        shapes = jax.tree.map(jnp.shape, params)
        if shapes != self.shapes:
            raise ValueError(
                f"`aggregate_in_backward` takes one layer of {self.where}, with leaves of shapes "
                f"{self.shapes}, got {shapes}. Call it in the body of `jax.lax.scan` over layers."
            )
        if _dtypes((params, carried)) != self.dtypes:
            raise ValueError(computed_with(self.where))
        return self.local(params, carried)


def _dtypes(tree: PyTree) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(tree)]


def computed_with(where: str) -> str:
    """The message for a loss that computes with stacked layers instead of one layer."""
    return (
        f"`wait_free` aggregates {where} layer by layer, so the loss must not compute with stacked "
        "layers, as in a cast or a norm of all parameters: do so with the layer that "
        "`aggregate_in_backward` returns, or decay weights in the optimizer."
    )


def _zeros(x: jax.Array) -> jax.Array:
    return _axis.varying_like(jnp.zeros(x.shape, x.dtype), x)


@jax.tree_util.register_pytree_node_class
class Layers:
    """Stacked layers with their state, in place of their parameters in the loss."""

    def __init__(self, params: PyTree, carried: PyTree, hook: _Hook, guards: PyTree = None):
        self.params, self.carried, self.hook, self.guards = params, carried, hook, guards

    def tree_flatten(self) -> tuple[tuple[PyTree, PyTree, PyTree], _Hook]:
        """The arrays, which a scan slices, and the hook."""
        return (self.params, self.carried, self.guards), self.hook

    @classmethod
    def tree_unflatten(cls, hook: _Hook, children: tuple[PyTree, PyTree, PyTree]) -> "Layers":
        """The inverse of `tree_flatten`."""
        params, carried, guards = children
        return cls(params, carried, hook, guards)

    def guarded(self) -> "Layers":
        """With a random key beside each leaf, so that JAX refuses to compute with all leaves.

        Otherwise a norm of all parameters would include the state, and add to its derivative.
        """
        key = jax.random.key(0, impl=_GUARD)
        guards = jax.tree.map(
            lambda x: jnp.broadcast_to(key, (len(x), *[1] * (x.ndim - 1))), self.params
        )
        return Layers(self.params, self.carried, self.hook, guards)

    def __getitem__(self, key: object) -> NoReturn:
        """Raises: the parameters are those that `aggregate_in_backward` returns."""
        raise ValueError(
            f"`wait_free` aggregates {self.hook.where} layer by layer, so the loss must pass each "
            "layer through `layer = jaxcomm.scheduling.aggregate_in_backward(layer)` before it "
            "uses it."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__getitem__(name)


def hooked(
    params: PyTree,
    given: tuple[PyTree, PyTree, PyTree],
    joined: Callable[[PyTree, PyTree], PyTree],
    aggregate: Aggregate,
    axes: tuple[str, ...],
    where: str,
) -> Layers:
    """The layers whose gradient is aggregated where the loss calls `aggregate_in_backward`.

    Args:
      params: The parameters, `[layers, ...]`, equal on all workers.
      given: The state of each layer, `[layers, ...]`; extra arguments of the aggregator, for all
        layers; and the sum of gradients of earlier parts of the batch, `[layers, ...]`, or `None`.
      joined: The gradient of a layer from that of the last part, and this sum.
      aggregate: The aggregation of one layer.
      axes: All axes over which local gradients differ.
      where: The path of the layers, for messages.
    """
    state, extra, earlier = given
    count = jax.tree.leaves(params)[0].shape[0]
    repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), extra)
    floats, restore = as_floats((state, repeated))
    # Not zeros, so that its derivative shows whether the loss computes with it.
    uses = jnp.ones((count, 1, 1))
    carried = {"given": floats, "earlier": earlier, "uses": uses}
    shapes = jax.tree.map(lambda x: x.shape[1:], params)
    dtypes = _dtypes((params, carried))
    return Layers(params, carried, _Hook(aggregate, restore, joined, axes, shapes, dtypes, where))


def guarded(params: PyTree) -> PyTree:
    """The parameters of a loss, with guards in `Layers`."""
    is_layers = lambda node: isinstance(node, Layers)  # noqa: E731
    return jax.tree.map(lambda x: x.guarded() if is_layers(x) else x, params, is_leaf=is_layers)


def naming_guards(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose errors about a guard name their cause."""

    def named(*args: Any) -> Any:
        try:
            return fn(*args)
        except Exception as error:
            if "key<urbg>" in str(error):
                raise ValueError(computed_with("stacked parameters")) from error
            raise

    return named


def aggregated(gradient: Layers, state: PyTree) -> tuple[PyTree, PyTree]:
    """The means and the next state from the derivative with respect to `Layers`.

    A layer that the loss did not use has the mean 0 and keeps its state. JAX adds the derivatives
    of a layer that it used twice, and no state is a sum: its mean is NaN, and it keeps its state.
    So it is if the loss computed with the layers without their mark.
    """
    _, restore = as_floats(state)
    after = restore(gradient.carried["given"][0])
    uses = gradient.carried["uses"]
    twice = (uses != 0) & (uses != 1)

    def over_layers(flags: jax.Array, x: jax.Array) -> jax.Array:
        return flags.reshape(-1, *[1] * (x.ndim - 1))

    means = jax.tree.map(lambda x: jnp.where(over_layers(twice, x), jnp.nan, x), gradient.params)
    kept = jax.tree.map(
        lambda new, old: jnp.where(over_layers(uses == 1, new), new, old), after, state
    )
    return means, kept


def aggregate_in_backward(layer: PyTree) -> PyTree:
    r"""Marks where the loss begins to use a layer, so that its gradient is aggregated there.

    .. math:: \text{forward: } w \mapsto w, \qquad
              \text{backward: } (g_i, s) \mapsto \mathrm{tx}(g_i, s)

    Under :func:`wait_free`, the backward pass aggregates the gradient of this layer as soon as it
    is complete, and while the gradients of earlier layers are computed. Otherwise it is the
    identity, so that the same loss can be evaluated with plain parameters. Call it once for each
    layer, in the body of a `jax.lax.scan` over stacked layers. `jax.checkpoint` may contain it.

    Args:
      layer: The parameters of one layer.

    Returns:
      The parameters of the layer.

    Raises:
      ValueError: If `layer` is a stack of layers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import scheduling
      >>> def model(layers, x):
      ...     def body(h, layer):
      ...         layer = scheduling.aggregate_in_backward(layer)
      ...         return jnp.tanh(h @ layer["w"]), None
      ...
      ...     return jax.lax.scan(body, x, layers)[0]
      >>> model({"w": jnp.zeros((12, 4, 4))}, jnp.ones((2, 4))).shape
      (2, 4)
    """
    if isinstance(layer, Layers):
        return layer.hook(layer.params, layer.carried)
    return layer


def aggregate_at_end(
    gradient: PyTree, state: PyTree, params: PyTree, extra: PyTree, aggregate: Aggregate
) -> tuple[PyTree, PyTree]:
    """Aggregates stacked layers after the backward pass, the last layer first."""

    def body(_: None, layer: tuple[PyTree, PyTree, PyTree]) -> tuple[None, tuple[PyTree, PyTree]]:
        return None, aggregate(*layer, extra)

    _, result = lax.scan(body, None, (gradient, state, params), reverse=True)
    return result
