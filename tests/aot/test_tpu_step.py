"""A step of training on eight chips: the kernels are in it, and codes are what travels."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import jaxcomm

SIDE = 512
COLLECTIVE = re.compile(
    r"= (\(?[^=]*?\)?) "
    r"(?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def compile_step(tx: optax.GradientTransformation, mesh: Mesh) -> str:
    """The compiled program of a step with `SIDE**2 + SIDE` parameters."""
    params = {
        "kernel": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32),
        "bias": jax.ShapeDtypeStruct((1, SIDE), jnp.float32),
    }
    opt_state = jax.eval_shape(lambda params: jaxcomm.init(tx, params, mesh), params)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean((batch @ params["kernel"] + params["bias"]) ** 2)

    step = jaxcomm.make_step(loss, tx, mesh)
    batch = jax.ShapeDtypeStruct((mesh.size, SIDE), jnp.float32)
    return jax.jit(step).lower(params, opt_state, batch).compile().as_text()


def collectives(program: str) -> list[str]:
    """What each collective of the program results in."""
    return COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", program))


def sent(program: str) -> dict[str, int]:
    """The most elements that one collective of the program carries, by dtype."""
    most: dict[str, int] = {}
    for result in collectives(program):
        for dtype, shape in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", result):
            size = math.prod(map(int, filter(None, shape.split(","))))
            most[dtype] = max(size, most.get(dtype, 0))
    return most


def payload(program: str) -> set[str]:
    """The dtypes that more than scalars travel in."""
    return {dtype for dtype, size in sent(program).items() if size > 16}


def test_the_parser_sees_float32(eight_chips: Mesh) -> None:
    program = compile_step(optax.chain(jaxcomm.mean(), optax.sgd(0.1)), eight_chips)
    assert payload(program) == {"f32"}


@pytest.mark.parametrize("bits", [None, 8, 16])
def test_codes_are_what_travels(eight_chips: Mesh, bits: int | None) -> None:
    options = {} if bits is None else {"bits": bits}
    tx = optax.chain(jaxcomm.global_qsgd(**options), optax.sgd(0.1))
    program = compile_step(tx, eight_chips)
    assert "tpu_custom_call" in program
    assert payload(program) <= {"s8", "u32"} and payload(program)
    assert sent(program)["f32"] <= 16  # Statistics and the loss.
