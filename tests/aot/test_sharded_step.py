"""A step beside sharded parameters, on eight GPUs and eight TPUs: shards stay where they are."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcomm
from tests.aot.compiling import collectives, placed

SIDE, HIDDEN, ROWS = 256, 1024, 8
SPECS = {"up": P(None, "model"), "down": P("model", None), "bias": P("model"), "scale": P()}
SHAPES = {"up": (SIDE, HIDDEN), "down": (HIDDEN, SIDE), "bias": (HIDDEN,), "scale": (SIDE,)}
# Rows of the batch times an activation: what tensor parallelism sends over `model`.
ACTIVATIONS = ROWS * SIDE


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu((x * params["scale"][None]) @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - x) ** 2)


def compile_step(aggregator: Any, mesh: Mesh) -> Any:
    tx = optax.chain(aggregator, optax.sgd(0.1, momentum=0.9))
    floats = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    params = placed(floats, mesh, SPECS)
    state = jax.eval_shape(lambda p: jaxcomm.init(tx, p, mesh, shard_axes="model"), params)
    specs = jaxcomm.state_specs(state)
    specs = (specs[0], (specs[1][0]._replace(trace=SPECS), *specs[1][1:]))
    step = jaxcomm.make_step(loss, tx, mesh, shard_axes="model")
    batch = placed(jax.ShapeDtypeStruct((2 * ROWS, SIDE), jnp.float32), mesh, P("data"))
    return jax.jit(step).lower(params, placed(state, mesh, specs), batch).compile()


@pytest.mark.parametrize("method", ["qsgd", "top_k", "power_sgd"])
@pytest.mark.parametrize("devices", ["eight_chips_of_two_axes", "eight_h200_of_two_axes"])
def test_shards_are_not_moved(devices: str, method: str, request: pytest.FixtureRequest) -> None:
    """No float32 array larger than the activations travels, and no device holds a whole matrix."""
    mesh = request.getfixturevalue(devices)
    aggregator = {
        "qsgd": lambda: jaxcomm.global_qsgd(bits=8),
        "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.01),
        "power_sgd": lambda: jaxcomm.power_sgd(rank=2),
    }[method]()
    compiled = compile_step(jaxcomm.shard_local(aggregator, SPECS), mesh)
    found = [*itertools.chain(*collectives(compiled))]
    assert found
    floats = [size for dtype, size in found if dtype in ("float32", "bfloat16")]
    assert max(floats) <= max(ACTIVATIONS, 2 * 3 * (SIDE + HIDDEN // 4))
    codes = [size for dtype, size in found if dtype not in ("float32", "bfloat16")]
    assert max(codes, default=0) <= (2 * SIDE + 1) * HIDDEN // 4 + SIDE
    memory = compiled.memory_analysis()
    shard = 4 * (2 * SIDE * HIDDEN // 4)
    residual = 0 if method == "qsgd" else shard
    assert memory.argument_size_in_bytes <= 2 * shard + residual + 2**16
