"""The study of outer steps: its settings and its methods."""

import jax
import pytest

from experiments.methods.outer import METHODS
from experiments.studies.outer import Outer
from experiments.training.outer import Trainer, settings

LATE = {"eager", "delayed"}  # With momentum, they overshoot at the full outer rate.


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_counts_its_bytes(method: str) -> None:
    config = Outer(workers=(4,), periods=(8,), methods=(method,), steps=64, log_every=32)
    setting = [s for s in settings(config) if s["method"] == method][-1]
    rate = {"learning_rate": 0.01, "outer_scale": 0.1 if method in LATE else 1}
    with jax.numpy_dtype_promotion("standard"):  # As optax's Adam needs it.
        *points, run = Trainer(config, setting)(setting, 0, rate, validation=False)
    assert points[-1]["train_loss"] < points[0]["train_loss"] < 5.5
    parameters, ring = 22_976, 2 * 3 / 4
    expected = {
        "synchronous": 4 * ring,
        "synchronous_bfloat16": 2 * ring,
        "diloco": 4 * ring / 8,
        "muloco": 3 * (1 / 2 + 4 / 32) / 8,
        "sparseloco": 3 * 0.19 / 8 / 8,
        "streaming_4_bits": 3 * (1 / 2 + 4 / 256) / 8,
        "eager": 4 * ring / 8,
        "delayed": 4 * ring / 8,
        "noloco": 4 / 8,
    }[method]
    assert run["bytes_per_step"] / parameters == pytest.approx(expected, rel=0.1)
