"""Targets: the loss of the reference after half of its steps, and what runs need to reach it."""

import math
from typing import Any

import pytest

from experiments.study.targets import (
    add_targets,
)
from experiments.study.tidy import of_kind

LOSSES = {"mean": [(8, 4, 2, 1), (8, 6, 2, 1)], "top": [(9, 5, 5, 4), (9, 9, 9, 6)]}


def rows(task: str, factor: float) -> list[dict[str, Any]]:
    """Runs of 4 logged steps; `top` sends half of the bytes of `mean`."""
    found: list[dict[str, Any]] = []
    for method, of_method in LOSSES.items():
        for seed, losses in enumerate(of_method):
            keys = {"task": task, "method": method, "seed": seed}
            sent = 10 if method == "mean" else 5
            found += [
                {"kind": "point", **keys, "step": step, "loss": factor * loss, "sent": sent * step}
                for step, loss in enumerate(losses, 1)
            ]
            found.append({"kind": "run", **keys})
    return found


def test_the_target_is_that_of_the_setting_averaged_over_seeds() -> None:
    both = [*rows("text", 1), *rows("digits", 2)]
    found = add_targets(both, ("task",), {"method": "mean"}, "loss", ("step", "sent"))
    runs = of_kind(found, "run")
    assert [run["target"] for run in runs] == [5] * 4 + [10] * 4  # Of 4 and 6 at step 2.
    for of_task in (runs[:4], runs[4:]):
        assert [run["step_to_target"] for run in of_task][:3] == [2, 3, 2]
        assert [run["sent_to_target"] for run in of_task][:3] == [20, 30, 10]
        assert math.isnan(of_task[3]["step_to_target"])
    assert [row for row in found if row["kind"] == "point"] == of_kind(both, "point")


@pytest.mark.parametrize("losses", [(), (math.nan,) * 4])
def test_without_a_finite_reference_no_target_is_reached(losses: tuple[float, ...]) -> None:
    others = [row for row in rows("text", 1) if row["method"] == "top"]
    diverged = [
        {"kind": "point", "task": "text", "method": "mean", "seed": 0, "step": n, "loss": loss}
        for n, loss in enumerate(losses, 1)
    ]
    found = add_targets([*diverged, *others], ("task",), {"method": "mean"}, "loss", ("step",))
    for run in of_kind(found, "run"):
        assert math.isnan(run["target"]) and math.isnan(run["step_to_target"])
