"""Keeps the memory of a codec, such as the residual of feedback, compressed between steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise
from jaxcomm._contract import Codec, Context, Diagnostics, Keys, Memory, PyTree
from jaxcomm._require import checked
from jaxcomm._resize import Coding, encoded_by


class CompressedArray(NamedTuple):
    """An array of a memory, as the payload of a codec."""

    payload: PyTree
    statistics: PyTree
    seeds: jax.Array  # uint32[2], the words of the shared key with which it was encoded
    square_norm: jax.Array  # float32[], of what it decodes to, for diagnostics


def _keys_of_array(keys: Keys, number: int) -> Keys:
    """Keys for an array of the memory; the codec itself draws from `keys`."""
    # Both words differ by array: with one equal word, the first coordinates would draw the same.
    words = 0x57_04_ED_00 + number, 0xA5_5A_C3_3C ^ (number * 0x9E_37_79_B1 % 2**32)
    mask = np.array(words, np.uint32)
    return Keys(*(_noise.key_of(_noise.seeds(key) ^ mask) for key in keys))


@checked
def compressed_memory(codec: Codec, storage: Codec) -> Codec:
    r"""Keeps the arrays of a codec's memory as payloads of `storage`, for instance in 8 bits.

    .. math:: e^{t+1} = S(\text{new memory}), \qquad S = \mathrm{decode} \circ \mathrm{encode}
              \text{ of } `storage`

    It sends the same payload as `codec`. The memory takes the bytes of a payload of `storage` per
    unit, and 12 more. What `storage` rounds away is lost to feedback; if `storage` is unbiased, the
    expected loss is 0. An array whose payload would not decode to finite numbers keeps its old
    value. With :func:`jaxcomm.compression.feedback.error_feedback` and its option
    `averaging`, this is LoCo.

    Args:
      codec: A codec with memory of each worker's own. Arrays of the unit's shape are stored
        compressed; all others, such as counters, stay as they are.
      storage: A codec without memory, such as `jaxcomm.quantizers.dither(bits=8)`.

    Returns:
      A codec in place of `codec`.

    Raises:
      ValueError: If an argument is not a codec; in `init`, if `codec` keeps an array like the unit
        that all workers share.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import compressed_memory
      >>> from jaxcomm.compression.feedback import error_feedback
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec = compressed_memory(error_feedback(top_k(k=1)), dither(bits=8))
      >>> codec.init(jnp.zeros(100)).own.kept.payload.codes.dtype
      dtype('int8')

    References:
      Xie et al., `LoCo: Low-Bit Communication Adaptor for Large-scale Model Training
      <https://arxiv.org/abs/2407.04480>`_, 2024. Differences: rounding is that of `storage`, so it
      may be unbiased; the residual is never reset.
    """
    storage = storage.drop_overflow or storage  # Feedback survives what is dropped, and no NaN.

    def is_stored(node: Any) -> bool:
        return isinstance(node, CompressedArray)

    def context_of(words: jax.Array, private: jax.Array, shape: tuple[int, ...]) -> Context:
        return Context(Keys(_noise.key_of(words), private), shape=shape)

    def load(stored: CompressedArray, shape: tuple[int, ...]) -> jax.Array:
        words = stored.seeds
        context = context_of(words, _noise.key_of(words), shape)
        return storage.decode(context.replace(statistics=stored.statistics), stored.payload)

    def store(x: jax.Array, keys: Keys, before: CompressedArray | None) -> CompressedArray:
        words = _noise.seeds(keys.shared)
        context = context_of(words, keys.private, x.shape)
        wide = x.astype(jnp.float32)
        measured = storage.measure(context, wide)
        payload, _ = storage.encode(context.replace(statistics=measured), wide)
        stored = CompressedArray(payload, measured, words, jnp.zeros((), jnp.float32))
        kept = load(stored, x.shape)
        stored = stored._replace(square_norm=jnp.sum(jnp.square(kept)))
        if before is None:
            return stored
        # A finite array may exceed the range of `storage`; a NaN would return in every step.
        fits = jnp.all(jnp.isfinite(kept))
        return jax.tree.map(lambda new, old: jnp.where(fits, new, old), stored, before)

    def each(function: Any, axes: int) -> Any:
        for _ in range(axes):
            function = jax.vmap(function)
        return function

    def coding_of(shape: tuple[int, ...]) -> Coding:
        """Of a memory on all workers; stacks and rows may add more axes in front."""

        @jax.jit
        def decode(part: CompressedArray) -> jax.Array:
            axes = part.seeds.ndim - 1
            expected = jax.eval_shape(
                lambda: store(jnp.zeros(shape), Context.of(jnp.zeros(())).keys, None)
            )
            found = [x.shape[axes:] for x in jax.tree.leaves(part)]
            if found != [x.shape for x in jax.tree.leaves(expected)]:
                raise ValueError(
                    "A memory of `compressed_memory` is of slices among workers of several axes: "
                    "make a new state with `jaxcomm.init`."
                )
            return each(lambda one: load(one, shape), axes)(part)

        @jax.jit
        def encode(x: jax.Array, old: CompressedArray, new: CompressedArray) -> CompressedArray:
            axes = new.seeds.ndim - 2
            # Shared words may differ by row, of which there may be another number now.
            words = jnp.broadcast_to(old.seeds.reshape(-1, 2)[0], new.seeds.shape)
            numbers = jnp.arange(new.square_norm.size, dtype=jnp.uint32)

            def one(
                wanted: jax.Array, words: jax.Array, number: jax.Array, before: CompressedArray
            ) -> tuple[jax.Array, CompressedArray]:
                shared = jax.random.fold_in(_noise.key_of(words), 0)
                keys = Keys(shared, jax.random.fold_in(shared, number + 1))
                stored = store(wanted, keys, before)
                return wanted - load(stored, shape), stored

            def worker(lost: jax.Array, given: Any) -> tuple[jax.Array, CompressedArray]:
                wanted, *rest = given
                error, stored = each(one, axes)(wanted + lost, *rest)
                return jnp.where(is_mean, error, 0), stored

            wide = x.astype(jnp.float32)
            is_mean = jnp.all(wide == wide[:1])  # Owners keep slices, which have no common mean.
            given = wide, words, numbers.reshape(new.square_norm.shape), new
            return jax.lax.scan(worker, jnp.zeros_like(wide[0]), given)[1]

        return Coding(decode, encode)

    def is_array_of(x: Any, shape: tuple[int, ...]) -> bool:
        return x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating)

    def loaded(memory: Memory, shape: tuple[int, ...]) -> Memory:
        own = jax.tree.map(
            lambda x: load(x, shape) if is_stored(x) else x, memory.own, is_leaf=is_stored
        )
        return memory._replace(own=own)

    def stored(memory: Memory, keys: Keys, shape: tuple[int, ...], before: Memory | None) -> Memory:
        leaves, treedef = jax.tree.flatten(memory.own)
        nodes = [None] * len(leaves)
        if before is not None:
            nodes = jax.tree.leaves(before.own, is_leaf=is_stored)
        kept = [
            store(x, _keys_of_array(keys, number), old) if is_array_of(x, shape) else x
            for number, (x, old) in enumerate(zip(leaves, nodes, strict=True))
        ]
        if before is None:
            coding = coding_of(shape)
            kept = [encoded_by(x, coding) if is_stored(x) else x for x in kept]
        return memory._replace(own=jax.tree.unflatten(treedef, kept))

    def inner(context: Context) -> Context:
        return context.replace(memory=loaded(context.memory, context.shape))

    def init(x: jax.Array) -> Memory:
        memory = codec.init(x)
        if any(is_array_of(leaf, x.shape) for leaf in jax.tree.leaves(memory.shared)):
            raise ValueError(
                "`compressed_memory` takes a codec whose memory is each worker's own, such as "
                "`error_feedback(codec)`; receivers also keep the shifts of `ef21` and `diana`."
            )
        return stored(memory, Context.of(x).keys, x.shape, None)

    def measure(context: Context, x: jax.Array) -> PyTree:
        return codec.measure(inner(context), x)

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        payload, after = codec.encode(inner(context), x)
        return payload, stored(after, context.keys, x.shape, context.memory)

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        before = inner(context)
        update, after = codec.finalize(before, payload, mean)
        arrays = jax.tree.leaves(before.memory.own), jax.tree.leaves(after.own)
        if any(new is not old for old, new in zip(*arrays, strict=True)):
            return update, stored(after, context.keys, context.shape, context.memory)
        return update, after._replace(own=context.memory.own)  # Not rounded a second time.

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return codec.diagnose(inner(context), x, loaded(after, context.shape))

    return codec.replace(
        init=init,
        measure=measure,
        encode=encode,
        finalize=finalize,
        diagnose=diagnose,
        drop_overflow=codec.drop_overflow and compressed_memory(codec.drop_overflow, storage),
        # The payload and how it decodes do not change.
        fast=codec.fast._replace(linear=(), with_residual=None),
    )
