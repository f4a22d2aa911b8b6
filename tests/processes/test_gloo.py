"""What Gloo is not asked for: over it, `psum_scatter` has returned wrong values (jax 40830)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import jaxcomm
from tests.processes.running import finish, free_address, start
from tests.processes.sending import OURS, PARTITIONED, WIDTH, WORKERS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def _fully_sharded() -> Any:
    """A step of sharded parameters, whose gradients are sent in 8 bits and without a codec."""
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    params = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones((1, WIDTH))}
    specs = jaxcomm.training.slice_specs(params, mesh)
    run = jaxcomm.training.fully_sharded_value_and_grad(
        lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2), mesh, specs
    )
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    return jax.jit(run), (placed, jnp.ones((4 * WORKERS, WIDTH)))


def _server() -> Any:
    mesh = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
    tx = jaxcomm.sharded_server(optax.sgd(0.1, momentum=0.9))
    params = {"w": jnp.ones((WIDTH, WIDTH))}
    step = jaxcomm.make_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
    return step, (params, jaxcomm.init(tx, params, mesh), jnp.ones((4 * WORKERS, WIDTH)))


PROGRAMS = OURS | PARTITIONED | {"fully sharded": _fully_sharded, "server": _server}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_scatters_a_sum(name: str) -> None:
    run, arguments = PROGRAMS[name]()
    text = jax.jit(run).lower(*arguments).compile().as_text()
    assert "reduce-scatter" not in text
    assert any(kind in text for kind in ("all-reduce", "all-gather", "all-to-all", "permute"))


SCATTERED = """
import sys
import jax
address, workers, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, workers, number)
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

mesh, rows = jax.make_mesh((workers,), ("data",)), 1024 * workers
draw = lambda worker: np.random.default_rng(worker).integers(-99, 99, (rows, 1024))
own = draw(number).astype(np.float32)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own)
scatter = lambda x: lax.psum_scatter(x, "data", tiled=True)
run = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
found = run(x).addressable_data(0)
assert found.nbytes == 2**22
expected = sum(draw(worker)[1024 * number : 1024 * (number + 1)] for worker in range(workers))
np.testing.assert_array_equal(found, expected)
"""


@pytest.mark.parametrize("workers", [2, 4])
def test_scattered_sums_of_four_mebibytes_are_right(workers: int) -> None:
    """Of what programs of users may send."""
    address = free_address()
    started = [start("-c", SCATTERED, address, workers, number) for number in range(workers)]
    ended = [finish(process) for process in started]
    assert [code for code, *_ in ended] == [0] * workers, ended
