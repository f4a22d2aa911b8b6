"""What checkpoints cost a training on the digits.

`python -m experiments.bench.trainings [ROWS]` times it on fake devices of one process, with ROWS
(default 256) in each batch. It compares 30 times 50 steps with 50 steps that begin with a save.
"""

import functools
import itertools
import os
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxcomm
from experiments.trainer import make_mesh
from jaxcomm.checkpoint import Checkpoints

EVERY, PAIRS = 50, 30
UNTIMED = 3  # Pairs before the first that counts.


def loss(kernels: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy of a perceptron without biases."""
    x, labels = batch
    for kernel in kernels[:-1]:
        x = jax.nn.relu(x @ kernel)
    return optax.softmax_cross_entropy_with_integer_labels(x @ kernels[-1], labels).mean()


def first_weights(random: np.random.Generator, *widths: int) -> list[jax.Array]:
    """Normal kernels that keep the size of what they multiply."""
    return [
        jnp.asarray(random.normal(size=pair) / np.sqrt(pair[0]), jnp.float32)
        for pair in itertools.pairwise((64, *widths, 10))
    ]


_digits = functools.cache(functools.partial(load_digits, return_X_y=True))


def draw(random: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of digits, float32[*shape, 64], and their labels."""
    images, labels = _digits()
    chosen = random.integers(0, len(images), shape)
    return (images[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int32)


def time_saving(rows: int) -> np.ndarray:
    """[PAIRS, 2, 3]: of steps without and with a save, seconds, core seconds, and of `save`."""
    random = np.random.default_rng(0)
    params = first_weights(random, 128, 128, 128)
    batches = [draw(random, rows) for _ in range(EVERY)]
    mesh = make_mesh(8)
    tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.05), optax.adam(1e-3))
    step = jaxcomm.make_step(loss, tx, mesh)
    state = jaxcomm.init(tx, params, mesh)
    found = np.zeros((UNTIMED + PAIRS, 2, 3))
    with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
        for pair, saves in itertools.product(range(UNTIMED + PAIRS), (0, 1)):
            began, of_cores = time.perf_counter(), time.process_time()
            if saves:
                checkpoints.save(pair, (params, state))
            blocked = time.perf_counter() - began
            for batch in batches:
                params, state, _ = step(params, state, batch)
            jax.block_until_ready(params)
            seconds = time.perf_counter() - began
            found[pair, saves] = seconds, time.process_time() - of_cores, blocked
            checkpoints.wait()
    return found[UNTIMED:]


def main(rows: str = "256") -> None:
    """Prints medians."""
    found = time_saving(int(rows))
    step = np.median(found[:, 0, 0]) / EVERY
    added = np.median(found[:, 1, 0] / found[:, 0, 0]) - 1
    _, extra, blocked = 1e3 * np.median(found[:, 1] - found[:, 0], axis=0)
    print(f"a step takes {1e3 * step:.2f} ms")
    print(f"a save every {EVERY} steps costs {added:.1%}")
    print(f"it blocks the loop for {blocked:.1f} ms, and takes {extra:.1f} ms of a core")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main(*sys.argv[1:])
