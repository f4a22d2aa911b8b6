"""Exchanges, from units to means, and what they share: statistics and flags of all workers."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _collectives
from jaxcomm._contract import AxisName, Codec, Context, Memory, PyTree
from jaxcomm._units import LARGE, Unit


class Part(NamedTuple):
    """One unit of this worker's updates, before the exchange and after it."""

    codec: Codec
    context: Context  # that of `encode` after the exchange, with the memory before the step
    x: jax.Array
    unit: Unit
    memory: Memory = Memory()  # after encoding
    mean: Any = None  # over all workers
    payload: PyTree = None  # the payload decoded to the mean, if payloads were combined


class Exchanged(NamedTuple):
    """The result of an exchange."""

    parts: list[Part]
    finite: jax.Array  # bool[], whether the parts of all workers are finite
    # This worker's payloads, decoded, for `diagnostics`.
    sent: Callable[[], list[jax.Array]] | None = None
    are_nan: bool = False  # whether the means are NaN everywhere if `finite` is false


Exchange: TypeAlias = Callable[[list[Part]], Exchanged]


def decoded_payloads(
    parts: Sequence[Part], payloads: Sequence[PyTree]
) -> Callable[[], list[jax.Array]]:
    """The function `sent` of an exchange: it decodes this worker's own payloads."""
    return lambda: [
        part.codec.decode(part.context.received(), payload)
        for part, payload in zip(parts, payloads, strict=True)
    ]


def stage_of(message: PyTree, default: str) -> str:
    """The scope of an exchange, from the type of its message: `max_abs` of `MaxAbs`.

    The type is a NamedTuple; of a `CodesPayload`, the scope is `codes`.
    """
    kind = type(message).__name__.removesuffix("Payload") if hasattr(message, "_fields") else ""
    return re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", kind.strip("_")).lower() or default


def or_reduce(words: jax.Array, *, axis_name: AxisName = "data") -> jax.Array:
    r"""The bitwise OR over workers of packed words.

    .. math:: y = x_1 \mathbin{|} x_2 \mathbin{|} \dots \mathbin{|} x_n

    Each of :math:`n` workers receives one :math:`n`-th of the words from all others and computes
    their OR; then all workers gather the parts. A worker sends :math:`2 (n-1)/n` times the bytes of
    `words`, whose number is padded to a multiple of :math:`n`. With :math:`n = 1` it sends nothing.
    `lax.psum` cannot replace this function: if two workers set the same bit, the sum carries into
    the next bit, and sums without carry need :math:`\log_2(n + 1)` bits per bit of the map.

    Args:
      words: Unsigned integers of any shape and width that hold a packed bitmap. For a bool mask,
        use `jnp.packbits(mask)`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The OR of the words of all workers, in the shape and dtype of `words`, equal on all workers.

    Raises:
      ValueError: If `words` are not unsigned integers or `axis_name` is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> masks = jnp.array([[0b0001, 0b1000], [0b0011, 0b0000]], jnp.uint32)
      >>> print(jax.vmap(jaxcomm.or_reduce, axis_name="data")(masks))
      [[3 8]
       [3 8]]
    """
    words = jnp.asarray(words)
    if not jnp.issubdtype(words.dtype, jnp.unsignedinteger):
        raise ValueError(
            f"`words` must be unsigned integers, as of `jnp.packbits`, got {words.dtype}."
        )
    workers = _axis.size(axis_name)
    if words.size == 0:
        # Sends nothing, and types the result as equal on all workers.
        return lax.psum(words, axis_name)
    width = math.ceil(words.size / workers)
    rows = jnp.pad(words.ravel(), (0, workers * width - words.size)).reshape(workers, width)
    with jax.named_scope("or_reduce"):
        received = _collectives.exchange(rows, axis_name)
        part = lax.reduce(received, jnp.zeros((), words.dtype), lax.bitwise_or, (0,))
        gathered = _collectives.gather(part, axis_name)
    return gathered.ravel()[: words.size].reshape(words.shape)


LARGE_BY_GLOO = 2**22  # Coordinates; a copy of fewer takes less than a message.


_ACROSS_WORKERS: dict[str, Callable[..., jax.Array]] = {
    "max": lax.pmax,
    "sum": lax.psum,
    "or": lambda words, axis_name: or_reduce(words, axis_name=axis_name),
}


_ACROSS_UNITS: dict[str, Callable[..., jax.Array]] = {"max": jnp.max, "sum": jnp.sum}


def _is_finite(x: jax.Array) -> jax.Array:
    """Whether no coordinate is NaN or infinite, bool[].

    On CPUs, XLA writes `abs(x)` to memory for `isfinite` and any other user of it, and reduces
    bools slowly. `x - x` is NaN if `x` is NaN or infinite, and 0 otherwise.
    """
    return lax.platform_dependent(
        x,
        cpu=lambda x: jnp.sum(x - x) == 0,
        default=lambda x: jnp.all(jnp.isfinite(x)),
    )


def all_finite(units: Iterable[jax.Array]) -> jax.Array:
    """Whether no coordinate of any unit is NaN or infinite, bool[]."""
    flags = [_is_finite(x) for x in units]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def nowhere_nan(means: list[jax.Array]) -> jax.Array:
    """Whether no coordinate of any mean is NaN, which marks a payload that overflowed, bool[]."""
    return jnp.logical_not(jnp.any(jnp.stack([jnp.any(jnp.isnan(mean)) for mean in means])))


def nan_unless(finite: jax.Array, tree: PyTree) -> PyTree:
    """The float arrays, or NaN in their place."""
    return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), tree)


