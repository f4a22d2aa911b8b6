"""Times what checkpoints cost a training on fake devices of one process.

`python -m experiments.bench.saving [ROWS [PAIRS]]` trains on the digits with ROWS (default 256) in
each batch. It compares PAIRS (default 30) times 50 steps with 50 steps that begin with a save.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

WORKERS = 8
EVERY = 50
UNTIMED = 3  # Pairs before the first that counts.


class Block(NamedTuple):
    """What a number of steps took.

    Attributes:
      seconds: In total.
      core_seconds: Over all threads of the process.
      blocked: In which the loop waited for `save`.
    """

    seconds: float
    core_seconds: float
    blocked: float


def training(rows: int) -> tuple[Any, Callable[[Any], Any]]:
    """The first state of an MLP with `top_k` and Adam, and 50 steps of it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from sklearn.datasets import load_digits

    import jaxcomm

    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    chosen = [random.integers(0, len(images), rows) for _ in range(EVERY)]
    batches = [((images[i] / 16).astype(np.float32), labels[i].astype(np.int32)) for i in chosen]
    shapes = {"w1": (64, 256), "b1": (256,), "w2": (256, 10), "b2": (10,)}
    params = {n: jnp.asarray(0.1 * random.normal(size=s), jnp.float32) for n, s in shapes.items()}

    def loss_fn(params: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch[0] @ params["w1"] + params["b1"][None])
        logits = hidden @ params["w2"] + params["b2"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.05), optax.adam(1e-3))
    step = jaxcomm.make_step(loss_fn, tx, mesh)

    def steps(state: Any) -> Any:
        for batch in batches:
            params, opt_state, _ = step(state["params"], state["opt_state"], batch)
            state = {"params": params, "opt_state": opt_state}
        return jax.block_until_ready(state)

    return {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}, steps


def time_pairs(rows: int, pairs: int) -> list[tuple[Block, Block]]:
    """Blocks of steps without and with a save at their beginning, in turn."""
    from jaxcomm.checkpoint import Checkpoints

    state, steps = training(rows)
    found = []
    with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
        for pair in range(UNTIMED + pairs):
            blocks = []
            for saves in (False, True):
                began, of_cores = time.perf_counter(), time.process_time()
                if saves:
                    checkpoints.save(pair, state)
                blocked = time.perf_counter() - began
                state = steps(state)
                seconds = time.perf_counter() - began
                blocks.append(Block(seconds, time.process_time() - of_cores, blocked))
            checkpoints.wait()
            found.append((blocks[0], blocks[1]))
    return found[UNTIMED:]


def describe(pairs: Sequence[tuple[Block, Block]]) -> str:
    """Medians, and quartiles of the ratio of the two times of a pair."""
    import numpy as np

    without, saving = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    low, median, high = np.percentile(100 * (saving[:, 0] / without[:, 0] - 1), [25, 50, 75])
    step = np.median(without[:, 0]) / EVERY
    extra = np.median(saving[:, 1] - without[:, 1])
    return (
        f"a step takes {1e3 * step:.2f} ms; saving every {EVERY} steps costs {median:.1f} % "
        f"(quartiles {low:.1f} and {high:.1f} %); a save blocks the loop for "
        f"{1e3 * np.median(saving[:, 2]):.1f} ms and takes {1e3 * extra:.1f} ms of a core"
    )


def positive_integer(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.saving", description=__doc__)
    parser.add_argument(
        "rows", nargs="?", type=positive_integer, default=256, help="rows of a batch (256)"
    )
    parser.add_argument(
        "pairs", nargs="?", type=positive_integer, default=30, help="times to compare (30)"
    )
    options = parser.parse_args(arguments)
    print(describe(time_pairs(options.rows, options.pairs)))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={WORKERS}"
    main()
