"""The acceptance criterion fails if the method fails or a control passes."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.configs import Compare
from experiments.studies.digits import acceptance
from experiments.studies.digits.table import TABLE
from experiments.study.record import read_metrics

REFERENCE = Path(acceptance.__file__).parents[2] / "records" / "2026-11-21_digits"
CONFIG = Compare(optimizers=("sgd",))


def run(method: str, loss: float, sent: float) -> dict[str, Any]:
    """A run; those of mean have the loss 1 and send 1 byte."""
    others = dict.fromkeys(("test_accuracy", "compression_error", "step_milliseconds"), 0.0)
    names = {"kind": "run", "optimizer": "sgd", "method": method, "seed": 0}
    return {**names, **others, "train_loss": loss, "bytes_per_step": sent}


@pytest.mark.parametrize(
    ("method", "control", "met"),
    [
        ((1.2, 0.25), (2.0, 0.25), True),
        ((1.2, 0.25), (1.2, 0.27), True),
        ((1.6, 0.25), (2.0, 0.25), False),
        ((1.2, 0.27), (2.0, 0.25), False),
        ((1.2, 0.25), (1.4, 0.25), False),
        ((float("nan"), 0.25), (2.0, 0.25), False),
    ],
)
def test_both_limits_apply_to_the_method_and_to_controls(
    method: tuple[float, float], control: tuple[float, float], met: bool
) -> None:
    runs = [run("mean", 1, 1), run("global_qsgd:8", *method), run("truncating", *control)]
    assert acceptance.is_accepted(CONFIG, acceptance.judge(CONFIG, TABLE.lines(runs))) == met


def test_without_a_control_nothing_is_accepted() -> None:
    runs = [run("mean", 1, 1), run("global_qsgd:8", 1, 0.25)]
    verdicts = acceptance.judge(CONFIG, TABLE.lines(runs))
    assert not acceptance.is_accepted(CONFIG, verdicts)
    assert "not judged" in acceptance.describe(CONFIG, verdicts)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference record is not in this checkout")
def test_the_reference_record_is_accepted_for_both_optimizers() -> None:
    settings = json.loads((REFERENCE / "config.json").read_text(encoding="utf-8"))
    assert settings.pop("finished")
    settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    assert Compare(**settings) == Compare()
    lines = TABLE.lines(read_metrics(REFERENCE, "run"))
    assert len(lines) == 12 and all(line["seeds"] == 5 for line in lines)
    verdicts = acceptance.judge(Compare(), lines)
    assert len(verdicts) == 6 and acceptance.is_accepted(Compare(), verdicts)
