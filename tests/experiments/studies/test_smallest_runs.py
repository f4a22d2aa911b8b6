"""The smallest run of each study, from its options to a record that regenerates."""

from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.studies import load
from experiments.study.record import of_kind
from experiments.study.run import main, read_results, readme

# The options, and the number of lines of the table.
SMALLEST: dict[str, tuple[dict[str, Any], int]] = {
    "budgets": ({"seeds": 2, "steps": 20, "methods": ("equal_8_4", "slow_2_4")}, 6),
    "convergence": ({"cells": ("exact mean", "top-k, feedback"), "workers": (4, 8), "steps": 256,
                     "seeds": 2}, 6),
    "digits": ({"methods": ("mean", "global_qsgd:8"), "optimizers": ("sgd",), "seeds": 2,
                "steps": 4, "batch": 32, "points": 2, "devices": 2}, 2),
    "estimate": ({"methods": ("mean", "global_qsgd:8"), "steps": (3, 1), "draws": 2, "batch": 32,
                  "devices": 4}, 2),
    "gossip": ({"graphs": ("ring_8",), "splits": ("skewed",), "methods": ("dpsgd", "matcha"),
                "seeds": 2, "steps": 4, "log_every": 2, "learning_rates": (0.1, 0.2)}, 2),
    "stragglers": ({"seeds": 2, "trials": 1, "seconds": 0.3, "points": 4, "datasets": ("digits",),
                    "speeds": ("3:1",), "methods": ("all_reduce",),
                    "forms": ("blocking", "finish_late")}, 2),
    "survey": ({"tasks": ("digits",), "methods": ("mean", "signum"), "seeds": 2, "steps": 2,
                "points": 2, "batch": 8, "learning_rates": (0.01, 0.1),
                "trials": 2, "devices": 2}, 2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_run_leaves_a_record_that_regenerates(tmp_path: Path, name: str) -> None:
    options, count = SMALLEST[name]
    study = load(name)
    with jax.numpy_dtype_promotion("standard"):  # As optax's Adam needs it.
        assert main(study, study.config(**options, records=str(tmp_path))) == 0
    (folder,) = tmp_path.iterdir()
    results = read_results(study, folder)
    assert readme(study, results) == (folder / "README.md").read_text(encoding="utf-8")
    assert all((folder / figure.file).stat().st_size > 10_000 for figure in study.figures)
    runs, points = of_kind(results.rows, "run"), of_kind(results.rows, "point")
    assert len(results.lines) == count and runs
    # The validation of trials has seeds of its own.
    assert not {row["seed"] for row in of_kind(results.rows, "trial")} & {r["seed"] for r in runs}
    keys = [*study.table.by, "seed"]
    for run in runs:
        own = [each for each in points if all(each.get(key) == run.get(key) for key in keys)]
        if own and "train_loss" in run:
            assert own[-1]["train_loss"] == run["train_loss"] > 0
