"""The cost model against records of the lab."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.configs import Predict
from experiments.study import predictions

RECORDS = Path(__file__).parents[3] / "experiments" / "records"


def record(folder: Path, milliseconds: dict[tuple[str, str], float], **settings: Any) -> Path:
    """A record of the lab with one round."""
    settings = {"study": "lab", "model": "mlp", "workers": 4, **settings}
    (folder / "config.json").write_text(json.dumps(settings))
    rows = [
        {"schema": 1, "kind": "run", "link": link, "method": method, "seed": 0,
         "milliseconds": taken, "sent": 63e6}
        for (link, method), taken in milliseconds.items()
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TIMES = {
    ("unshaped", "no_communication"): 100.0,
    ("unshaped", "mean"): 150.0,
    ("unshaped", "global_qsgd:8"): 200.0,
    ("unshaped", "ddp"): 150.0,
    ("100mbit", "mean"): 5500.0,
    ("100mbit", "global_qsgd:8"): 1500.0,
    ("100mbit", "ddp"): 5400.0,
    ("2 clusters 100mbit", "mean"): 1.0,
}


@pytest.mark.slow
def test_a_prediction_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = predictions.read_measured(record(tmp_path, TIMES))
    lines = {line.method: line for line in predictions.predicted_lines(measured)}
    assert all(line.link == "100mbit" for line in lines.values()) and len(lines) == 3
    # A ring of 4 sends 1.5 times the 10,496,000 coordinates and the loss.
    rate = 12.5e6 * 1448 / 1514
    sent = 1.5 * 10_496_000
    assert lines["mean"].predicted == pytest.approx(150 + 1e3 * 4 * sent / rate, rel=1e-4)
    assert lines["global_qsgd:8"].predicted == pytest.approx(200 + 1e3 * sent / rate, rel=1e-3)
    # Counted bytes have the headers, and most of them are sent during the backward pass.
    assert lines["ddp"].predicted == pytest.approx(150 + 1e3 * 63e6 / 12.5e6 - 200 / 3, rel=1e-3)
    (text,) = predictions.summary(measured, [*lines.values()])
    assert "Fastest: global_qsgd:8; predicted: global_qsgd:8, 1.00 x its time" in text
    assert "steps too: global_qsgd:8, 1.00 x its time, and 1.00 x the least" in text
    assert predictions.main(Predict(str(tmp_path))) == 0
    assert "100mbit: median error" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "methods", "largest"),
    [
        ("2026-11-23_lab", 36, 0.15),
        ("2026-11-25_lab_links", 16, 0.55),  # D-PSGD, whose rounds were pairs that took turns.
        ("2026-11-25_lab_200mbit", 16, 0.2),
        ("2026-11-25_lab_20mbit", 10, 0.5),  # A token bucket starts full: 64 KB cost nothing.
    ],
)
def test_committed_records_are_predicted(name: str, methods: int, largest: float) -> None:
    measured = predictions.read_measured(RECORDS / name)
    lines = predictions.predicted_lines(measured)
    assert len(lines) == methods and max(abs(line.error) for line in lines) < largest
    texts = predictions.summary(measured, lines)
    assert texts
    for text in texts:
        assert float(text.partition("median error ")[2].partition("%")[0]) < 5
        assert "predicted: power_sgd_rank_1, 1.00 x" in text
        assert "steps too: power_sgd_rank_4" in text
        assert float(re.findall(r"and ([\d.]+) x the least", text)[0]) <= 1.05
