"""What the kernels for GPU share: blocks, batches, layouts, and what depends on the version of JAX.

JAX 0.10.2 or newer is supported. Mosaic GPU's interface changes between releases, and its
interpreter is not public yet. All that depends on them is here.

A batch is an axis of the grid of blocks. CUDA has three axes, of which only one may have more than
65,535 blocks, and Mosaic gives that one to the last axis of a kernel. Larger batches are launched
one part after the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _vma
from pallas_kernels._dispatch import rehearses

MOST = 2**16 - 1


def require_int32(size: int) -> None:
    """Raises unless a kernel that indexes elements in int32 can process `size` of them.

    Raises:
      NotImplementedError: If it cannot.
    """
    if size >= 2**31:
        raise NotImplementedError(
            f"The GPU kernel indexes elements in int32, so {size} elements are too many: split the "
            "leaf."
        )


def by_pieces(
    length: int, block: int, unit: int, process: Callable[..., None]
) -> Callable[..., None]:
    """A kernel that calls `process(first, count, *refs)` for each piece that its block has.

    The kernel has `length // block` blocks along the axis `block`. Each has a piece of `block`
    numbers, and the last one also the rest. No two blocks have the same number. The last block may
    have a number twice, so no result may be stored in the place of an operand.

    Args:
      length: How many numbers there are, at least `block`.
      block: The count of a piece, a multiple of `unit`.
      unit: What the count of every piece is a multiple of.
      process: Takes the first number and the count of a piece, and the references of the kernel.
    """
    # Whole units. If these are more than the rest, the piece begins within the one before it.
    last = pl.cdiv(length % block, unit) * unit

    def kernel(*refs: Any) -> None:
        index = lax.axis_index("block")
        process(index * block, block, *refs)
        if last:
            is_last = index == length // block - 1
            pl.when(is_last)(lambda: process(length - last, last, *refs))

    return kernel


def in_launches(
    kernel: Callable[..., Any], grid: tuple[int, ...], most: int = MOST
) -> Callable[..., Any]:
    """`kernel`, whose batches under `jax.vmap`, nested or not, have at most `most` blocks an axis.

    Args:
      kernel: A Mosaic GPU kernel of arrays.
      grid: Its number of blocks along each axis.
      most: The most blocks along all axes but the last, where the third one from the end and those
        before it are one axis.
    """
    # Mosaic makes one axis of the batch and of all but the last two.
    examples = most // math.prod(grid[:-2])

    @custom_vmap
    def call(*operands: jax.Array) -> Any:
        return kernel(*operands)

    @call.def_vmap
    def _rule(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in in_batched]
        if size <= examples:
            batch = jax.vmap(kernel, axes, axis_size=size)
            out = in_launches(batch, (size, *grid), most)(*operands)
        else:

            def one(given: list[jax.Array]) -> Any:
                rows = iter(given)
                arguments = zip(operands, in_batched, strict=True)
                return call(*(next(rows) if batched else a for a, batched in arguments))

            given = [a for a, batched in zip(operands, in_batched, strict=True) if batched]
            out = lax.map(one, given, batch_size=examples)
        return out, jax.tree.map(lambda _: True, out)

    return call


def unless_batched(function: Callable[..., Any], batched: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, or `batched`, with the same results, of each example of a batch."""

    @custom_vmap
    def call(*operands: jax.Array) -> Any:
        return function(*operands)

    @call.def_vmap
    def _rule(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        axes = [0 if is_batched else None for is_batched in in_batched]
        out = jax.vmap(batched, axes, axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return call


MOVES_ROWS = hasattr(plgpu, "store")
"""Whether `by_rows` is supported: JAX 0.10 has no such copies from and to the memory of a GPU."""


def gpu_interpret_params(**options: Any) -> Any:
    """The value of `interpret` that runs a Mosaic GPU kernel on a CPU.

    Raises:
      ImportError: If this version of JAX keeps its interpreter elsewhere.
    """
    try:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    except ImportError as error:
        raise ImportError(
            "JAX has moved `InterpretGPUParams`, which is private. Only tests need it, to run "
            "Mosaic GPU kernels on a CPU: find its new place, and change it here."
        ) from error
    return InterpretGPUParams(**options)


def gpu_kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: Mapping[str, int],
    scratch_types: Any = (),
    own_barriers: bool = False,
    interpret: Any = False,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel with one warpgroup (128 threads) per block.

    Args:
      body: Takes the references of the operands, of the results, and of scratch, in this order.
      out_type: The type of the result from `_vma.like`, or a tuple of types.
      grid: The number of blocks along each named axis, for `lax.axis_index`.
      scratch_types: The types of the scratch references.
      own_barriers: Whether the body has all barriers of its threads that it needs. Otherwise there
        is one before and after every store, and before every copy to shared memory.
      interpret: False, or the value that `gpu_interpret_params` returns.
    """
    interpret = interpret or (gpu_interpret_params() if rehearses() else False)
    # The default is Lane up to JAX 0.10, which cannot lay out an iota, and Warpgroup from 0.11.
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=own_barriers
    )
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=params,
        interpret=interpret or None,
    )

    launches = in_launches(kernel, tuple(grid.values()))

    def call(*operands: jax.Array) -> Any:
        # JAX loses the mesh axes over which the results of such a kernel vary.
        return jax.tree.map(_vma.declared, launches(*operands), out_type)

    return call


def side_by_side(x: jax.Array, numbers: int, interpret: Any) -> jax.Array:
    """Lays out one-dimensional `x` with `numbers` neighboring elements in each of the 128 threads.

    Then a load directly before this call reads the elements of a thread at once, and stores of
    values computed from them write them at once. Each of these loads and stores must start at a
    multiple of `numbers`.
    """
    if interpret or rehearses():  # JAX 0.10 cannot interpret a layout.
        return x
    return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=numbers))


def by_rows(x: jax.Array, rows: int, columns: int, numbers: int, interpret: Any) -> jax.Array:
    """Lays out two-dimensional `x` so that lanes of one warp hold a row.

    The 32 lanes of each of the four warps hold `columns` of each of `rows` rows at once, `numbers`
    neighboring elements each. Other rows and columns are held in the same way.

    Raises:
      NotImplementedError: If this version of JAX cannot move such arrays to and from memory.
    """
    if interpret or rehearses():  # JAX 0.10 cannot interpret a layout.
        return x
    if not MOVES_ROWS:
        raise NotImplementedError(f"rows of a warp need JAX 0.11 or newer, not {jax.__version__}")
    # Without dimensions of one element, which JAX refuses.
    layout = TiledLayout(
        plgpu.Tiling(((4 * rows, columns), (rows, columns), (1, numbers))),
        warp_dims=(-6,),
        lane_dims=(-4, -3),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    dims = layout.warp_dims, layout.lane_dims, layout.vector_dim
    return plgpu.layout_cast(x, plgpu.Layout.TILED(layout.tiling, *dims))


def load_rows(ref: Any, first: Any, shape: tuple[int, int], interpret: Any) -> jax.Array:
    """Rows of this shape, from the one with the number `first` on, of a flat array."""
    here = pl.ds(first * shape[1], shape[0] * shape[1])
    if interpret or rehearses():  # The interpreter cannot reshape a reference.
        rows: jax.Array = ref[here].reshape(shape)
    else:
        rows = ref.at[here].reshape(*shape)[...]
    return rows


def store_rows(ref: Any, first: Any, x: jax.Array, interpret: Any) -> None:
    """Stores `x` where `load_rows` would load it."""
    here = pl.ds(first * x.shape[1], x.size)
    if interpret or rehearses():
        ref[here] = x.ravel()
    else:
        ref.at[here].reshape(*x.shape)[...] = x


def store_narrow(ref: Any, x: jax.Array, interpret: Any) -> None:
    """Stores `x`, of less than 4 bytes per thread, which a plain store refuses."""
    if interpret or rehearses():
        ref[...] = x
    else:
        plgpu.store(ref, x, optimized=False)
