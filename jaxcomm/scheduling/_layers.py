"""Aggregation at the point of the backward pass where the gradient of a layer is complete."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import define_prng_impl

from jaxcomm import _axis
from jaxcomm._contract import PyTree

Aggregate = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
"""`(gradient of a layer, state, params, extra arguments) -> (mean, next state)`."""


def _word(*args: Any) -> jax.Array:
    return jnp.zeros(1, jnp.uint32)


_GUARD = define_prng_impl(
    key_shape=(1,),
    seed=_word,
    split=_word,
    random_bits=_word,
    fold_in=_word,
    name="layers of wait_free",
    tag="the loss must not compute with stacked layers: `aggregate_in_backward` returns one layer",
)
"""Keys whose dtype says, in the errors of JAX, what a loss did wrong that computes with them."""


def _packed(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """A leaf as floats, and what restores it from them, or from slices of them.

    JAX differentiates with respect to floating-point arrays only. Integers are carried as float32
    values from 0 to 65535, which keep their value when zeros are added to them; a bitcast would
    not, since a CPU may flush what is a denormal float. Integers of 4 or 8 bytes, and keys, have
    one more dimension, the last one.
    """
    dtype = x.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words, restore = _packed(jax.random.key_data(x))
        kind = jax.random.key_impl(x)
        return words, lambda floats: jax.random.wrap_key_data(restore(floats), impl=kind)
    if jnp.issubdtype(dtype, jnp.inexact):
        return x, lambda floats: floats
    if dtype.itemsize <= 2:
        return x.astype(jnp.float32), lambda floats: floats.astype(dtype)
    halves = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.float32)
    return halves, lambda floats: lax.bitcast_convert_type(floats.astype(jnp.uint16), dtype)


def as_floats(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """State as floats, so that it may enter a differentiated function; what restores the tree."""
    leaves, structure = jax.tree.flatten(tree)
    packed = [*map(_packed, leaves)]

    def restore(floats: PyTree) -> PyTree:
        parts = zip(packed, jax.tree.leaves(floats), strict=True)
        return jax.tree.unflatten(structure, [back(part) for (_, back), part in parts])

    return jax.tree.unflatten(structure, [floats for floats, _ in packed]), restore


def _dtypes(tree: PyTree) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(tree)]


def _zeros(x: jax.Array) -> jax.Array:
    return _axis.varying_like(jnp.zeros(x.shape, x.dtype), x)


@jax.tree_util.register_pytree_node_class
class Layers:
    """Stacked layers with their state, in place of their parameters in the loss."""

    def __init__(self, params: PyTree, carried: PyTree, guards: PyTree, hook: Any, where: str):
        self.params, self.carried, self.guards = params, carried, guards
        self.hook, self.where = hook, where

    def tree_flatten(self) -> tuple[tuple[PyTree, PyTree, PyTree], tuple[Any, str]]:
        """The arrays, which a scan slices, and the hook."""
        return (self.params, self.carried, self.guards), (self.hook, self.where)

    @classmethod
    def tree_unflatten(
        cls, hook: tuple[Any, str], children: tuple[PyTree, PyTree, PyTree]
    ) -> "Layers":
        """The inverse of `tree_flatten`."""
        return cls(*children, *hook)

    def __getitem__(self, key: object) -> NoReturn:
        """Raises: the parameters are those that `aggregate_in_backward` returns."""
        raise ValueError(f"Use `aggregate_in_backward(layer)` on each layer of {self.where} first.")

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
        mean = jax.tree.map(_axis.varying_like, mean, params)  # Parameters may differ by worker.
        return mean, {**zeros, "given": (floats[0], zeros["given"][1]), "uses": uses}

    local.defvjp(forward, backward)

    def hook(params: PyTree, carried: PyTree) -> PyTree:
        if jax.tree.map(jnp.shape, params) != shapes:
            raise ValueError(f"`aggregate_in_backward` takes one layer of {where}, in `lax.scan`.")
        if _dtypes((params, carried)) != dtypes:
            raise ValueError(f"The loss must not compute with stacked layers of {where}.")
        return local(params, carried)

    return Layers(params, carried, None, hook, where)


def guarded(params: PyTree) -> PyTree:
    """The parameters of a loss, with a key beside each leaf of `Layers`.

    So JAX refuses to compute with all leaves. Otherwise a norm of all parameters would include the
    state, and add to its derivative.
    """

    def beside(x: jax.Array) -> jax.Array:
        key = jax.random.key(0, impl=_GUARD)
        return jnp.broadcast_to(key, (len(x), *[1] * (x.ndim - 1)))

    def guard(node: Any) -> Any:
        if not isinstance(node, Layers):
            return node
        keys = jax.tree.map(beside, node.params)
        return Layers(node.params, node.carried, keys, node.hook, node.where)

    return jax.tree.map(guard, params, is_leaf=lambda node: isinstance(node, Layers))


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
