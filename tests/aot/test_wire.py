"""What a transformer sends that is sharded over eight GPUs and eight TPUs by XLA itself."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm import wire
from tests.aot.compiling import compile_quickly, placed

LAYERS, SIDE, WORDS, LENGTH, DEVICES = 2, 512, 1024, 128, 8  # 24 layers have 292 leaves.
MATRICES = {"query": 1, "key": 1, "value": 1, "out": 1, "up": 4, "gate": 4, "down": 4}
VECTORS = ("before", "after", "bias_up", "bias_gate", "bias_down")


def shapes() -> dict[str, tuple[int, ...]]:
    """The leaves: twelve of each layer, and four others."""
    found: dict[str, tuple[int, ...]] = {"words": (WORDS, SIDE), "places": (LENGTH, SIDE)}
    found |= {"norm": (SIDE,), "head": (SIDE, WORDS)}
    for layer in range(LAYERS):
        for name, wide in MATRICES.items():
            sizes = (SIDE, SIDE * wide) if name != "down" else (SIDE * wide, SIDE)
            found[f"{layer}/{name}"] = sizes
        for name in VECTORS:
            found[f"{layer}/{name}"] = (SIDE * (4 if name in ("bias_up", "bias_gate") else 1),)
    return found


def scaled(x: jax.Array, by: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * by


def layer_of(of: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y = scaled(x, of["before"])
    scores = jnp.einsum("bid,bjd->bij", y @ of["query"], y @ of["key"])
    x = x + jax.nn.softmax(scores, axis=-1) @ (y @ of["value"]) @ of["out"]
    y = scaled(x, of["after"])
    hidden = jax.nn.gelu(y @ of["up"] + of["bias_up"]) * (y @ of["gate"] + of["bias_gate"])
    return x + hidden @ of["down"] + of["bias_down"]


def loss(params: dict[str, jax.Array], words: jax.Array) -> jax.Array:
    half = {name: x.astype(jnp.bfloat16) for name, x in params.items()}
    x = half["words"][words] + half["places"]
    for layer in range(LAYERS):
        names = (*MATRICES, *VECTORS)
        with jax.named_scope(f"layer_{layer}"):
            x = jax.checkpoint(layer_of)({name: half[f"{layer}/{name}"] for name in names}, x)
    scores = (scaled(x, half["norm"]) @ half["head"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(scores), words[..., None], axis=-1)
    return -jnp.mean(picked)


def step(params: Any, words: jax.Array) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, words))


def is_sharded(shape: tuple[int, ...]) -> bool:
    return math.prod(shape) > 10**5


def compile_step(mesh: Mesh) -> Any:
    specs = {name: P("data") if is_sharded(shape) else P() for name, shape in shapes().items()}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes().items()}
    words = placed(jax.ShapeDtypeStruct((16, LENGTH), jnp.int32), mesh, P("data"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return compile_quickly(step, (placed(params, mesh, specs), words), mesh)


@pytest.mark.parametrize("devices", ["eight_chips", "eight_h200"])
def test_a_sharded_transformer(devices: str, request: pytest.FixtureRequest) -> None:
    """Matrices are gathered once or twice, and their gradients scattered once, in 16 bits."""
    once = sum(2 * math.prod(shape) for shape in shapes().values() if is_sharded(shape)) * 7 / 8
    vectors = sum(2 * math.prod(shape) for shape in shapes().values() if not is_sharded(shape))
    report = wire.require(
        compile_step(request.getfixturevalue(devices)),
        bytes=3 * once + 2 * vectors + 1000,
        bits=16,
        only_axes="data",
        outside_loops=True,
        above=100,
    )
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0.0)
    for c in report.collectives:
        sent[c.kind] += c.bytes_per_worker
        assert c.source.startswith("tests/aot/test_wire.py:")
    assert once <= sent["all_gather"] <= 2 * once
    assert sent["reduce_scatter"] == once
    assert sent["all_reduce"] <= 2 * vectors + 100
    assert 0 < report.overlapped < 1
