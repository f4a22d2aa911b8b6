"""The arrays of a training run, as a checkpoint stores them."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm._contract import PyTree

Leaf: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def named(tree: PyTree, what: str) -> dict[str, Leaf]:
    """The leaves by path, such as `['opt_state'][0].own.per_worker['data']`.

    Raises:
      ValueError: If a leaf is not an array.
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        of_numpy = isinstance(leaf, np.ndarray)
        if of_numpy and leaf.dtype.kind not in "OSUMm":
            pass
        elif of_numpy or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            kind = f"array of {leaf.dtype}" if of_numpy else type(leaf).__name__
            raise ValueError(
                f"`{what}{name}` is of type {kind}, but a checkpoint holds arrays of numbers: use "
                "`jax.numpy.asarray`, or pass it in `position`."
            )
        leaves[name] = leaf
    return leaves


def is_key(leaf: Leaf) -> bool:
    """Whether an array holds keys of `jax.random`."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def mesh_of(leaves: list[Any]) -> Mesh | None:
    """The mesh of the first array that is on one."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def on_all_processes(leaves: list[Leaf]) -> list[Leaf]:
    """With several processes, arrays of this process only are placed on the mesh of the others.

    Raises:
      ValueError: If no leaf is on a mesh.
    """
    if jax.process_count() == 1:
        return leaves
    mesh = mesh_of(leaves)
    if mesh is None:
        raise ValueError(
            "With several processes, `state` must have an array on the mesh, such as the "
            "optimizer state of `jaxcomm.init`."
        )
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return leaf
        return jax.device_put(leaf, everywhere)

    return [placed(leaf) for leaf in leaves]


def once(array: Any) -> Any:
    """In one process, one of the equal copies, since orbax would write a part of each."""
    if jax.process_count() > 1 or not isinstance(array, jax.Array):
        return array
    return array.addressable_data(0) if array.is_fully_replicated else array


def stored(leaf: Leaf) -> Any:
    """What is stored of a leaf: the integers of keys, and other arrays as they are."""
    value: Any = leaf
    return jax.random.key_data(value) if is_key(leaf) else value


def restored(array: Any, leaf: Leaf) -> Any:
    """The inverse of `stored`, for a leaf like this one."""
    if not is_key(leaf):
        return array
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=found[0])


def empty(leaf: Leaf) -> Any:
    """What is restored of a leaf without values, which is not stored."""
    like = jax.eval_shape(stored, leaf)
    if isinstance(leaf, np.ndarray) or leaf.sharding is None:
        return np.zeros(like.shape, like.dtype)
    return jax.device_put(jnp.zeros(like.shape, like.dtype), leaf.sharding)
