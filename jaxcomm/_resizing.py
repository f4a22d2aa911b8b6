"""Rules by which state follows another number of workers."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

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
