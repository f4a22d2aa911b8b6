"""What a step reads, writes and holds on eight chips, beside that of the plain mean."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import jaxcomm
from jaxcomm import wire
from jaxcomm.aggregation import two_stage_mean
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.aot.compiling import collectives, lower_step

LAYERS, SIDE = 8, 1024
PARAMETERS = LAYERS * SIDE**2


# What XLA moves between HBM and VMEM depends on what happens to fit, as none of a large model does.
IN_HBM = {"xla_msa_enable": "false"}


class Cost(NamedTuple):
    accessed: float  # bytes a parameter, if nothing is kept in VMEM
    temporary: float  # in float32 gradients
    program: str


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    x = batch
    for layer in params.values():
        x = jnp.tanh(x @ layer)
    return jnp.mean(x**2)


def cost_of(tx: optax.GradientTransformation, mesh: Mesh) -> Cost:
    """Of a whole step, with a batch of 1024 rows a chip."""
    shape = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    params = {f"layer {layer}": shape for layer in range(LAYERS)}
    batch = jax.ShapeDtypeStruct((mesh.size * SIDE, SIDE), jnp.float32)
    lowered = lower_step(tx, loss, mesh, params, batch)
    compiled = lowered.compile()
    analysis: Any = lowered.compile(compiler_options=IN_HBM).cost_analysis()
    return Cost(
        analysis["bytes accessed"] / PARAMETERS,
        compiled.memory_analysis().temp_size_in_bytes / (4 * PARAMETERS),
        compiled.as_text(),
    )


@functools.cache
def plain(mesh: Mesh) -> Cost:
    return cost_of(jaxcomm.mean(), mesh)


class Most(NamedTuple):
    build: Callable[[], optax.GradientTransformation]
    collectives: int  # beside that of the loss
    accessed: float  # bytes a parameter beyond those of the mean
    temporary: float


BLOCKS = blockwise(dither(bits=4), 256)
SPARSE = error_feedback(top_k(ratio=0.01))
FEEDBACK = error_feedback(scaled(dither(bits=8)))
MOST = {
    "global_qsgd": Most(lambda: jaxcomm.global_qsgd(bits=8), 2, -5, 0.2),
    "gathered, 4 bits": Most(lambda: jaxcomm.qsgd(bits=4), 1, 25, 0.2),
    "by leaf": Most(lambda: jaxcomm.global_qsgd(bits=8, scope="leaf"), 2, -5, 0.2),
    "two stages": Most(lambda: two_stage_mean(dither(bits=8)), 3, 13, 0.2),
    "blocks of 4 bits": Most(lambda: two_stage_mean(BLOCKS), 3, 86, 0.2),
    "top-k": Most(lambda: jaxcomm.all_gather_mean(SPARSE), 1, 600, 1.25),
    "momentum too": Most(lambda: jaxcomm.deep_gradient_compression(), 1, 215, 1.25),
    "feedback": Most(lambda: jaxcomm.all_reduce_mean(FEEDBACK), 2, 17, 0.7),
}


@pytest.mark.parametrize("method", MOST)
def test_a_step_copies_little(eight_chips: Mesh, method: str) -> None:
    most = MOST[method]
    cost = cost_of(most.build(), eight_chips)
    assert len(collectives(cost.program)) == most.collectives + 1
    assert cost.accessed - plain(eight_chips).accessed <= most.accessed
    assert cost.temporary <= most.temporary


def test_gathered_arrays_are_not_summed(eight_chips: Mesh) -> None:
    """Of a message of another size, XLA makes a sum of zeros and what each has."""
    sent = wire.account(cost_of(jaxcomm.qsgd(), eight_chips).program).collectives
    assert len({c.group for c in sent if c.kind == "all_gather"}) == 1
    assert {c.scope for c in sent if c.kind == "all_reduce"} == {"make_step/metrics"}
