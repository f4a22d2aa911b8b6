"""Rules by which state follows another number of workers."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._base import PerWorker, PyTree

Rule = Callable[[PyTree, PyTree], PyTree]
"""`(state, initial state for the new workers) -> state for the new workers`; leaves are global."""

_Node = TypeVar("_Node")


class Noted(NamedTuple):
    """A node of an initial state, and its rule."""

    node: Any
    rule: Rule


_NOTED: contextvars.ContextVar[list[Noted] | None] = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Noted]]:
    """Collects the rules of all states that are initialized."""
    noted: list[Noted] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def resized_by(node: _Node, rule: Rule) -> _Node:
    """Returns `node`, a part of an initial state, and states the rule by which it is resized.

    A transformation calls it in `init`, if means over workers are wrong for its state. `rule` must
    not change what is equal on all workers, unless it depends on their number.
    """
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Noted(node, rule))
    return node


class Coding(NamedTuple):
    """How a part of a state, such as a residual in 8 bits, encodes an array."""

    decode: Callable[[PyTree], jax.Array]  # part -> [workers, ...]
    encode: Callable[[jax.Array, PyTree, PyTree], PyTree]  # (array, old, new initial part) -> part


class _Static:
    """A value of a node that structures do not compare: all are equal."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static)

    def __hash__(self) -> int:
        return hash(_Static)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Encoded:
    part: PyTree
    how: _Static = dataclasses.field(metadata={"static": True})


def is_encoded(node: Any) -> bool:
    """Whether a node of a recorded state stands for an array."""
    return isinstance(node, _Encoded)


def encoded_by(part: _Node, coding: Coding) -> _Node:
    """Returns `part`, a part of an initial state, and states how it encodes an array.

    Rules for other numbers of workers then see the array. While rules are collected, the part is
    inside a node, since transformations of JAX keep those, and not the identity of a part.
    """
    return part if _NOTED.get() is None else cast(_Node, _Encoded(part, _Static(coding)))


def with_arrays(rule: Rule, of_old: PyTree, of_new: PyTree) -> Rule:
    """The rule for a part of a state, which sees arrays in place of what encodes them.

    Args:
      rule: The rule for arrays.
      of_old: The part as recorded for the old workers. Shapes of slices depend on their number.
      of_new: The part as recorded for the new ones.
    """
    flat: tuple[list[Any], Any] = jax.tree.flatten(of_new, is_leaf=is_encoded)
    nodes, treedef = flat
    if not any(map(is_encoded, nodes)):
        return rule
    codings = treedef.flatten_up_to(of_old), nodes

    def applied(old: PyTree, new: PyTree) -> PyTree:
        parts = [treedef.flatten_up_to(tree) for tree in (old, new)]
        arrays = [
            treedef.unflatten(
                each.how.coding.decode(part) if is_encoded(each) else part
                for each, part in zip(*both, strict=True)
            )
            for both in zip(codings, parts, strict=True)
        ]
        result = treedef.flatten_up_to(rule(*arrays))
        return treedef.unflatten(
            each.how.coding.encode(x, before, after) if is_encoded(each) else x
            for each, x, before, after in zip(nodes, result, *parts, strict=True)
        )

    return applied


def is_of_last_step(path: tuple[Any, ...]) -> bool:
    """Whether a leaf only reports the last step, such as the overflow of a codec."""
    return getattr(path[-1] if path else None, "name", "") == "overflow"


def mean_over_workers(x: Any, workers: int, where: str) -> Any:
    """`[old workers, ...] -> [workers, ...]`: the mean, on each worker, in at least float32.

    Raises:
      ValueError: If the leaf has no mean, and differs by worker.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        one = (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)
        return jnp.broadcast_to(one, (workers, *one.shape))
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(x) if keys else x)
    if (words != words[:1]).any():
        raise ValueError(
            f"The state{where} is {x.dtype} and differs by worker, so it has no mean, and its "
            "transformation states no rule for another number of workers. Make a new state with "
            "`jaxcomm.init`."
        )
    return jnp.broadcast_to(x[:1], (workers, *x.shape[1:]))


def total_on_the_first(old: PerWorker, new: PerWorker) -> PerWorker:
    """The rule of counters: the first worker has the total, the others have 0."""
    return jax.tree.map(lambda a, b: b.at[0].set(jnp.sum(a, axis=0)), old, new)


def weighted_mean_of_workers(old: PerWorker, new: PerWorker) -> PerWorker:
    """The rule of `{"mean": ..., "weight": ...}`: the weighted mean, and the mean weight, on each.

    Weights are `[workers, ...]`, and the leaves of the mean have further axes.
    """
    ((axis, running),) = old.per_worker.items()
    weights, workers = running["weight"], len(new.per_worker[axis]["weight"])
    total = jnp.sum(weights, axis=0)
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1)[None], 0)

    def mean(x: jax.Array) -> jax.Array:
        wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        aligned = shares.reshape(*shares.shape, *[1] * (x.ndim - shares.ndim)).astype(wide.dtype)
        one = jnp.sum(jnp.broadcast_to(aligned, wide.shape) * wide, axis=0).astype(x.dtype)
        return jnp.broadcast_to(one, (workers, *one.shape))

    means = jax.tree.map(mean, running["mean"])
    weight = jnp.broadcast_to(total / len(weights), (workers, *total.shape))
    return PerWorker({axis: {"mean": means, "weight": weight}})
