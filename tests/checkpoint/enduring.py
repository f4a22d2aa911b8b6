"""A training that survives kills: digits, a checkpoint every few steps, any number of workers.

Each step takes the same number of samples, so what is trained is a function of the seed only, up
to the compression of each worker.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

BATCH = 24  # Of all workers: what 3 and 4 workers can share.
EPOCH = 1776  # Samples, of which no batch crosses the end.
EVERY = 20  # Steps between two checkpoints.


class Trained(NamedTuple):
    """The end of a training.

    Attributes:
      loss: Over all samples.
      counts: How often each sample was seen, by the fewest and the most.
      digest: Of the parameters on this process.
      workers: How many workers did so many steps, in order.
    """

    loss: float
    counts: tuple[int, int]
    digest: str
    workers: list[list[int]]


def train(folder: Path, seed: int, steps: int, pace: float = 0.0) -> Trained:
    """Goes on from the newest checkpoint up to `steps`; saves and ends the process on SIGTERM."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits

    import jaxcomm
    from jaxcomm import launch
    from jaxcomm.checkpoint import Checkpoints
    from tests.checkpoint.program import digest

    workers = jax.device_count()
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*a)) for a in ((), ("data",)))
    images, labels = load_digits(return_X_y=True)
    images, labels = (images[:EPOCH] / 16).astype(np.float32), labels[:EPOCH].astype(np.int32)
    random = np.random.default_rng(seed)
    shapes = {"w1": (64, 32), "w2": (32, 10)}
    params = {k: jnp.asarray(0.2 * random.normal(size=s), jnp.float32) for k, s in shapes.items()}
    tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.05), optax.sgd(0.1, momentum=0.9))
    state: dict[str, Any] = {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}
    state["counts"] = jax.device_put(np.zeros(EPOCH, np.int32), everywhere)

    def loss_fn(params: Any, batch: Any) -> Any:
        logits = jax.nn.relu(batch[0] @ params["w1"]) @ params["w2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    step = jaxcomm.make_step(loss_fn, tx, mesh)
    count = jax.jit(lambda counts, i: counts.at[i].add(1), out_shardings=everywhere)

    def samples(number: int) -> Any:
        """The indices of this process's samples in the batch of a step."""
        epoch, first = divmod(number * BATCH, EPOCH)
        own = np.random.default_rng([seed, epoch]).permutation(EPOCH)[first : first + BATCH]
        return np.array_split(own, jax.process_count())[jax.process_index()]

    number, history = 0, []
    with Checkpoints(folder / "saves") as checkpoints:
        if checkpoints.steps:
            number, state, history = checkpoints.restore(state, tx=tx, workers=mesh)
        history = [*history, [workers, 0]]
        while number < steps:
            own = samples(number)
            indices, *batch = (
                jax.make_array_from_process_local_data(split, x)
                for x in (own, images[own], labels[own])
            )
            counts = count(state["counts"], indices)
            params, opt_state, metrics = step(state["params"], state["opt_state"], tuple(batch))
            state = {"params": params, "opt_state": opt_state, "counts": counts}
            jax.block_until_ready(metrics)
            time.sleep(pace)
            number, history[-1][1] = number + 1, history[-1][1] + 1
            stops = pace > 0 and launch.is_preempted(number)
            if number % EVERY == 0 or stops:
                checkpoints.save(number, state, position=history)
            if stops:
                break
    if number < steps:
        sys.exit(0)
    shown = {"params": state["params"], "counts": state["counts"]}
    final = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), shown)
    found = final["counts"]
    whole = float(loss_fn(final["params"], (images, labels)))
    return Trained(whole, (int(found.min()), int(found.max())), digest(state["params"]), history)


def main(folder: Path, seed: int, steps: int, pace: float) -> None:
    """One of several processes."""
    from jaxcomm import launch

    (folder / "pids").mkdir(exist_ok=True)
    (folder / "pids" / str(os.getpid())).touch()
    launch.initialize(120, save_on_sigterm=True)
    result = train(folder, seed, steps, pace)
    if launch.is_main_process():
        (folder / "trained.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
