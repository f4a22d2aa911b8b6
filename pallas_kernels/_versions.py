"""Where versions of JAX differ in what the kernels need: nothing of it is written elsewhere.

From JAX 0.10.2 on. Mosaic GPU's interface moves from release to release, and its interpreter is not
public yet.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _vma


def gpu_interpret_params(**options: Any) -> Any:
    """What `interpret` of a Mosaic GPU kernel takes to run it on a CPU.

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
    interpret: Any = False,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel of one warpgroup (128 threads) a block.

    Args:
      body: Takes the references of operands, of results, then of scratch.
      out_type: What `_vma.like` returns for the result, or a tuple of these.
      grid: Blocks along each axis by its name, for `lax.axis_index`.
      scratch_types: Of the references after the results.
      interpret: False, or what `gpu_interpret_params` returns.
    """
    # The default differs: Lane up to 0.10, which cannot lay out an iota, and Warpgroup from 0.11.
    semantics = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=semantics,
        interpret=interpret or None,
    )

    def call(*operands: jax.Array) -> Any:
        # JAX forgets over which mesh axes the results of such a kernel vary.
        return jax.tree.map(_vma.declared, kernel(*operands), out_type)

    return call


def side_by_side(x: jax.Array, numbers: int, interpret: Any) -> jax.Array:
    """`x`, of one axis, as a GPU kernel keeps it: `numbers` neighbours in each of the 128 threads.

    A load right before reads them at once, and stores of what is computed from it write them at
    once, so each must begin at a multiple of so many numbers.
    """
    if interpret:  # JAX 0.10 cannot interpret a layout.
        return x
    return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=numbers))
