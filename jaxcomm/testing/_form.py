"""Checks structures, shapes and dtypes of a codec's functions by tracing them."""

from typing import Any

import jax
import numpy as np

from jaxcomm._contract import Codec, Coins, Context, Memory, PyTree
from jaxcomm.testing._law import require_law, require_types

PAYLOAD, STATISTICS, DECODED, MEMORY = "payload", "statistics", "decoded", "memory types"
RECEIVERS = "receivers decode"


def _shapes(size: int) -> list[tuple[int, ...]]:
    """Returns shapes with `size` coordinates, with one axis and with two."""
    rows = max((r for r in range(1, int(size**0.5) + 1) if size % r == 0), default=1)
    return [(size,), (rows, size // rows)]


def _require_arrays(law: str, tree: PyTree, what: str) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for path, leaf in leaves:
        require_law(
            isinstance(leaf, jax.Array | np.ndarray | np.generic),
            law,
            f"{what}{jax.tree_util.keystr(path)} is {type(leaf).__name__} and must be an array.",
        )


def _require_statistics(codec: Codec, measured: PyTree, what: str) -> None:
    _require_arrays(STATISTICS, measured, what)
    found: Any = jax.tree.structure(measured)
    expected: Any = jax.tree.structure(codec.reduce_statistics)
    require_law(
        found == expected,
        STATISTICS,
        f"{what} has the structure {found}, but `reduce_statistics` has {expected}.",
    )
    for kind, leaf in zip(
        jax.tree.leaves(codec.reduce_statistics), jax.tree.leaves(measured), strict=True
    ):
        dtype = {"sum": "float32", "max": "float32", "or": "uint32", "equal": "float32"}.get(kind)
        require_law(
            dtype is not None,
            STATISTICS,
            f"`reduce_statistics` must consist of 'sum', 'max', 'or' or 'equal', got {kind!r}.",
        )
        require_law(
            leaf.dtype == dtype,
            STATISTICS,
            f"{what} is {leaf.dtype}, but {kind!r} requires {dtype}.",
        )


def require_form(codec: Codec, *, size: int, workers: int) -> None:
    """Checks the types of payload, statistics, decoded array and memory, for several shapes."""
    for shape in _shapes(size):
        _require_shape(codec, shape, workers)


def _require_shape(codec: Codec, shape: tuple[int, ...], workers: int) -> None:
    what = f"for an array of shape {list(shape)}"

    def step(x: jax.Array, coins: Coins) -> tuple[Any, ...]:
        memory = codec.init(x)
        require_law(isinstance(memory, Memory), MEMORY, f"`init` returns {type(memory)!r}.")
        together = workers if codec.combine is not None else 1
        context = Context(coins, memory, (), together, 1, x.shape)
        measured = codec.measure(context, x)
        _require_statistics(codec, measured, f"`measure` {what}")
        context = context.replace(statistics=measured)
        payload, after = codec.encode(context, x)
        require_law(isinstance(after, Memory), MEMORY, f"`encode` returns {type(after)!r}.")
        _require_arrays(PAYLOAD, payload, f"the payload {what} at ")
        require_law(jax.tree.leaves(payload), PAYLOAD, f"{what}, the payload has no array.")
        mean = _decode_received(codec, context.replace(count=together), payload)
        require_law(
            isinstance(mean, jax.Array) and mean.dtype == "float32" and mean.shape == x.shape,
            DECODED,
            f"{what}, `decode` returns {_describe(mean)} and must return float32{list(x.shape)}.",
        )
        joined = None if codec.combine is None else payload
        update, final = codec.finalize(context.replace(memory=after), joined, mean)
        require_types(DECODED, update, mean, f"the update of `finalize` {what}")
        return memory, after.kept, final.kept

    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    x = jax.ShapeDtypeStruct(shape, "float32")
    before, after, final = jax.eval_shape(step, x, Coins(key, key))
    require_types(MEMORY, after, before, f"the memory after `encode` {what}, at ")
    require_types(MEMORY, final, before, f"the memory after `finalize` {what}, at ")


def _decode_received(codec: Codec, context: Context, payload: PyTree) -> jax.Array:
    """Decodes the mean as a receiver does; an error that only this raises violates the law."""
    codec.decode(context, payload)
    try:
        return codec.decode(context.received(context.count), payload)
    except Exception as error:
        raise AssertionError(
            f"law {RECEIVERS!r}: with only the public coin and without memory, `decode` raises "
            f"{error!r}."
        ) from error


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else repr(value)
