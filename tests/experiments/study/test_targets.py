"""Targets: the loss of the reference after half of its steps, and what runs need to reach it."""

import math
from typing import Any

from experiments.study.record import Row, of_kind
from experiments.study.table import Table
from experiments.study.targets import add_targets, needed, over_fastest, reached, show_ratio

TOP = [(9, 5, 5, 4), (9, 9, 9, 6)]


def targets(mean: Any, **options: Any) -> list[Row]:
    """Runs of 4 logged steps; `top` sends half of the bytes of `mean`."""
    rows: list[Row] = []
    for method, of_method in (("mean", mean), ("top", TOP)):
        for seed, losses in enumerate(of_method):
            keys = {"method": method, "seed": seed, "task": "text"}
            for step, loss in enumerate(losses, 1):
                sent = step * (10 if method == "mean" else 5)
                rows.append({"kind": "point", **keys, "step": step, "loss": loss, "sent": sent})
            rows.append({"kind": "run", **keys})
    found = add_targets(rows, ("task",), {"method": "mean"}, "loss", ("step", "sent"), **options)
    assert of_kind(found, "point") == of_kind(rows, "point")
    return of_kind(found, "run")


def test_the_target_is_averaged_over_seeds() -> None:
    losses = [(8, 4, 2, 1), (8, 6, 2, 1)]
    runs = targets(losses)
    assert [run["target"] for run in runs] == [5] * 4  # Of 4 and 6 at step 2.
    assert [run["step_to_target"] for run in runs[:3]] == [2, 3, 2]
    assert [run["sent_to_target"] for run in runs[:3]] == [20, 30, 10]
    assert math.isnan(runs[3]["step_to_target"])
    # From 8 to 4 and from 6 to 2, the target 5 is after 1.75 and 2.25 steps.
    assert [run["step_to_target"] for run in targets(losses, interpolated=True)[:2]] == [1.75, 2.25]
    assert {run["target"] for run in targets(losses, part=0.25)} == {8}
    mean, top = (line.group for line in Table(("task", "method"), ()).lines(runs))
    assert needed("sent")(mean) == (25, 50**0.5)
    assert (reached("step")(mean), reached("step")(top)) == ("2/2", "1/2")
    assert over_fastest("sent", [{"method": "top"}])(mean) is None
    assert show_ratio(over_fastest("sent", [{"method": "mean"}])(top)) == "not reached"


def test_without_a_finite_reference_no_target_is_reached() -> None:
    """And a run that diverges after its target has not reached it."""
    for losses in ([], [(math.nan,) * 4], [(8, 4, 2, math.nan), (8,) * 4]):
        runs, missing = targets(losses), len(losses) < 2
        assert all(math.isnan(run["target"]) == missing for run in runs)
        assert math.isnan(runs[0]["step_to_target"])
