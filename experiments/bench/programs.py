"""The cost of the compiled program of a step. Compilation does not need the target devices."""

import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm

WIDTH, LAYERS = 1024, 4

_COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


class Program(NamedTuple):
    """A compiled step of one worker.

    Attributes:
      compile_seconds: CPU seconds of XLA, summed over cores, which other load hardly changes.
      lines: Lines of HLO, one per operation.
      collectives: Collectives in the text, whether or not they run in each step.
      accessed: Bytes that operations read and write, with one iteration per loop.
      temporaries: Bytes of temporaries.
      arguments: Bytes of parameters, gradients and state.
      peak: Bytes beside the arguments: temporaries, and results without a donated buffer.
    """

    compile_seconds: float
    lines: int
    collectives: int
    accessed: int
    temporaries: int
    arguments: int
    peak: int


def operations(text: str) -> int:
    """The number of operations in HLO text, without the tables of stack frames."""
    return sum(" = " in line for line in text.splitlines())


def peak_of(compiled: jax.stages.Compiled) -> int:
    """The bytes of a program beside its arguments."""
    memory: Any = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + results


def by_hand() -> optax.GradientTransformation:
    """8-bit dithering of all leaves in one vector, in a few lines of plain JAX.

    It has no state, no weights, and no checks of arguments or of non-finite values. Noise is a hash
    of the position.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(updates)
        x = jnp.concatenate([leaf.ravel() for leaf in leaves])
        workers = lax.axis_size("data")
        levels = 127 // workers
        top = lax.pmax(jnp.max(jnp.abs(x)), "data")
        word = jnp.arange(x.size, dtype=jnp.uint32) * jnp.uint32(2654435761)
        word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
        noise = (word >> 8).astype(jnp.float32) * 2.0**-24
        codes = jnp.floor(x / top * levels + noise).astype(jnp.int8)
        mean = lax.psum(codes, "data").astype(jnp.float32) * (top / (levels * workers))
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = jnp.split(lax.optimization_barrier(mean), [int(end) for end in ends])
        pairs = zip(parts, leaves, strict=True)
        return jax.tree.unflatten(treedef, [part.reshape(x.shape) for part, x in pairs]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def transformer(width: int = WIDTH, layers: int = LAYERS) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a transformer with 50 M parameters: 8 of the 12 leaves per layer are vectors."""
    shapes = {
        "query, key and value": (width, 3 * width),
        "attended": (width, width),
        "wide": (width, 4 * width),
        "narrow": (4 * width, width),
    }
    vectors = {f"{name}, bias": shape[1:] for name, shape in shapes.items()}
    norms = {f"norm {i}, {name}": (width,) for i in (1, 2) for name in ("scale", "bias")}
    layer = shapes | vectors | norms
    return {
        f"{i:02} {name}": jax.ShapeDtypeStruct(layer[name], jnp.float32)
        for i in range(layers)
        for name in layer
    }


def lower_step(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh, per_worker: bool
) -> tuple[jax.stages.Lowered, Any]:
    """The lowered step and the shapes of its arguments: parameters, state, gradients per worker.

    The gradient of the loss is the batch itself, so the step computes little else.
    """

    def loss(params: Any, rows: Any) -> jax.Array:
        products = jax.tree.map(lambda x, row: jnp.vdot(x, row[0]), params, rows)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    def placed(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), params)
    if per_worker:
        params = jax.eval_shape(lambda x: jaxcomm.replicate(x, mesh), params)
    state = jax.eval_shape(lambda x: jaxcomm.init(tx, x, mesh), params)
    arguments = (
        placed(params, jaxcomm.state_specs(params)),
        placed(state, jaxcomm.state_specs(state)),
        placed(rows, jax.tree.map(lambda _: PartitionSpec("data"), rows)),
    )
    step = jax.jit(jaxcomm.make_step(loss, tx, mesh), donate_argnums=(0, 1))
    return step.lower(*arguments), arguments


def compile_step(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh, per_worker: bool = False
) -> Program:
    """Compiles the step; `params` may be shapes. The time excludes tracing."""
    lowered, _ = lower_step(tx, params, mesh, per_worker)
    began = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - began
    text = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    costs: Any = compiled.cost_analysis()
    return Program(
        seconds,
        operations(text),
        len(_COLLECTIVE.findall(text)),
        int(costs["bytes accessed"]),
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        peak_of(compiled),
    )
