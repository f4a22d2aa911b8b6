"""Weights in slices on eight GPUs and eight TPUs: what travels has the width of its codec."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm.compression.quantizers import dither
from jaxcomm.training import fully_sharded_value_and_grad
from tests.aot.compiling import collectives, placed

SIDE, HIDDEN, ROWS = 256, 1024, 8
SIZE = SIDE * HIDDEN


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - x) ** 2)


def compile_step(mesh: Mesh, codec: Any) -> Any:
    axes = mesh.axis_names
    entry = axes[0] if len(axes) == 1 else axes
    specs = {"up": P(None, entry), "down": P(entry), "bias": P()}
    shapes = {"up": (SIDE, HIDDEN), "down": (HIDDEN, SIDE), "bias": (HIDDEN,)}

    function = fully_sharded_value_and_grad(
        loss, mesh, specs, axis_name=axes, push=codec, pull=codec
    )
    tx = optax.adam(1e-3)

    def step(params: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
        value, gradients = function(params, x, key)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    floats = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params = placed(floats, mesh, specs)
    state = jax.eval_shape(tx.init, params)
    count = placed(state[0].count, mesh, P())
    state = (state[0]._replace(count=count, mu=params, nu=params), *state[1:])
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    x = placed(jax.ShapeDtypeStruct((8 * ROWS, SIDE), jnp.float32), mesh, P(axes))
    key = placed(key, mesh, P())
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(step).lower(params, state, x, key).compile()


@pytest.mark.parametrize("codec", [None, dither(bits=8)], ids=["exact", "8_bits"])
@pytest.mark.parametrize("devices", ["eight_chips_of_two_axes", "eight_h200_of_two_axes"])
def test_a_step_sends_codes_and_keeps_slices(
    devices: str, codec: Any, request: pytest.FixtureRequest
) -> None:
    compiled = compile_step(request.getfixturevalue(devices), codec)
    found = [*itertools.chain(*collectives(compiled))]
    floats = [size for dtype, size in found if dtype in ("float32", "bfloat16")]
    wide = [size for dtype, size in found if dtype in ("uint32", "int32")]
    assert max(floats, default=0) <= HIDDEN + 8  # The leaf that stays whole, and the loss.
    if codec is None:
        assert max(wide) >= 2 * SIZE
    else:
        assert max(wide, default=0) <= 128
        assert max(size for dtype, size in found if dtype in ("uint8", "int8")) >= 2 * SIZE
    # Parameters and two moments in slices, the whole bias thrice, and the rows.
    slices = 3 * 4 * 2 * SIZE // 8
    rows = 4 * ROWS * SIDE
    assert (
        compiled.memory_analysis().argument_size_in_bytes <= slices + rows + 3 * 4 * HIDDEN + 4096
    )
