"""What computes while an outer exchange of Streaming DiLoCo is under way, on eight GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import wire
from jaxcomm.synchronization import streaming_diloco
from jaxcomm.training import make_overlapped_step
from tests.aot.compiling import compile_quickly, placed, relu_layers

LAYERS, SIDE, ROWS = 4, 2048, 512
PERIOD, OVERLAP = 4, 2


def compiled(mesh: Mesh) -> Any:
    """A program of one period, after the first two."""
    tx = streaming_diloco(
        optax.sgd(0.1),
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        PERIOD,
        fragments=2,
        overlap=OVERLAP,
        mixing_factor=0.5,
    )
    shape = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    params = {f"w{number}": shape for number in range(LAYERS)}
    own = jax.eval_shape(lambda params: jaxcomm.replicate(params, 8), params)
    state = jax.eval_shape(lambda params: jaxcomm.init(tx, params, mesh), own)
    args = placed((own, state), mesh, jaxcomm.state_specs((own, state)))
    batches = jax.ShapeDtypeStruct((PERIOD, 8 * ROWS, SIDE), jnp.float32)
    batches = placed(batches, mesh, P(None, "data"))
    step = make_overlapped_step(relu_layers, tx, mesh)

    def run(params: Any, state: Any, batches: jax.Array) -> Any:
        for number in range(PERIOD):
            params, state, _ = step(params, state, batches[number], number=2 * PERIOD + number)
        return params, state

    return compile_quickly(run, (*args, batches), mesh)


def test_exchanges_overlap_on_gpus(eight_h200: Mesh) -> None:
    """Two messages per fragment. The second fragment arrives after the program's end."""
    report = wire.overlap_report(compiled(eight_h200))
    found = [each for each in report.overlaps if each.bytes > 2**20]  # More than counts.
    assert all(each.asynchronous for each in found) and len(found) == 4
    assert all(each.during > 0 for each in found)
