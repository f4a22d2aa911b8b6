"""Compiles rows of the table of workloads, and steps, for devices that are not there."""

import math
import pathlib
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm
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


def placed(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """The types of arrays like those of a tree, which lie as `specs` say."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        specs,
    )


def lower_step(tx: Any, loss: Callable[..., Any], mesh: Mesh, params: Any, batch: Any) -> Any:
    """A step of `tx` before SGD, whose parameters and state are donated."""
    chain = optax.chain(tx, optax.sgd(0.1))
    opt_state = jax.eval_shape(lambda params: jaxcomm.init(chain, params, mesh), params)
    step = jax.jit(jaxcomm.make_step(loss, chain, mesh), donate_argnums=(0, 1))
    return step.lower(params, opt_state, batch)


def compile_quickly(f: Callable[..., Any], arguments: Any, mesh: Mesh, **options: Any) -> Any:
    """Without autotuning, which needs a GPU that is there."""
    on_gpu = mesh.devices.flat[0].platform != "tpu"
    quick: dict[str, Any] = {"xla_gpu_autotune_level": "0"} if on_gpu else {}
    return jax.jit(f).lower(*arguments).compile(compiler_options={**quick, **options})


def relu_layers(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A loss of matrices, one after the other by their names."""
    for name in sorted(params):
        x = jax.nn.relu(x @ params[name])
    return jnp.mean(x**2)


def collectives(program: Any) -> list[list[tuple[str, int]]]:
    """The dtype and the number of elements of each array of each message of a program."""
    found: dict[int, list[tuple[str, int]]] = {}
    for c in jaxcomm.wire.account(program).collectives:
        devices = c.workers if c.kind == "all_gather" else 1
        found.setdefault(c.group, []).append((c.dtype.name, devices * math.prod(c.shape)))
    return [*found.values()]


def dumped(folder: pathlib.Path) -> dict[str, str]:
    """Options with which XLA writes its PTX to a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*"}


def ptx_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of kernels; others hold constants alone, or nothing."""
    return [file for file in folder.rglob("*.ptx") if ".entry" in file.read_text()]


def assembled(ptx: pathlib.Path) -> tuple[pathlib.Path, str]:
    """What ptxas makes of a file, and what it says."""
    target = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
    assert target is not None
    cubin = ptx.with_suffix(".cubin")
    command = ["ptxas", "-v", f"-arch={target[1]}", "-o", cubin, ptx]
    return cubin, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def disassembled(folder: pathlib.Path) -> list[str]:
    """The machine code of all kernels of a folder, as nvdisasm prints it."""
    return [
        subprocess.run(
            ["nvdisasm", "-c", assembled(ptx)[0]], capture_output=True, text=True, check=True
        ).stdout
        for ptx in ptx_of(folder)
    ]
