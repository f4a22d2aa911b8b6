"""The table of workloads that the tests compile and compare, and that `bench` times.

Each row is one way to call one op, at any size. A new op needs new rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import block_float, count_sketch, exponential
from pallas_kernels._dispatch import Implementation
from pallas_kernels._measurements import Workload, observed
from pallas_kernels.pack import pack, unpack
from pallas_kernels.pack.reference import words
from pallas_kernels.quantize import dequantize, quantize


class Row(NamedTuple):
    """One way to call one op on `size` coordinates."""

    op: str
    label: str
    arguments: Callable[[int], tuple[jax.Array, ...]]  # From the size; traceable.
    call: Callable[..., Any]  # Takes the arguments, `size` and `implementation`.
    kernels: tuple[Implementation, ...] = ("mosaic_gpu", "mosaic_tpu")
    exact: bool = True  # Whether every implementation returns the same bits.
    temporaries: int = 4096  # Bytes a kernel may need besides arguments and results.
    share_of_copy: float | None = None  # Goal: bandwidth of this workload / bandwidth of a copy.
    times_torch: float | None = None  # Goal: time of PyTorch's equivalent / time of this op.
    read_again: int = 0  # How many more times the op reads its first argument.

    def function(self, size: int, implementation: Implementation | None) -> Callable[..., Any]:
        """The call as a function of the arguments alone."""
        return functools.partial(self.call, size=size, implementation=implementation)

    def workload(self, size: int) -> Workload | None:
        """What decides which implementation runs; None if the op has only one."""
        arguments = jax.eval_shape(lambda: self.arguments(size))
        with observed() as seen:
            jax.eval_shape(self.function(size, None), *arguments)
        return seen[-1] if seen else None

    def traffic(self, size: int) -> int:
        """Bytes that the op moves: it reads its arguments and writes its results."""
        arguments = jax.eval_shape(lambda: self.arguments(size))
        results = jax.eval_shape(self.function(size, "reference"), *arguments)
        moved = jax.tree.leaves((arguments, results)) + [arguments[0]] * self.read_again
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in moved)


def _seeds() -> jax.Array:
    return jnp.array([0x9E3779B9, 0x85EBCA6B], jnp.uint32)


def _normal(size: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (size,), jnp.float32).astype(dtype)


def _bytes(size: int, below: int, key: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(key), (size,), 0, below, jnp.int32).astype(jnp.uint8)


def _vector_and_scale(size: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    x = _normal(size, dtype)
    return x, jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def _quantize(
    bits: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    residual: bool = False,
    share_of_copy: float | None = None,
) -> Row:
    options = {"levels": min(2 ** (bits - 1) - 1, 2**20), "bits": bits, "residual": residual}
    return Row(
        "quantize.quantize",
        f"quantize {jnp.dtype(dtype).name}, {bits} bits{', residual' if residual else ''}",
        lambda size: (*_vector_and_scale(size, dtype), _seeds()),
        lambda x, scale, seeds, size, implementation: quantize(
            x, scale, seeds, **options, implementation=implementation
        ),
        exact=not residual,
        share_of_copy=share_of_copy,
    )


def _feedback(bits: int, dtype: jax.typing.DTypeLike = jnp.float32) -> Row:
    """Error feedback in one pass: a residual is added, and the next one returned."""
    options = {"levels": 2 ** (bits - 1) - 1, "bits": bits, "residual": True}

    def arguments(size: int) -> tuple[jax.Array, ...]:
        x, scale = _vector_and_scale(size, jnp.float32)
        return x, 2 * scale, _seeds(), (0.5 * x[::-1]).astype(dtype)

    return Row(
        "quantize.quantize",
        f"feedback {jnp.dtype(dtype).name}, {bits} bits",
        arguments,
        lambda x, scale, seeds, kept, size, implementation: quantize(
            x, scale, seeds, **options, added=kept, divisor=1.25, implementation=implementation
        ),
        exact=False,
    )


def _dequantize(bits: int, accumulate: bool = False) -> Row:
    options: dict[str, Any] = {"levels": 2 ** (bits - 1) - 1, "bits": bits}

    def arguments(size: int) -> tuple[jax.Array, ...]:
        x, scale = _vector_and_scale(size, jnp.float32)
        codes = quantize(x, scale, _seeds(), **options, implementation="reference")
        assert isinstance(codes, jax.Array)
        return (codes, scale, x) if accumulate else (codes, scale)

    def call(*arrays: jax.Array, size: int, implementation: Any) -> jax.Array:
        codes, scale, *rest = arrays
        return dequantize(
            codes,
            scale,
            **options,
            shape=(size,),
            accumulate=rest[0] if rest else None,
            implementation=implementation,
        )

    label = f"dequantize, {bits} bits{', accumulate' if accumulate else ''}"
    # Some backends fuse the sum with the multiplication before it.
    return Row("quantize.dequantize", label, arguments, call, exact=not accumulate)


def _pack(bits: int, share_of_copy: float | None = None) -> Row:
    return Row(
        "pack.pack",
        f"pack, {bits} bits",
        lambda size: (_bytes(size, 2**bits),),
        lambda numbers, size, implementation: pack(
            numbers, bits=bits, implementation=implementation
        ),
        share_of_copy=share_of_copy,
    )


def _unpack(bits: int) -> Row:
    def arguments(size: int) -> tuple[jax.Array]:
        return (jax.random.bits(jax.random.key(0), (words(size, bits),), jnp.uint32),)

    return Row(
        "pack.unpack",
        f"unpack, {bits} bits",
        arguments,
        lambda packed, size, implementation: unpack(
            packed, bits=bits, shape=(size,), implementation=implementation
        ),
    )


HEADROOM = 3

EXPONENTIAL = (
    Row(
        "exponential.encode",
        "exponential encode",
        lambda size: (*_vector_and_scale(size, jnp.float32), _seeds()),
        lambda x, scale, seeds, size, implementation: exponential.encode(
            x, scale, seeds, headroom=HEADROOM, implementation=implementation
        ),
    ),
    Row(
        "exponential.decode",
        "exponential decode",
        lambda size: (_bytes(size, 256), jnp.float32(0.75)),
        lambda codes, scale, size, implementation: exponential.decode(
            codes, scale, headroom=HEADROOM, implementation=implementation
        ),
        exact=False,  # The smallest powers are subnormal, and some backends flush them.
    ),
    Row(
        "exponential.add",
        "exponential add",
        lambda size: (_bytes(size, 256), _bytes(size, 256, 1), _seeds()),
        lambda a, b, seeds, size, implementation: exponential.add(
            a, b, seeds, implementation=implementation
        ),
    ),
)


def _block_float(dtype: Any, block_size: int, stochastic: bool = True) -> Row:
    def call(*arrays: jax.Array, size: int, implementation: Any) -> Any:
        x, *seeds = arrays
        return block_float.encode(
            x,
            seeds[0] if seeds else None,
            dtype=dtype,
            block_size=block_size,
            implementation=implementation,
        )

    return Row(
        "block_float.encode",
        f"block float {dtype}, blocks of {block_size}{'' if stochastic else ', nearest'}",
        lambda size: (_normal(size), _seeds()) if stochastic else (_normal(size),),
        call,
        temporaries=2**20,  # Exponents, before they are in the order of blocks.
    )


BLOCK_FLOAT = (
    _block_float("float8_e4m3fn", 32),
    _block_float("float8_e4m3fn", 32, stochastic=False),
    _block_float("float8_e5m2", 32),
    _block_float("int8", 256),
    Row(
        "block_float.decode",
        "block float decode, int8, blocks of 256",
        lambda size: (
            jax.lax.bitcast_convert_type(_bytes(size, 256), jnp.int8),
            jnp.full(-(-size // 256), 127, jnp.uint8),
        ),
        lambda elements, exponents, size, implementation: block_float.decode(
            elements, exponents, block_size=256
        ),
        kernels=(),
    ),
)

SKETCH_ROWS = 3
KEYS = 2**17
"""The most bytes that the hash functions of a sketch's rows take on a device."""
TILES = 2**18
"""With tables of the slots of tiles, which XLA computes too, at the size that is compiled."""
PARTIAL = KEYS + 3 * 3 * 4 * 2**17
"""Keys, and three partial tables of 3 rows: what `encode` takes at the size that is compiled."""


def columns_for(size: int) -> int:
    """Columns of a sketch: a power of two, at most size / 16, clipped to 2**10 to 2**18."""
    return 2 ** min(max(size.bit_length() - 5, 10), 18)


def _sketch_encode(
    hashing: Literal["tiles", "elements"], dtype: jax.typing.DTypeLike, goal: bool = False
) -> Row:
    return Row(
        "count_sketch.encode",
        f"sketch {hashing}, encode {jnp.dtype(dtype).name}",
        lambda size: ((64 * _normal(size)).astype(dtype), _seeds()),
        lambda x, seeds, size, implementation: count_sketch.encode(
            x,
            seeds,
            rows=SKETCH_ROWS,
            columns=columns_for(size),
            hashing=hashing,
            implementation=implementation,
        ),
        kernels=("mosaic_gpu", "mosaic_tpu") if hashing == "tiles" else (),
        temporaries=PARTIAL,
        share_of_copy=0.5 if goal else None,
        times_torch=5 if goal else None,
        read_again=SKETCH_ROWS - 1,
    )


def _sketch_decode(
    hashing: Literal["tiles", "elements"],
    estimate: Literal["mean", "median"],
    goal: bool = False,
) -> Row:
    def arguments(size: int) -> tuple[jax.Array, ...]:
        return _normal(SKETCH_ROWS * columns_for(size)).reshape(SKETCH_ROWS, -1), _seeds()

    return Row(
        "count_sketch.decode",
        f"sketch {hashing}, decode {estimate}",
        arguments,
        lambda table, seeds, size, implementation: count_sketch.decode(
            table,
            seeds,
            shape=(size,),
            estimate=estimate,
            hashing=hashing,
            implementation=implementation,
        ),
        kernels=("mosaic_gpu", "mosaic_tpu") if hashing == "tiles" else (),
        temporaries=TILES,
        exact=estimate == "median",  # Backends round the mean of 3 rows differently.
        share_of_copy=0.5 if goal else None,
        times_torch=5 if goal else None,
    )


COUNT_SKETCH = (
    _sketch_encode("tiles", jnp.float32, goal=True),
    _sketch_encode("tiles", jnp.int32),
    _sketch_decode("tiles", "mean", goal=True),
    _sketch_decode("tiles", "median", goal=True),
    _sketch_encode("elements", jnp.float32),
    _sketch_encode("elements", jnp.int32),
    _sketch_decode("elements", "mean"),
    _sketch_decode("elements", "median"),
)

ROWS: tuple[Row, ...] = (
    _quantize(8, share_of_copy=0.85),
    *map(_quantize, (4, 2, 10, 32)),
    _quantize(8, jnp.bfloat16),
    _quantize(8, residual=True),
    _quantize(4, residual=True),
    *map(_feedback, (8, 4, 2)),
    _feedback(8, jnp.bfloat16),
    _dequantize(8),
    _dequantize(4),
    _dequantize(8, accumulate=True),
    _dequantize(4, accumulate=True),
    *map(_pack, (1, 2)),
    _pack(4, share_of_copy=0.8),
    _pack(8),
    *map(_unpack, (1, 2, 4, 8)),
    *EXPONENTIAL,
    *BLOCK_FLOAT,
    *COUNT_SKETCH,
)
