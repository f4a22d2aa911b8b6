"""The study of convergence: cells, their constants, and counterexamples."""

import numpy as np
import pytest

from experiments.methods.convergence import CELLS
from experiments.methods.strategies import COMPRESSIONS
from experiments.studies.convergence import COMPARED, Convergence
from experiments.tasks.objectives import constants
from experiments.training import convergence, counterexamples
from experiments.training.convergence import settings
from experiments.training.counterexamples import CONTROL, FAILS, stable_rate
from experiments.training.rates import make_objective, make_schedule


def test_constants_are_what_codecs_claim() -> None:
    """The values by hand: dithering with the l2 norm, and k of d coordinates."""
    expected = {
        "dither": [1 + min(64 / s**2, 8 / s) for s in (4, 1, 16)],
        "random_k": [64 / k for k in (16, 4, 32)],
        "ef_dither": [1 + min(64 / s**2, 8 / s) for s in (4, 1, 16)],
        "ef_top_k": [64 / k for k in (16, 4, 32)],
    }
    assert {*COMPRESSIONS} == {*expected}
    for name, values in expected.items():
        found = [COMPRESSIONS[name].constant(number) for number in range(3)]
        np.testing.assert_allclose(found, values)


def test_schedules_follow_from_the_constants() -> None:
    cell = CELLS["delayed, top-k, feedback"]
    known = constants(make_objective("quadratic", 4))
    schedule = make_schedule("quadratic", cell, 0, 4)
    # The stretches 4 of the delay of 3 steps and 4 of a quarter of the coordinates add up.
    assert schedule.scale / schedule.offset == pytest.approx(1 / (7 * known.smoothness))
    assert schedule.scale == pytest.approx(2 / known.convexity)
    short, long = (make_schedule("constant rate", cell, 0, 4, share) for share in (1.0, 0.25))
    assert short.slope == 0 and short.scale == pytest.approx(2 * long.scale)


def test_the_stable_rate_is_where_the_largest_root_is_one() -> None:
    for delay in range(1, 8):
        polynomial = np.zeros(delay + 2)
        for part, stable in ((0.999, True), (1.001, False)):
            polynomial[:2], polynomial[-1] = (1, -1), part * stable_rate(delay)
            assert (np.abs(np.roots(polynomial)).max() < 1) == stable


@pytest.mark.slow
@pytest.mark.parametrize("name", counterexamples.EXAMPLES)
def test_counterexamples_fail_as_published(name: str) -> None:
    assert {*COMPARED} == {*counterexamples.EXAMPLES} == {*counterexamples.WHAT}
    example, workers, steps = counterexamples.EXAMPLES[name]
    found = example(0, workers, steps // 2)
    fails, control = found.curves[FAILS], found.curves[CONTROL]
    assert fails[-1] > 4 * control[-1] and control[-1] < control[0]
    rel = 0.25 if "sign" in name else 0.01
    assert found.measured == pytest.approx(found.expected, rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_runs(name: str) -> None:
    """Briefly, with few workers: errors are positive and finite, and differ by seed."""
    config = Convergence(cells=(name,), workers=(4,), steps=256, event_steps=256, seeds=2)
    setting = next(s for s in settings(config) if s["cell"] == name)
    trainer = convergence.train(config, setting)
    ends = [[*trainer(setting, seed, {}, validation=False)][-1] for seed in (0, 1)]
    assert all(0 < end["error"] < 1 for end in ends) and ends[0]["error"] != ends[1]["error"]
    assert -2 < ends[0]["exponent"] < -0.3
