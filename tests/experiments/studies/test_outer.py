"""The study of outer steps: its claims, its settings, and a record."""

from typing import Any

import jax
import pytest

from experiments.methods.outer import METHODS
from experiments.studies.outer import STUDY, Outer
from experiments.study.command import analyze
from experiments.study.tidy import make_row
from experiments.training.outer import Trainer, settings

LATE = {"eager", "delayed"}  # With momentum, they overshoot at the full outer rate.


def run_rows(method: str, period: int, ratio: float, inner: str = "adam") -> list[dict[str, Any]]:
    """The runs of a method whose test loss is `ratio` times that of the baseline."""
    keys = {"workers": 8, "inner": inner, "period": period, "method": method}
    values = {"test_accuracy": 0.4, "train_loss": 2.0, "bytes_per_step": 1e4 / period,
              "learning_rate": 0.01, "outer_scale": 1.0, "at_edge": "", "trials": 4}  # fmt: skip
    losses = [
        (2 + seed / 10) * ratio * (1 + (-1) ** seed / 1000 * (ratio != 1)) for seed in range(4)
    ]
    return [make_row("run", {**keys, "seed": seed}, {**values, "test_loss": loss})
            for seed, loss in enumerate(losses)]  # fmt: skip


@pytest.mark.parametrize(("ratio", "outcome"), [(1.02, "holds"), (1.2, "does not hold")])
def test_a_claim_is_about_the_own_baseline(ratio: float, outcome: str) -> None:
    rows = [
        *run_rows("synchronous", 1, 1),
        *run_rows("synchronous", 1, 3, "muon"),
        *run_rows("diloco", 32, ratio),
        *run_rows("diloco", 32, 3 * ratio, "muon"),
        *run_rows("sparseloco", 32, ratio / 1.1),
    ]
    results = analyze(STUDY, Outer(), rows, "command: x\n")
    first, second, *_ = results.judgements
    assert [finding.outcome for finding in first.findings] == [outcome] * 2
    assert [finding.outcome for finding in second.findings] == ["holds"]
    line = next(line for line in results.lines if line.group.keys["period"] == 32)
    assert line.values["bytes_ratio"] == pytest.approx(1 / 32)


def test_the_settings_have_baselines_first() -> None:
    found = settings(Outer())
    assert len(found) == 3 * (3 + 8 * 3)
    for number, setting in enumerate(found):
        own = {**setting, "method": "synchronous", "period": 1}
        assert found.index(own) <= number


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
