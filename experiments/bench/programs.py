"""The cost of the compiled program of a step, which is not run."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.bench.updates import PER_WORKER, ROWS
from experiments.trainer import make_mesh

LAYERS = 4
OF_FAMILIES = (
    "mean",
    "global_qsgd_8_bits",
    "global_qsgd_exponential",
    "qsgd",
    "two_stage_4_bits",
    "signum",
    "ef_sign_sgd",
    "terngrad",
    "natural_compression",
    "rotated",
    "top_k_sgd",
    "stc",
    "random_k_feedback",
    "variance_based",
    "s2_reducer_peel",
    "sparcml",
    "fetch_sgd",
    "warmup",
    "gtop_k",
    "deep_gradient_compression",
    "ef21",
    "diana",
)
"""A row per family whose memory is measured with a single worker."""


def transformer(width: int, layers: int = LAYERS) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a transformer, 50 M parameters at width 1,024: 8 of 12 leaves are vectors."""
    shapes = {
        "query, key and value": (width, 3 * width),
        "attended": (width, width),
        "wide": (width, 4 * width),
        "narrow": (4 * width, width),
    }
    vectors = {f"{name}, bias": shape[1:] for name, shape in shapes.items()}
    norms = {f"norm {i}, {name}": (width,) for i in (1, 2) for name in ("scale", "bias")}
    return {
        f"{i:02} {name}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for i in range(layers)
        for name, shape in (shapes | vectors | norms).items()
    }


def lower_step(name: str, params: Any, mesh: Mesh) -> jax.stages.Lowered:
    """The step of a row. Its arguments are parameters, state and gradients per worker.

    The gradient of the loss is the batch itself, so the step computes little else.
    """
    tx = ROWS[name]()

    def loss(params, rows):
        products = jax.tree.map(lambda x, row: jnp.vdot(x, row[0]), params, rows)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype), params)
    of_rows = jax.tree.map(lambda _: PartitionSpec("data"), rows)
    if name in PER_WORKER:
        params = jax.eval_shape(lambda x: jaxcomm.replicate(x, mesh), params)
    else:
        tx = optax.chain(tx, optax.sgd(0.1))
    state = jax.eval_shape(lambda x: jaxcomm.init(tx, x, mesh), params)
    arguments = jax.tree.map(
        lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)),
        (params, state, rows),
        (jaxcomm.state_specs(params), jaxcomm.state_specs(state), of_rows),
    )
    step = jax.jit(jaxcomm.make_step(loss, tx, mesh), donate_argnums=(0, 1))
    return step.lower(*arguments)


def operations(text: str) -> int:
    """The number of operations in HLO text, without the tables of stack frames."""
    return sum(" = " in line for line in text.splitlines())


def compile_step(name: str, params: Any, workers: int) -> dict[str, Any]:
    """What the step of a row costs, which is compiled and not run.

    Returns:
      `compile_seconds`, without tracing, summed over cores, which other load hardly changes;
      `lines` of HLO, one per operation; `collectives` of all branches; bytes `accessed` by
      operations, with one iteration per loop; bytes of `temporaries`, and of `arguments`:
      parameters, gradients and state; and their `peak` beside the arguments.
    """
    lowered = lower_step(name, params, make_mesh(workers))
    began = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - began
    text, memory = compiled.as_text(), compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "compile_seconds": seconds,
        "lines": operations(text),
        "collectives": len({c.group for c in jaxcomm.wire.account(compiled).collectives}),
        "accessed": int(compiled.cost_analysis()["bytes accessed"]),
        "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "peak": memory.temp_size_in_bytes + results,
    }
