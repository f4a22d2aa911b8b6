"""Local steps are local: no process waits for another between exchanges."""

from pathlib import Path

import pytest

from tests.processes.running import finish, free_address, start

pytestmark = pytest.mark.xdist_group("processes")

PROGRAM = """
import pathlib, sys, time
import jax
address, number, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, number)
import jax.numpy as jnp, numpy as np, optax, jaxcomm
from jax.sharding import NamedSharding, PartitionSpec
from jaxcomm.synchronization import diloco

mesh = jax.make_mesh((2,), ("data",))
tx = diloco(optax.sgd(0.1), optax.sgd(0.7), 1000)
params = jaxcomm.replicate(jnp.zeros(4), mesh)
state = jaxcomm.init(tx, params, mesh)
step = jaxcomm.make_step(lambda w, b: jnp.mean((w - b) ** 2), tx, mesh, metrics="own")
rows = NamedSharding(mesh, PartitionSpec("data"))
batch = jax.make_array_from_process_local_data(rows, np.full((1, 4), number, np.float32))
params, state, _ = step(params, state, batch)
jax.block_until_ready(params)
if number == 1:  # It goes on only once the other has done all its steps.
    while not (folder / "first is done").exists():
        time.sleep(0.01)
for _ in range(10):
    params, state, metrics = step(params, state, batch)
jax.block_until_ready((params, metrics))
(folder / ("first is done" if number == 0 else "second is done")).touch()
print([float(shard.data[0]) for shard in metrics["loss"].addressable_shards])
"""


@pytest.mark.slow
def test_a_process_continues_while_another_waits(tmp_path: Path) -> None:
    address = free_address()
    both = [start("-c", PROGRAM, address, number, tmp_path) for number in range(2)]
    ended = [finish(process) for process in both]
    assert [code for code, *_ in ended] == [0, 0], ended
    # Worker 0 is where it began, at its target; worker 1 has come closer to its own.
    losses = [float(said.strip().splitlines()[-1].strip("[]")) for _, said, _ in ended]
    assert losses[0] == 0 and 0 < losses[1] < 1
