"""All code of the kernels that depends on the version of JAX.

JAX 0.10.2 or newer is supported. Mosaic GPU's interface changes between releases, and its
interpreter is not public yet.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _vma
from pallas_kernels._blocks import in_launches
from pallas_kernels._dispatch import rehearses

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
