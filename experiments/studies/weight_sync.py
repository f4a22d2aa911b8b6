"""How many bits per changed weight are exact deltas of bfloat16 weights, beside their entropy?"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.lab.inputs import load
from experiments.lab.models import transformer_loss
from experiments.study.run import Command
from jaxcomm.compression import WeightReceiver, WeightSender
from jaxcomm.compression._weight_delta import _ordered


@dataclasses.dataclass(frozen=True)
class Options:
    """How many bits per changed weight does a delta take, beside the entropy of what it says?

    A transformer of 3.3 million parameters is trained on text with AdamW, and then fine-tuned at
    small rates. Its master weights are float32. After each step, a trainer sends their bfloat16
    rounding to a receiver, which must have the same bits. Time is that of one core, of the encoder.

    Command: `python -m experiments weight_sync`. Expected time: five minutes on two CPU cores.
    Number: bits per changed weight, at the rates where about 1 % and 5 % of the weights change.
    """

    rates: tuple[float, ...] = (1e-6, 2e-6, 4e-6, 1e-5)
    """learning rates of the fine-tuning"""
    before: int = 100
    """steps of training before, at a rate of 0.001"""
    steps: int = 20
    """steps at each rate"""
    record: Path | None = None
    """a file for the rows"""


def entropy(before: Any, after: Any) -> tuple[float, int]:
    """Bits of the places, at the rate of each leaf, and of all differences; and the changes."""
    bits, found = 0.0, []
    for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        x, y = (np.asarray(each).reshape(-1).view(np.int16) for each in (x, y))
        places = np.flatnonzero(x != y)
        found.append(_ordered(y[places]).astype(int) - _ordered(x[places]))
        shares = np.array([places.size, x.size - places.size]) / x.size
        bits -= x.size * np.sum(shares * np.log2(np.where(shares > 0, shares, 1)))
    counts = np.unique(np.concatenate(found), return_counts=True)[1]
    return bits - float(np.sum(counts * np.log2(counts / counts.sum()))), int(counts.sum())


def main(config: Options) -> int:
    """Prints a row per rate; returns the exit code."""
    inputs, rows = load("transformer"), []
    first = inputs.first_weights(0)
    batches = (inputs.batch(0, 0, step) for step in itertools.count())
    size = sum(x.size for x in first.values())

    def trained(params: Any, rate: float, steps: int) -> Iterator[Any]:
        tx = optax.adamw(rate)

        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(jax.grad(transformer_loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for batch in itertools.islice(batches, steps):
            params, state = step(params, state, batch)
            yield params

    def sent(params: Any) -> Any:
        return jax.device_get(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))

    *_, start = trained(first, 1e-3, config.before)
    for rate in config.rates:
        old, seconds, total = sent(start), 0.0, np.zeros(3)
        sender, receiver = WeightSender(old), WeightReceiver(old)
        receiver.receive(sender.base())
        for params in trained(start, rate, config.steps):
            new = sent(params)
            began = time.process_time()
            message = sender.delta(new)
            seconds += time.process_time() - began
            for x, y in zip(*map(jax.tree.leaves, (receiver.receive(message), new)), strict=True):
                assert x.tobytes() == y.tobytes()
            bound, changed = entropy(old, new)
            total += [8 * len(message), bound, changed]
            old = new
        rows.append({
            "rate": rate, "steps": config.steps, "weights": size,
            "changed_share": total[2] / config.steps / size,
            "bits_per_change": total[0] / total[2], "entropy_per_change": total[1] / total[2],
            "encode_gigabytes_per_second": 2e-9 * size * config.steps / seconds,
        })  # fmt: skip
        print(json.dumps(rows[-1]))
    if config.record is not None:
        config.record.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


WEIGHT_SYNC = Command(Options, main)
