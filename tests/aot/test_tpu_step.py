"""A step of training on eight chips: the kernels are in it, and codes are what travels."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import jaxcomm
from tests.aot.compiling import collectives, lower_step

SIDE = 512


def sent(tx: optax.GradientTransformation, mesh: Mesh) -> tuple[str, dict[str, int]]:
    """A step with `SIDE**2 + SIDE` parameters, and the most elements it sends at once, by dtype."""
    params = {
        "kernel": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32),
        "bias": jax.ShapeDtypeStruct((1, SIDE), jnp.float32),
    }

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean((batch @ params["kernel"] + params["bias"]) ** 2)

    batch = jax.ShapeDtypeStruct((mesh.size, SIDE), jnp.float32)
    program = lower_step(tx, loss, mesh, params, batch).compile().as_text()
    most: dict[str, int] = {}
    for dtype, size in itertools.chain(*collectives(program)):
        most[dtype] = max(size, most.get(dtype, 0))
    return program, most


def payload(most: dict[str, int]) -> set[str]:
    """The dtypes that more than scalars travel in."""
    return {dtype for dtype, size in most.items() if size > 16}


def test_the_parser_sees_float32(eight_chips: Mesh) -> None:
    assert payload(sent(jaxcomm.mean(), eight_chips)[1]) == {"f32"}


@pytest.mark.parametrize("bits", [None, 8, 16])
def test_codes_are_what_travels(eight_chips: Mesh, bits: int | None) -> None:
    options = {} if bits is None else {"bits": bits}
    program, most = sent(jaxcomm.global_qsgd(**options), eight_chips)
    assert "tpu_custom_call" in program
    assert payload(most) <= {"s8", "u32"} and payload(most)
    assert most["f32"] <= 16  # Statistics and the loss.
