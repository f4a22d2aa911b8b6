"""What computes while a wait-free step sends, compiled for eight GPUs and TPUs.

Groups of eight layers are three buckets. XLA has one collective in flight at a time by default, so
that a bucket overlaps at most the next bucket's part of the backward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import scheduling, wire
from jaxcomm.compression import quantizers
from jaxcomm.wire._overlap import OverlapReport
from tests.aot.compiling import compile_quickly, placed, relu_layers

LAYERS, SIDE, ROWS = 24, 2048, 512  # 100,663,296 parameters.
# A bucket of 128 MiB must be one message, and XLA combines at most 30 MiB by default.
COMBINE = {"xla_gpu_all_reduce_combine_threshold_bytes": str(2**30)}
METHODS = {
    "mean": jaxcomm.mean,
    "global_qsgd": jaxcomm.global_qsgd,
    "two_stage": lambda: jaxcomm.two_stage_mean(quantizers.dither(bits=4)),
}


def report(mesh: Mesh, tx: Any, **options: str | bool) -> OverlapReport:
    chain = optax.chain(tx, optax.sgd(0.1))
    shape = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32, sharding=NamedSharding(mesh, P()))
    params = {f"w{number:02d}": shape for number in range(LAYERS)}
    state = jax.eval_shape(lambda p: jaxcomm.init(chain, p, mesh), params)
    state = placed(state, mesh, jaxcomm.state_specs(state))
    batch = placed(jax.ShapeDtypeStruct((8 * ROWS, SIDE), jnp.float32), mesh, P("data"))
    step = jaxcomm.make_step(relu_layers, chain, mesh, metrics="own")
    compiled = compile_quickly(step, (params, state, batch), mesh, **options)
    found = wire.overlap_report(compiled)
    print(found)
    return found


def grouped(method: str, layers: int) -> Any:
    names = [f"['w{number:02d}']" for number in reversed(range(LAYERS))]
    plan = [names[i : i + layers] for i in range(0, LAYERS, layers)]
    return scheduling.wait_free(METHODS[method](), plan=plan)


@pytest.mark.parametrize("method", ["mean", "global_qsgd"])
def test_summed_codecs_overlap_on_gpus(method: str, eight_h200: Mesh) -> None:
    found = report(eight_h200, grouped(method, 8), **COMBINE)
    assert found.share >= 0.6


def test_without_groups_nothing_overlaps(eight_h200: Mesh) -> None:
    found = report(eight_h200, jaxcomm.global_qsgd())
    assert found.share == 0.0


def test_at_the_default_threshold(eight_h200: Mesh) -> None:
    """Buckets of 24 MiB of codes are below it; four of them may overlap at most 61 %."""
    found = report(eight_h200, grouped("global_qsgd", 6))
    large = [each for each in found.overlaps if each.bytes > 2**20]
    assert [each.bytes for each in large] == [6 * SIDE * SIDE] * 4
    assert all(each.asynchronous for each in large)
    assert found.share >= 0.45


@pytest.mark.parametrize("method", ["mean", "global_qsgd"])
def test_delayed_gradients_overlap_without_groups(method: str, eight_h200: Mesh) -> None:
    """What is sent is in the state, so it overlaps with the forward pass as well."""
    found = report(eight_h200, jaxcomm.delayed(METHODS[method]()), **COMBINE)
    assert found.share >= 0.9


@pytest.mark.slow
def test_a_flag_makes_all_to_alls_asynchronous_on_tpus(eight_chips: Mesh) -> None:
    found = report(eight_chips, grouped("two_stage", 12), xla_tpu_enable_async_all_to_all=True)
    rows = [each for each in found.overlaps if each.kind == "all_to_all"]
    assert all(each.asynchronous for each in rows)
    assert rows[0].share > 0.5
