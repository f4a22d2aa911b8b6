"""The cost model against records of the lab."""

import json
import re
from pathlib import Path

import pytest

from experiments.studies import predict

RECORDS = Path(__file__).parents[3] / "experiments" / "records"
TIMES = {
    ("unshaped", "no_communication"): 100.0,
    ("unshaped", "mean"): 150.0,
    ("unshaped", "global_qsgd:8"): 200.0,
    ("unshaped", "ddp"): 150.0,
    ("100mbit", "mean"): 5500.0,
    ("100mbit", "global_qsgd:8"): 1500.0,
    ("100mbit", "ddp"): 5400.0,
    ("2 clusters, 100mbit", "mean"): 1.0,
}


@pytest.mark.slow
def test_a_prediction_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"study": "lab", "model": "mlp", "workers": 4}')
    rows = [
        {"schema": 1, "kind": "run", "link": link, "method": method, "seed": 0,
         "milliseconds": taken, "sent": 63e6}
        for (link, method), taken in TIMES.items()
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = predict.Measured(tmp_path)
    # A ring of 4 sends 1.5 times the 10,496,000 coordinates.
    rate, sent = 12.5e6 * 1448 / 1514, 1.5 * 10_496_000
    # Counted bytes have the headers, and most of them are sent during the backward pass.
    for method, expected in (
        ("mean", 150 + 1e3 * 4 * sent / rate),
        ("global_qsgd:8", 200 + 1e3 * sent / rate),
        ("ddp", 150 + 1e3 * 63e6 / 12.5e6 - 200 / 3),
    ):
        assert predict.predict(measured, method) == {"100mbit": pytest.approx(expected, rel=1e-3)}
    assert predict.main(predict.Predict(str(tmp_path))) == 0
    text = capsys.readouterr().out
    assert "Fastest: global_qsgd:8; predicted: global_qsgd:8, 1.00 x its time" in text
    assert "steps too: global_qsgd:8, 1.00 x its time, and 1.00 x the least" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "methods", "largest"),
    [
        ("2026-11-23_lab", 36, 15),
        ("2026-11-25_lab_links", 16, 55),  # D-PSGD, whose rounds were pairs that took turns.
        ("2026-11-25_lab_200mbit", 16, 20),
        ("2026-11-25_lab_20mbit", 10, 50),  # A token bucket starts full: 64 KB cost nothing.
    ],
)
def test_committed_records_are_predicted(
    name: str, methods: int, largest: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main(predict.Predict(str(RECORDS / name))) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    errors = [float(found[0]) for line in lines if (found := re.findall(r"([+-][\d.]+)%$", line))]
    assert len(errors) == methods and max(map(abs, errors)) < largest
    assert len(lines) > methods
    for text in lines[methods:]:
        assert float(text.partition("median error ")[2].partition("%")[0]) < 5
        assert "predicted: power_sgd_rank_1, 1.00 x" in text
        assert "steps too: power_sgd_rank_4" in text
        assert float(re.findall(r"and ([\d.]+) x the least", text)[0]) <= 1.05
