"""Initial weights and batches of the two models, in NumPy: both frameworks start from them.

- `mlp`: 10 tanh layers of 1024 x 1024 with biases, 10.5 M parameters, trained to reproduce its
  input. Its step takes little compute, so a slow link dominates.
- `transformer`: a decoder-only model of bytes with pre-norm blocks and learned positions, 3.3 M
  parameters, 99 % of them in 18 matrices of at least 256 x 256.

This module imports neither JAX nor PyTorch, so a process loads only the framework that it runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.text import load_text

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

    Batches and rows of the model `words` are pairs of arrays; see `words`.
    """

    first_weights: Callable[[int], Weights]
    batch: Callable[[int, int, int], Any]
    held_out: Any
    validation: Any


def mlp_weights(seed: int) -> Weights:
    """Normal weights of standard deviation 1/32, and zero biases."""
    rng = np.random.default_rng([_WEIGHTS, seed])
    weights: Weights = {}
    for layer in range(LAYERS):
        weights[f"weight_{layer}"] = rng.standard_normal((SIDE, SIDE), np.float32) / 32
        weights[f"bias_{layer}"] = np.zeros(SIDE, np.float32)
    return weights


def transformer_weights(seed: int) -> Weights:
    """Normal matrices as in GPT-2, with smaller ones before each residual sum."""
    rng = np.random.default_rng([_WEIGHTS, seed])

    def normal(rows: int, columns: int, deviation: float = 0.02) -> np.ndarray:
        return np.float32(deviation) * rng.standard_normal((rows, columns), np.float32)

    def norm(name: str) -> Weights:
        return {
            f"{name}_scale": np.ones(WIDTH, np.float32),
            f"{name}_shift": np.zeros(WIDTH, np.float32),
        }

    before_sum = 0.02 / (2 * BLOCKS) ** 0.5
    weights = {"embedding": normal(BYTES, WIDTH), "positions": normal(CONTEXT, WIDTH)}
    for block in range(BLOCKS):
        weights |= norm(f"block_{block}_attention_norm")
        for name, rows, columns, deviation in (
            ("qkv", WIDTH, 3 * WIDTH, 0.02),
            ("mix", WIDTH, WIDTH, before_sum),
            ("up", WIDTH, 4 * WIDTH, 0.02),
            ("down", 4 * WIDTH, WIDTH, before_sum),
        ):
            if name == "up":
                weights |= norm(f"block_{block}_mlp_norm")
            weights[f"block_{block}_{name}"] = normal(rows, columns, deviation)
            weights[f"block_{block}_{name}_bias"] = np.zeros(columns, np.float32)
    return weights | norm("final_norm") | {"head": normal(WIDTH, BYTES)}


def _mlp(data: Path | None) -> Inputs:
    if data is not None:
        raise ExperimentError("--data names a text for the transformer; the MLP reads no file.")

    def rows(stream: list[int], count: int) -> np.ndarray:
        return np.random.default_rng(stream).standard_normal((count, SIDE), np.float32)

    return Inputs(
        mlp_weights,
        lambda seed, worker, step: rows([_BATCH, seed, worker, step], ROWS),
        rows([_HELD_OUT], HELD_OUT),
        rows([_VALIDATION], HELD_OUT),
    )


def _transformer(data: Path | None) -> Inputs:
    text = load_text(data, window=CONTEXT)
    count = round(VALIDATION_PART * len(text.train_inputs))
    # The windows are adjacent, so batches may begin at any byte.
    train = text.train_inputs[:-count].reshape(-1)
    last = len(train) - (CONTEXT + 1)
    if last < 0 or min(len(text.test_inputs), count) < HELD_OUT:
        least = 12 * HELD_OUT * CONTEXT
        raise ExperimentError(f"--data {data} is too short: about {least} bytes are needed.")

    def batch(seed: int, worker: int, step: int) -> np.ndarray:
        rng = np.random.default_rng([_BATCH, seed, worker, step])
        starts = rng.integers(0, last, SEQUENCES, endpoint=True)
        return train[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)

    def spread(inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Windows that are spread over a whole set."""
        chosen = np.linspace(0, len(inputs) - 1, HELD_OUT).astype(int)
        first = inputs[chosen].astype(np.int32)
        return np.concatenate([first, labels[chosen, -1:]], axis=1)

    return Inputs(
        transformer_weights,
        batch,
        spread(text.test_inputs, text.test_labels),
        spread(text.train_inputs[-count:], text.train_labels[-count:]),
    )


_READERS = {"mlp": _mlp, "transformer": _transformer}


def load(model: str, data: Path | None = None) -> Inputs:
    """The inputs of a model.

    Args:
      model: `mlp` or `transformer`.
      data: A plain-text file for the transformer. Default: see `read_text`.

    Raises:
      ExperimentError: If there is no such model, or the file is missing or too short.
    """
    if model not in _READERS:
        raise ExperimentError(f"The model must be one of {', '.join(_READERS)}, got {model!r}.")
    return _READERS[model](data)
