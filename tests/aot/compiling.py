"""Compiles rows of the table of workloads for devices that are not there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels._dispatch import Implementation
from pallas_kernels.arg_specs import ROWS, Row

WHOLE = 3 * 2**20  # Fills the blocks of every row.
RAGGED = 1_000_003


def first_of_each_op(kernel: Implementation) -> list[Row]:
    """One row of each op that has this kernel."""
    firsts = {row.op: row for row in reversed(ROWS) if kernel in row.kernels}
    return list(firsts.values())


def compile_for(mesh: Mesh, f: Callable[..., Any], arguments: Sequence[Any], **options: str) -> Any:
    """`f` of arrays like `arguments`, compiled for the one device of `mesh`.

    `options` are those of XLA.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in arguments]
    with jax.set_mesh(mesh):  # The mesh in context is what the dispatch asks.
        return jax.jit(f).trace(*given).lower().compile(compiler_options=options)


def compile_row(
    row: Row, size: int, mesh: Mesh, implementation: Implementation | None, **options: str
) -> Any:
    """`row` on `size` coordinates, likewise."""
    arguments = jax.eval_shape(lambda: row.arguments(size))
    return compile_for(mesh, row.function(size, implementation), arguments, **options)


def temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes
