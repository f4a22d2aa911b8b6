"""Runs a codec without an aggregator, and the laws of a codec.

Workers are arrays [workers, ...] on one device. As in aggregators, they share statistics if their
payloads are combined.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Claims, Codec, Context, Keys, Layout, Memory, PyTree
from jaxcomm.testing._law import (
    inputs,
    require_equal,
    require_law,
    require_moment,
    require_types,
    require_unbiased,
    with_extremes,
)

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum": functools.partial(jnp.sum, axis=0),
    "max": functools.partial(jnp.max, axis=0),
    "or": lambda words: jax.lax.reduce(words, words.dtype.type(0), jax.lax.bitwise_or, (0,)),
    "equal": lambda values: values[0],
}


class SentPayload(NamedTuple):
    """The results of one step of all workers.

    Attributes:
      contexts: The contexts of `encode`; leaves are [workers, ...].
      payloads: [workers, ...].
      after: The memories after `encode`, [workers, ...].
      decoded: Each payload as others decode it, [workers, *shape].
    """

    contexts: Context
    payloads: PyTree
    after: Memory
    decoded: jax.Array


def context_of(
    codec: Codec, x: jax.Array, keys: Keys, memory: Memory | None = None, workers: int = 1
) -> Context:
    """Returns the context of one worker with its own statistics, for `encode` and receivers."""
    memory = codec.init(x) if memory is None else memory
    context = Context(keys, memory, (), workers, 1, x.shape)
    return context.replace(statistics=codec.measure(context, x))


def reduce_statistics(kinds: PyTree, measured: PyTree) -> PyTree:
    """Reduces statistics [workers, ...] over workers."""
    return jax.tree.map(lambda kind, values: _REDUCTIONS[kind](values), kinds, measured)


def send(codec: Codec, x: jax.Array, memories: Memory, key: jax.Array) -> SentPayload:
    """Runs one step of all workers on updates [workers, *shape]."""
    workers, *shape = x.shape
    shared, private = jax.random.split(key)
    privates = jax.random.split(private, workers)
    together = workers if codec.combine is not None else 1

    def context_with(private: jax.Array, memory: Memory, statistics: PyTree = ()) -> Context:
        return Context(Keys(shared, private), memory, statistics, together, 1, tuple(shape))

    def measure(private: jax.Array, memory: Memory, x: jax.Array) -> PyTree:
        return codec.measure(context_with(private, memory), x)

    measured = jax.vmap(measure)(privates, memories, x)
    separate = codec.combine is None  # Then each payload travels with its own statistics.
    statistics = measured if separate else reduce_statistics(codec.reduce_statistics, measured)

    def encode(private: jax.Array, memory: Memory, x: jax.Array, statistics: PyTree) -> SentPayload:
        context = context_with(private, memory, statistics)
        payload, after = codec.encode(context, x)
        return SentPayload(context, payload, after, codec.decode(context.received(), payload))

    axes = (0, 0, 0, 0 if separate else None)
    return jax.vmap(encode, in_axes=axes)(privates, memories, x, statistics)


@functools.cache
def _draws(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> SentPayload:
        return send(codec, x, jax.vmap(codec.init)(x), key)

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


@functools.cache
def _decoded(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> jax.Array:
        return send(codec, x, jax.vmap(codec.init)(x), key).decoded

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


def step_keys(draws: int, seed: int) -> jax.Array:
    """Returns one key per step."""
    return jax.random.split(jax.random.key(seed, impl="threefry2x32"), draws)


def sent(codec: Codec, x: np.ndarray, draws: int, seed: int) -> SentPayload:
    """Repeats the first step on updates [workers, *shape]; leaves are [draws, workers, ...]."""
    result: SentPayload = _draws(codec)(jnp.asarray(x, jnp.float32), step_keys(draws, seed))
    return result


def decoded(codec: Codec, x: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Returns the decoded payloads of first steps, [draws, workers, *shape] in float64."""
    return np.asarray(
        _decoded(codec)(jnp.asarray(x, jnp.float32), step_keys(draws, seed)), np.float64
    )


PAYLOAD, STATISTICS, DECODED, MEMORY = "payload", "statistics", "decoded", "memory types"
RECEIVERS = "receivers decode"
EXPOSED = "NaN shows"


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
    require_law(
        codec.layout in get_args(Layout),
        LAYOUT,
        f"it must be one of {get_args(Layout)}, got {codec.layout!r}.",
    )
    for shape in _shapes(size):
        _require_shape(codec, shape, workers)


