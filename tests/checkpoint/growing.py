"""A run that goes on with other numbers of workers.

The loss is linear, so the gradients do not depend on the parameters. What the parameters have
moved, and the mean of the residuals, add up to the mean gradients of all samples.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from jaxcomm import launch

BATCH = 24  # Of all workers: what 3, 4 and 8 workers can share.
STEPS = 40
RATE = 0.5


def main(folder: Path, until: int, kill_at: int) -> None:
    """Goes on from the newest checkpoint, up to a step; in the first start, process 2 may end."""
    launch.initialize(120)

    import jax
    import numpy as np
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
    rows = np.random.default_rng(0).normal(size=(STEPS * BATCH, 8)).astype(np.float32)
    step = jaxcomm.make_step(lambda p, x: jax.numpy.mean(x @ p["w"]), tx, mesh)

    sample, seen = 0, []
    starts: list[list[int]] = []
    with Checkpoints(folder / "saves") as checkpoints:
        if checkpoints.steps:
            _, state, position = checkpoints.restore(state, tx=tx, workers=mesh)
            sample, seen, starts = position["sample"], position["seen"], position["starts"]
        starts = [*starts, [workers, sample]]
        while sample < until * BATCH:
            own = np.array_split(np.arange(sample, sample + BATCH), jax.process_count())[process]
            batch = jax.make_array_from_process_local_data(split, rows[own])
            params, opt_state, metrics = step(state["params"], state["opt_state"], batch)
            state = {"params": params, "opt_state": opt_state}
            jax.block_until_ready(metrics)
            seen, sample = [*seen, sample], sample + BATCH
            number = sample // BATCH
            if number % 5 == 0:
                position = {"sample": sample, "seen": seen, "starts": starts}
                checkpoints.save(number, state, position=position)
            if number == kill_at and os.environ["JAXCOMM_RESTARTS"] == "0":
                checkpoints.wait()
                if process == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    kept = state["opt_state"][0].own.per_worker["data"][0].kept
    mean = jax.jit(lambda x: x.mean(axis=0), out_shardings=everywhere)(kept)
    moved, residual = (np.asarray(x.addressable_data(0)) for x in (state["params"]["w"], mean))
    found = {"moved": moved.tolist(), "residual": residual.ravel().tolist()}
    found |= {"seen": seen, "starts": starts, "sum": rows.sum(axis=0, dtype=np.float64).tolist()}
    if process == 0:
        (folder / "0.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
