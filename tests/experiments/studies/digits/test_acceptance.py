"""The acceptance criterion fails if the method fails or a control passes."""

import json
from pathlib import Path

import pytest

from experiments.cli.configs import Compare
from experiments.studies.digits import acceptance
from experiments.studies.digits.table import Row, summarize
from experiments.study.record import read_metrics

REFERENCE = Path(acceptance.__file__).parents[2] / "records" / "2026-11-21_digits"
CONFIG = Compare(optimizers=("sgd",))


def row(method: str, loss_ratio: float, bytes_ratio: float) -> Row:
    empty = dict.fromkeys(Row._fields, 0.0)
    names = {"optimizer": "sgd", "method": method, "seeds": 5}
    return Row(**{**empty, **names, "loss_ratio": loss_ratio, "bytes_ratio": bytes_ratio})


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
    rows = [row("mean", 1, 1), row("global_qsgd:8", *method), row("truncating", *control)]
    assert acceptance.is_accepted(CONFIG, acceptance.judge(CONFIG, rows)) == met


def test_without_a_control_nothing_is_accepted() -> None:
    rows = [row("mean", 1, 1), row("global_qsgd:8", 1, 0.25)]
    verdicts = acceptance.judge(CONFIG, rows)
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
    rows = summarize(read_metrics(REFERENCE, "run"))
    assert len(rows) == 12 and all(row.seeds == 5 for row in rows)
    verdicts = acceptance.judge(Compare(), rows)
    assert len(verdicts) == 6 and acceptance.is_accepted(Compare(), verdicts)