def nan_unless_all_fit(
    axis_name: AxisName, own: list[jax.Array], means: list[jax.Array]
) -> list[jax.Array]:
    """The means; all NaN if any worker has a NaN in its intermediate values `own`."""
    all_fit = everywhere(axis_name, nowhere_nan(own))
    return [jnp.where(all_fit, mean, jnp.nan) for mean in means]


def over_units(kinds: PyTree, statistics: list[PyTree], groups: list[int]) -> dict[int, PyTree]:
    """The statistics of each group, combined over its units."""
    members: dict[int, list[PyTree]] = {}
    for group, statistic in zip(groups, statistics, strict=True):
        members.setdefault(group, []).append(statistic)

    def combine(kind: str, *values: jax.Array) -> jax.Array:
        return values[0] if len(values) == 1 else _ACROSS_UNITS[kind](jnp.stack(values), axis=0)

    return {group: jax.tree.map(combine, kinds, *each) for group, each in members.items()}


def to_vector(arrays: list[jax.Array]) -> tuple[jax.Array, Callable[[jax.Array], list[jax.Array]]]:
    """The arrays concatenated to one vector, and the function that splits it again."""
    shapes = [x.shape for x in arrays]
    ends = [*itertools.accumulate(x.size for x in arrays)]

    def split(vector: jax.Array) -> list[jax.Array]:
        parts = zip(jnp.split(vector, ends[:-1]), shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]

    return jnp.concatenate([x.ravel() for x in arrays]), split


def join_small(
    leaves: list[jax.Array], large: int
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], list[jax.Array]]]:
    """Concatenates leaves of less than `large` coordinates and of one type; undone by the function.

    The type is the dtype and the axes over which a leaf varies.
    """
    members: dict[Any, list[int]] = {}
    for position, leaf in enumerate(leaves):
        key = position if leaf.size >= large else (leaf.dtype, _axis.varying(leaf))
        members.setdefault(key, []).append(position)
    groups = list(members.values())
    vectors, splits = zip(
        *(
            (leaves[group[0]], lambda vector: [vector])
            if len(group) == 1
            else to_vector([leaves[i] for i in group])
            for group in groups
        ),
        strict=True,
    )

    def restore(vectors: list[jax.Array]) -> list[jax.Array]:
        restored = [*leaves]
        for group, vector, split in zip(groups, vectors, splits, strict=True):
            for position, part in zip(group, split(vector), strict=True):
                restored[position] = part
        return restored

    return [*vectors], restore


def sum_together(axis_name: AxisName, tree: PyTree) -> PyTree:
    """The sums over workers of all leaves, in one collective.

    Small leaves of one dtype are concatenated, since compilers combine at most a few hundred
    arrays. Large leaves are summed without a copy. Gloo sends the arrays one after the other, even
    if the compiler combines them; with Gloo, leaves of up to 2^22 coordinates count as small.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not leaves:
        return tree
    vectors, restore = join_small(leaves, LARGE_BY_GLOO if _axis.by_gloo() else LARGE)
    return jax.tree.unflatten(treedef, restore(lax.psum(vectors, axis_name)))


def reduce_statistics(
    axis_name: AxisName, kinds: PyTree, statistics: dict[int, PyTree], finite: jax.Array
) -> tuple[dict[int, PyTree], jax.Array]:
    """Reduces each group's statistics and the finite flag over workers.

    All statistics of one kind travel in one collective. The flag is a separate statistic, because
    a maximum over workers may drop NaN.

    Args:
      axis_name: The axis to reduce over.
      kinds: `"max"`, `"sum"` or `"or"` for each statistic of a group; or `"equal"` for one that is
        already equal on all workers. It is not sent.
      statistics: One tree like `kinds` per group, with float32 leaves, or uint32 for `"or"`.
      finite: bool[], whether this worker's units are finite.

    Returns:
      The reduced statistics, and whether the units of all workers are finite.
    """
    arrays, treedef = jax.tree.flatten(statistics)
    kind_of = jax.tree.leaves(kinds) * len(statistics)
    arrays.append(jnp.where(finite, 0.0, 1.0).astype(jnp.float32))
    kind_of.append("sum" if "sum" in kind_of and "max" not in kind_of else "max")
    reduced = list(arrays)
    for kind in dict.fromkeys([kind for kind in kind_of if kind != "equal"]):
        members = [i for i, other in enumerate(kind_of) if other == kind]
        vector, split = to_vector([arrays[i] for i in members])
        is_flag = members == [len(arrays) - 1]
        with jax.named_scope("flag" if is_flag else stage_of(kinds, "statistics")):
            combined = _ACROSS_WORKERS[kind](vector, axis_name)
        for i, array in zip(members, split(combined), strict=True):
            reduced[i] = array
    *reduced, non_finite = reduced
    return jax.tree.unflatten(treedef, reduced), non_finite == 0


def everywhere(axis_name: AxisName, holds: jax.Array) -> jax.Array:
    """Whether `holds` is true on all workers, bool[]; one collective of one float32."""
    return reduce_statistics(axis_name, (), {}, holds)[1]


def of_all_workers(value: Any, option: str, axis_name: AxisName) -> jax.Array:
    """The numbers of all workers, float32[workers], equal on all: gathered if each has its own.

    Raises:
      ValueError: If `value` is neither this worker's number nor those of all, equal on all.
    """
    workers = _axis.size(axis_name)
    numbers = jnp.zeros(0) if value is None else jnp.asarray(value, jnp.float32)
    if numbers.shape not in ((), (workers,)) or (numbers.ndim and _axis.varying(numbers)):
        raise ValueError(
            f"`update(..., {option}=)` must be a scalar of this worker, or those of all workers, "
            f"shape ({workers},), equal on all of them."
        )
    if numbers.ndim:
        return numbers
    with jax.named_scope(option):
        return _collectives.gather(_axis.as_varying(numbers, axis_name), axis_name)