def _require_shape(codec: Codec, shape: tuple[int, ...], workers: int) -> None:
    what = f"for an array of shape {list(shape)}"

    def step(x: jax.Array, keys: Keys) -> tuple[Any, ...]:
        memory = codec.init(x)
        require_law(isinstance(memory, Memory), MEMORY, f"`init` returns {type(memory)!r}.")
        together = workers if codec.combine is not None else 1
        context = Context(keys, memory, (), together, 1, x.shape)
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
    before, after, final = jax.eval_shape(step, x, Keys(key, key))
    require_types(MEMORY, after, before, f"the memory after `encode` {what}, at ")
    require_types(MEMORY, final, before, f"the memory after `finalize` {what}, at ")


def _decode_received(codec: Codec, context: Context, payload: PyTree) -> jax.Array:
    """Decodes the mean as a receiver does; an error that only this raises violates the law."""
    codec.decode(context, payload)
    try:
        return codec.decode(context.received(context.count), payload)
    except Exception as error:
        raise AssertionError(
            f"law {RECEIVERS!r}: with only the shared key and without memory, `decode` raises "
            f"{error!r}."
        ) from error


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else repr(value)


LAYOUT = "layout"

_OF_PAIRS = {"max": jnp.maximum, "sum": jnp.add}


def require_layout(codec: Codec, *, size: int, workers: int, seed: int) -> None:
    """Checks that parts can be encoded separately with `layout="shared_statistics"`.

    Statistics of two parts, combined as `reduce_statistics` specifies, must equal those of the
    whole. With these statistics, no decoded coordinate may depend on another coordinate.
    """
    require_law(
        set(jax.tree.leaves(codec.reduce_statistics)) <= _OF_PAIRS.keys(),
        LAYOUT,
        "a bitmap has one bit per coordinate of a unit, so units cannot share it.",
    )
    together = workers if codec.combine is not None else 1
    x = jax.random.normal(jax.random.key(seed), (size,), jnp.float32)
    other = jnp.concatenate([x[: size // 2], x[size // 2 :] / 2])

    def measured(x: jax.Array) -> PyTree:
        return codec.measure(Context.of(x, seed, codec.init(x)), x)

    def decoded(x: jax.Array, statistics: PyTree) -> jax.Array:
        context = Context.of(x, seed, codec.init(x)).replace(
            statistics=statistics, workers=together
        )
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    @jax.jit
    def law(x: jax.Array, other: jax.Array) -> tuple[PyTree, ...]:
        whole = measured(x)
        parts = [measured(x[: size // 3]), measured(x[size // 3 :])]
        joined = jax.tree.map(
            lambda kind, *pair: _OF_PAIRS[kind](*pair), codec.reduce_statistics, *parts
        )
        return whole, joined, decoded(x, whole), decoded(other, whole)

    whole, joined, first, second = law(x, other)
    what = "the combined statistics of two parts, against those of the whole, "
    require_equal(LAYOUT, joined, whole, what, tolerance=1e-5)
    what = "the decoded first half, after the second half was scaled, "
    require_equal(LAYOUT, second[: size // 2], first[: size // 2], what)


SHARED, FINALIZED = "encode leaves shared memory", "finalize is equal on all workers"
STEPS = 3


def _combine(codec: Codec, step: SentPayload) -> tuple[PyTree, jax.Array]:
    """Returns the combined payloads, or None, and the decoded mean."""
    workers = len(step.decoded)
    if codec.combine is None:
        return None, step.decoded.mean(axis=0)
    first: Context = jax.tree.map(lambda leaf: leaf[0], step.contexts)
    if callable(codec.combine):
        total = _merge(functools.partial(codec.combine, first.keys), step.payloads)
    else:
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=leaf.dtype), step.payloads)
    return total, codec.decode(first.received(workers), total)


def _merge(merge: Callable[[PyTree, PyTree], PyTree], payloads: PyTree) -> PyTree:
    """Merges the payloads sequentially."""
    workers = len(jax.tree.leaves(payloads)[0])
    rows = [jax.tree.map(lambda leaf, i=i: leaf[i], payloads) for i in range(workers)]
    return functools.reduce(merge, rows)


def require_memory(codec: Codec, *, size: int, workers: int, seed: int) -> None:
    """Checks a few steps; a codec without memory passes."""

    @jax.jit
    def advance(x: jax.Array, memories: Memory, key: jax.Array) -> tuple[Memory, PyTree, Memory]:
        step = send(codec, x, memories, key)
        total, mean = _combine(codec, step)

        def finalize(context: Context, after: Memory) -> tuple[jax.Array, Memory]:
            return codec.finalize(context.replace(memory=after), total, mean)

        updates, final = jax.vmap(finalize)(step.contexts, step.after)
        return step.after, updates, final

    x = jnp.asarray(inputs(size, workers)["normal"], jnp.float32)
    memories = jax.vmap(codec.init)(x)
    for number, key in enumerate(step_keys(STEPS, seed)):
        what = f"in step {number} with {workers} workers, at "
        after, updates, final = advance(x, memories, key)
        require_equal(
            SHARED, after.shared, memories.shared, f"`memory.shared` after `encode` {what}"
        )
        for name, tree in {"the update": updates, "`memory.shared`": final.shared}.items():
            first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), tree)
            require_equal(FINALIZED, tree, first, f"{name} after `finalize` {what}")
        memories = final.kept


SUMS = "sums"


def _add(payload: jax.Array) -> jax.Array:
    """Adds [draws, workers, ...] over workers in NumPy, which wraps in the payload's dtype."""
    return jnp.asarray(np.sum(np.asarray(payload), axis=1, dtype=payload.dtype))


def require_sums(
    codec: Codec, *, workers: int, size: int = 7, draws: int = 16, seed: int = 4
) -> None:
    """Checks that the sum of payloads decodes to the mean of the decoded payloads."""

    def decode(context: Context, payload: PyTree) -> jax.Array:
        return codec.decode(context.received(workers), payload)

    decode_all = jax.jit(jax.vmap(decode))
    for name, x in with_extremes(size, workers).items():
        step = sent(codec, x, draws, seed)
        each = np.asarray(step.decoded, np.float64)
        contexts = jax.tree.map(lambda leaf: leaf[:, 0], step.contexts)
        together = np.asarray(decode_all(contexts, jax.tree.map(_add, step.payloads)), np.float64)
        expected = each.mean(axis=1)
        if codec.drop_overflow is not None:  # A sum may overflow where its parts do not.
            expected = np.where(np.isnan(together).any(axis=1, keepdims=True), np.nan, expected)
        what = f"the mean decoded from the sum, for input {name!r}, {workers} workers, size {size},"
        peak = np.abs(each).max(initial=0, where=np.isfinite(each))
        slack = 5e-7 * max(peak, 1e-30)
        near = np.isclose(together, expected, rtol=1e-5, atol=slack, equal_nan=True)
        require_equal(SUMS, np.where(near, expected, together), expected, what)


KEYS, JIT, VMAP, ENTRIES = "same keys", "jit", "vmap", "entries"
NEAR = 1e-5  # The tolerance for floats that compilers round in a different order.


def require_exposed(codec: Codec, *, size: int, seed: int) -> None:
    """Checks which results show a NaN, as `fast.exposes_nonfinite` states."""
    x = jnp.asarray(inputs(size)["normal"][0], jnp.float32)
    keys = Keys(*step_keys(2, seed))
    wrong = x.at[size // 2].set(jnp.nan)
    context = context_of(codec, wrong, keys)
    results = {"measure": context.statistics, "encode": codec.encode(context, wrong)[0]}
    for function in {*results} & {*codec.fast.exposes_nonfinite}:
        leaves = [leaf for leaf in jax.tree.leaves(results[function]) if leaf.size]
        shown = not leaves or not all(jnp.all(jnp.isfinite(leaf)) for leaf in leaves)
        require_law(shown, EXPOSED, f"the result of `{function}` is finite for a NaN.")
    if "decode" in codec.fast.exposes_nonfinite:
        context = context_of(codec, x, keys)
        payload, _ = codec.encode(context, x)
        lost = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), context.statistics)
        decoded = codec.decode(context.replace(statistics=lost).received(), payload)
        require_law(
            jnp.all(jnp.isnan(decoded)),
            EXPOSED,
            "`decode` is not NaN everywhere for NaN statistics.",
        )


def require_repeats(codec: Codec, *, size: int, seed: int) -> None:
    """Checks that a payload depends only on keys, and decoding on no private key."""
    x = jnp.asarray(inputs(size)["normal"][0], jnp.float32)
    shared, private, other = step_keys(3, seed)
    memory = codec.init(x)

    def encode(x: jax.Array, memory: Memory, keys: Keys) -> tuple[Context, PyTree, Memory]:
        context = context_of(codec, x, keys, memory)
        return context, *codec.encode(context, x)

    jitted = jax.jit(encode)
    keys = Keys(shared, private)
    context, payload, after = jitted(x, memory, keys)
    _, again, _ = jitted(x, memory, keys)
    require_equal(KEYS, again, payload, "the payload of a second call, at ")
    _, eager, _ = encode(x, memory, keys)
    require_equal(JIT, payload, eager, "the payload under jit, at ", tolerance=NEAR)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), (x, memory, keys))
    _, mapped, _ = jax.jit(jax.vmap(encode))(*several)
    second = jax.tree.map(lambda leaf: leaf[1], mapped)
    require_equal(VMAP, second, payload, "the payload under vmap, at ", tolerance=NEAR)
    _require_received(codec, context, payload, after, other)
    if (entries := codec.fast.entries) is not None:
        received = context.received()
        indices, values = entries(received, payload)
        # Error feedback sets the entries and a mean adds them; duplicates would differ.
        dense = jnp.zeros(x.size).at[indices].set(values, mode="drop").reshape(x.shape)
        decoded = codec.decode(received, payload)
        require_equal(ENTRIES, dense, decoded, "entries that are set instead of added, at ")


def _require_received(
    codec: Codec, context: Context, payload: PyTree, after: Memory, other: jax.Array
) -> None:
    """Checks that decoding depends neither on the private key nor on memory."""
    decode: Any = jax.jit(codec.decode)
    expected = decode(context, payload)
    changed = context.replace(keys=Keys(context.keys.shared, other), memory=after)
    what = "the array decoded with another private key and a later memory, at "
    require_equal(RECEIVERS, decode(changed, payload), expected, what)
    what = "the array decoded without private key and memory, at "
    require_equal(RECEIVERS, decode(context.received(), payload), expected, what, tolerance=NEAR)


UNBIASED, VARIANCE, CONTRACTION = "unbiased", "variance", "contraction"


def _overflowed(codec: Codec, sample: np.ndarray) -> bool:
    """Whether the sample is NaN because of an overflow, which `codec.drop_overflow` permits."""
    return codec.drop_overflow is not None and bool(np.isnan(sample).any())


def require_contraction(
    codec: Codec, bound: float, *, size: int, workers: int = 1, draws: int = 2000, seed: int = 3
) -> None:
    """Checks `sum_i E|Q(x_i) - x_i|^2 <= (1 - bound) sum_i |x_i|^2`."""
    for name, x in inputs(size, workers).items():
        sample = decoded(codec, x, draws, seed)
        # Error feedback uses the form that drops.
        if codec.drop_overflow is not None and _overflowed(codec, sample):
            sample = decoded(codec.drop_overflow, x, draws, seed)
        errors = np.sum((sample - x) ** 2, axis=(1, 2))
        squares = np.sum(x**2)
        limit = (1 - bound) * squares * (1 + 1e-5) + 1e-12 * squares
        what = f"input {name!r}, {workers} workers, size {size}, delta {bound:.6g}"
        require_moment(CONTRACTION, errors, limit, what)


def require_variance(
    codec: Codec, bound: float, *, size: int, workers: int = 1, draws: int = 2000, seed: int = 3
) -> None:
    """Checks `E Q(x_i) = x_i` and `sum_i E|Q(x_i) - x_i|^2 <= bound sum_i |x_i|^2`."""
    for name, x in inputs(size, workers).items():
        sample = decoded(codec, x, draws, seed)
        what = f"input {name!r}, {workers} workers, size {size}"
        if _overflowed(codec, sample):
            require_law(x.any(), UNBIASED, f"for {what}, zeros overflow the capacity.")
            continue
        peak = np.abs(x).max(initial=0)
        require_unbiased(
            UNBIASED,
            sample.reshape(draws, -1),
            x.ravel(),
            what,
            rounding=2.0**-21 * peak * x.size,
        )
        errors = np.sum((sample - x) ** 2, axis=(1, 2))
        squares = np.sum(x**2)
        limit = bound * squares * (1 + 1e-5) + (2.0**-42 + 1e-12) * squares
        require_moment(VARIANCE, errors, limit, f"{what}, omega {bound:.6g}")


def require_claims(
    codec: Codec, claims: Claims, *, size: int, workers: int, draws: int, seed: int
) -> None:
    """Checks the claims that are not None; per worker if workers do not share statistics."""
    together = workers if codec.combine is not None else 1
    if claims.variance is not None:
        omega = claims.variance(size, together)
        require_variance(codec, omega, size=size, workers=workers, draws=draws, seed=seed)
    if claims.contraction is not None:
        delta = claims.contraction(size, together)
        require_contraction(codec, delta, size=size, workers=workers, draws=draws, seed=seed)
