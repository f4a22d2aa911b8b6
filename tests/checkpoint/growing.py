"""A run that goes on after kills, with any number of workers.

The loss is linear, so the gradients do not depend on the parameters. What the parameters have
moved, and the mean of the residuals, add up to the mean gradients of all samples.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcomm import launch

BATCH = 24  # Of all workers: what 3, 4 and 8 workers can share.
RATE = 0.5
EVERY = 5  # Steps between two checkpoints.


class Found(NamedTuple):
    """The end of a run.

    Attributes:
      moved: The parameters, which began as zeros.
      residual: The mean over workers.
      seen: The first sample of each step.
      starts: The workers of each start, and its first sample.
    """

    moved: list[float]
    residual: list[float]
    seen: list[int]
    starts: list[list[int]]

    def check(self, steps: int) -> None:
        """Raises if a sample was lost or seen twice, or a part of a gradient was."""
        assert self.seen == [*range(0, steps * BATCH, BATCH)]
        total = rows(steps).sum(axis=0, dtype=np.float64)
        found = -np.array(self.moved) / RATE + np.array(self.residual)
        np.testing.assert_allclose(found, total / BATCH, rtol=0, atol=2.5e-6 * steps)
        assert np.abs(self.residual).max() > 0.01


def rows(steps: int) -> np.ndarray:
    """The samples, which are the same however many steps follow."""
    return np.random.default_rng(0).normal(size=(steps * BATCH, 8)).astype(np.float32)


def read(folder: Path) -> Found:
    """What the first process has left."""
    return Found(**json.loads((folder / "0.json").read_text()))


def main(folder: Path, until: int, kill_at: int, pace: float) -> None:
    """Goes on from the newest checkpoint, up to a step; in the first start, process 2 may end.

    A run with a pace waits so long in each step. It saves and ends when it is preempted.
    """
    (folder / "pids").mkdir(parents=True, exist_ok=True)
    (folder / "pids" / str(os.getpid())).touch()
    launch.initialize(120, save_on_sigterm=pace > 0)

    import jax
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxcomm
    from jaxcomm.checkpoint import Checkpoints

    workers, process = jax.device_count(), jax.process_index()
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*a)) for a in ((), ("data",)))
    tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.25), optax.sgd(RATE))
    params: Any = {"w": jax.numpy.zeros(8)}
    state = {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}
    samples = rows(until)
    step = jaxcomm.make_step(lambda p, x: jax.numpy.mean(x @ p["w"]), tx, mesh)

    number, seen = 0, []
    starts: list[list[int]] = []
    with Checkpoints(folder / "saves") as checkpoints:
        if checkpoints.steps:
            number, state, (seen, starts) = checkpoints.restore(state, tx=tx, workers=mesh)
        starts = [*starts, [workers, number * BATCH]]
        while number < until:
            first = number * BATCH
            own = np.array_split(np.arange(first, first + BATCH), jax.process_count())[process]
            batch = jax.make_array_from_process_local_data(split, samples[own])
            params, opt_state, metrics = step(state["params"], state["opt_state"], batch)
            state = {"params": params, "opt_state": opt_state}
            jax.block_until_ready(metrics)
            time.sleep(pace)
            seen, number = [*seen, first], number + 1
            stops = pace > 0 and launch.is_preempted(number)
            if number % EVERY == 0 or stops:
                checkpoints.save(number, state, position=[seen, starts])
            if number == kill_at and os.environ["JAXCOMM_RESTARTS"] == "0":
                checkpoints.wait()
                if process == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            if stops:
                break
    if number < until:
        sys.exit(0)
    kept = state["opt_state"][0].own.per_worker["data"][0].kept
    mean = jax.jit(lambda x: x.mean(axis=0), out_shardings=everywhere)(kept)
    moved, residual = (np.asarray(x.addressable_data(0)) for x in (state["params"]["w"], mean))
    if process == 0:
        found = Found(moved.tolist(), residual.ravel().tolist(), seen, starts)
        (folder / "0.json").write_text(json.dumps(found._asdict()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
