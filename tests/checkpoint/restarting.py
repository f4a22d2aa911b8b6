"""A run of several processes that saves, is killed, and goes on when `launch` starts it again."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from jaxcomm import launch

SAMPLES = 232  # Five steps of 8 and 32 of 6, or 29 of 8.
PER_WORKER = 2


def main(folder: Path, kill_at: int) -> None:
    launch.initialize(120)

    import jax
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxcomm
    from jaxcomm.checkpoint import Checkpoints
    from tests.checkpoint.program import digest

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.25), optax.adam(0.05))
    params: Any = {"w": jax.numpy.ones((6, 4))}
    state = {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rows = np.random.default_rng(0).normal(size=(SAMPLES, 6)).astype(np.float32)

    def loss_fn(params: Any, batch: Any) -> Any:
        return jax.numpy.mean((batch @ params["w"] - 1) ** 2)

    step = jaxcomm.make_step(loss_fn, tx, mesh)
    number, sample = 0, 0
    seen: list[list[int]] = []
    with Checkpoints(folder / "saves") as checkpoints:
        if checkpoints.steps:
            number, state, position = checkpoints.restore(state, tx=tx, workers=mesh)
            sample, seen = position["sample"], position["seen"]
        while sample < SAMPLES:
            batch = rows[sample : sample + PER_WORKER * jax.device_count()]
            own = batch[PER_WORKER * jax.process_index() :][:PER_WORKER]
            global_batch = jax.make_array_from_process_local_data(sharding, own)
            params, opt_state, metrics = step(state["params"], state["opt_state"], global_batch)
            state = {"params": params, "opt_state": opt_state}
            jax.block_until_ready(metrics)
            seen = [*seen, [sample, sample + len(batch)]]
            number, sample = number + 1, sample + len(batch)
            if number % 5 == 0:
                checkpoints.save(number, state, position={"sample": sample, "seen": seen})
            if number == kill_at and os.environ.get("JAXCOMM_RESTARTS", "0") == "0":
                checkpoints.wait()
                if jax.process_index() == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    found = {"digest": digest(state["params"]), "seen": seen, "workers": jax.device_count()}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
