"""Initial weights and batches of the two models, in NumPy: both frameworks start from them.

- `mlp`: 10 tanh layers of 1024 x 1024 with biases, 10.5 M parameters, trained to reproduce its
  input. Its step takes little compute, so a slow link dominates.
- `transformer`: a decoder-only model of bytes with pre-norm blocks and learned positions, 3.3 M
  parameters, 99 % of them in 18 matrices of at least 256 x 256.

This module imports neither JAX nor PyTorch, so a process loads only the framework that it runs.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks.data import load_text

Weights = dict[str, np.ndarray]

LAYERS, SIDE, ROWS = 10, 1024, 8  # of the MLP; rows per worker

BYTES, WIDTH, BLOCKS, HEADS, CONTEXT, SEQUENCES = 256, 256, 4, 4, 64, 4  # of the transformer
HELD_OUT = 128  # windows of the test set and of the validation set, or rows
VALIDATION_PART = 0.1  # of the text before the test set

# First entries of the seeds of independent random streams.
_WEIGHTS, _BATCH, _HELD_OUT, _VALIDATION = range(4)


class Inputs(NamedTuple):
    """What training of one model starts from and reads.

    Attributes:
      first_weights: Maps a seed to the initial float32 arrays, in the order of the forward pass.
      batch: Maps a seed, a worker and a step to the worker's batch: float32[8, 1024] of the MLP,
        int32[4, 65] of the transformer. The first 64 bytes of a row are the input, and the last
        64 the labels.
      held_out: The 128 rows of the held-out loss: a fixed set, of the form of a batch.
      validation: 128 other rows, by which learning rates are chosen. No batch contains them.
    """

    first_weights: Callable
    batch: Callable
    held_out: Any = None
    validation: Any = None


MLP = {
    name: shape
    for layer in range(LAYERS)
    for name, shape in ((f"weight_{layer}", (SIDE, SIDE)), (f"bias_{layer}", (SIDE,)))
}
BLOCK = {
    **{f"attention_norm_{part}": (WIDTH,) for part in ("scale", "shift")},
    **{"qkv": (WIDTH, 3 * WIDTH), "qkv_bias": (3 * WIDTH,)},
    **{"mix": (WIDTH, WIDTH), "mix_bias": (WIDTH,)},
    **{f"mlp_norm_{part}": (WIDTH,) for part in ("scale", "shift")},
    **{"up": (WIDTH, 4 * WIDTH), "up_bias": (4 * WIDTH,)},
    **{"down": (4 * WIDTH, WIDTH), "down_bias": (WIDTH,)},
}
TRANSFORMER = {
    **{"embedding": (BYTES, WIDTH), "positions": (CONTEXT, WIDTH)},
    **{f"block_{block}_{name}": shape for block in range(BLOCKS) for name, shape in BLOCK.items()},
    **{f"final_norm_{part}": (WIDTH,) for part in ("scale", "shift")},
    "head": (WIDTH, BYTES),
}


def first_weights(shapes: Mapping[str, tuple[int, ...]], deviation: float, seed: int) -> Weights:
    """Normal matrices, smaller ones before each residual sum; zero vectors, and scales of one."""
    rng = np.random.default_rng([_WEIGHTS, seed])
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = np.full(shape, name.endswith("scale"), np.float32)
            continue
        factor = (2 * BLOCKS) ** 0.5 if name.endswith(("mix", "down")) else 1  # as in GPT-2
        scale = np.float32(deviation / factor)
        weights[name] = scale * rng.standard_normal(shape, np.float32)
    return weights


def _mlp() -> Inputs:
    def rows(stream, count):
        return np.random.default_rng(stream).standard_normal((count, SIDE), np.float32)

    return Inputs(
        functools.partial(first_weights, MLP, 1 / 32),
        lambda seed, worker, step: rows([_BATCH, seed, worker, step], ROWS),
        rows([_HELD_OUT], HELD_OUT),
        rows([_VALIDATION], HELD_OUT),
    )


def _transformer() -> Inputs:
    text = load_text(None, window=CONTEXT)
    count = round(VALIDATION_PART * len(text.train_inputs))
    # The windows are adjacent, so batches may begin at any byte.
    train = text.train_inputs[:-count].reshape(-1)

    def batch(seed, worker, step):
        rng = np.random.default_rng([_BATCH, seed, worker, step])
        starts = rng.integers(0, len(train) - CONTEXT, SEQUENCES)
        return train[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)

    def windows(inputs, labels):
        """Windows that are spread over a whole set."""
        chosen = np.linspace(0, len(inputs) - 1, HELD_OUT).astype(int)
        return np.concatenate([inputs[chosen].astype(np.int32), labels[chosen, -1:]], axis=1)

    return Inputs(
        functools.partial(first_weights, TRANSFORMER, 0.02),
        batch,
        windows(text.test_inputs, text.test_labels),
        windows(text.train_inputs[-count:], text.train_labels[-count:]),
    )


def load(model: str) -> Inputs:
    """The inputs of `mlp` or `transformer`."""
    return {"mlp": _mlp, "transformer": _transformer}[model]()
