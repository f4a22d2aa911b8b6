"""The study of convergence: objectives, constants, exponents, claims and counterexamples."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import convergence
from experiments.studies._convergence_cells import CELLS, COMPRESSIONS, STRATEGIES, constant_of
from experiments.studies._counterexamples import EXAMPLES, growth_of_delayed, stable_rate
from experiments.studies.convergence import PROBLEMS, Convergence, make_schedule
from experiments.study.claims import Results
from experiments.tasks import objectives
from tests.slow import slow

QUADRATIC = objectives.quadratic(4)


@pytest.mark.parametrize("distance", [0.0, slow(1.0)])
def test_the_gradients_of_quadratics_have_the_stated_moments(distance: float) -> None:
    x = QUADRATIC.solution + np.float32(distance)

    @jax.vmap
    def drawn(key: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda row: row[:, None], objectives.draw(on_device, key))
        return jax.vmap(jax.grad(objectives.loss), (None, 0))(x, rows)

    on_device = jax.device_put(QUADRATIC)
    found = np.float64(jax.jit(drawn)(jax.random.split(jax.random.key(0), 2000)))
    means = np.float64(QUADRATIC.curvature * (x - QUADRATIC.center))
    variance = np.sum((found - means) ** 2, axis=-1).mean(axis=0)
    squares = np.sum(means**2, axis=1)
    np.testing.assert_allclose(variance, 1 + squares / 4, rtol=0.1)  # sigma² = 1, rho² = 1/4.
    assert distance or squares.mean() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("make", [objectives.quadratic, slow(objectives.logistic)])
def test_curvatures_and_minima_are_those_of_the_mean_loss(make: Any) -> None:
    h, b, a, y, weight, *_, solution = make(4)

    def mean_loss(x: jax.Array) -> jax.Array:
        quadratics = 0.5 * jnp.mean(jnp.sum(h * jnp.square(x[None] - b), axis=1))
        return quadratics + weight * jnp.mean(jax.nn.softplus(-y * (a @ x)))

    np.testing.assert_allclose(jax.jit(jax.grad(mean_loss))(solution), 0, atol=2e-6)
    values = np.linalg.eigvalsh(np.float64(jax.jit(jax.hessian(mean_loss))(solution)))
    convexity, smoothness = objectives.convexity_and_smoothness(make(4))
    assert convexity <= values[0] + 1e-4 and values[-1] <= smoothness + 1e-4
    assert values[-1] > smoothness / 4  # The bound of logistic losses is not loose.
    if not weight:
        np.testing.assert_allclose([convexity, smoothness], values[[0, -1]], rtol=1e-4)


@pytest.mark.slow
def test_the_simulator_has_the_exact_moments() -> None:
    choice = CELLS["exact mean"].choices(4)[0]
    schedule = make_schedule(PROBLEMS["quadratic"], QUADRATIC, choice.stretch, 1.0)
    run = convergence.compiled(*convergence.stepwise(STRATEGIES["synchronous"], choice, 4))
    found = np.stack([run(QUADRATIC, schedule, seed, 64)[0] for seed in range(100)])
    mean, error = found.mean(axis=0), found.std(axis=0) / 10
    rates = np.float64(schedule.scale) / (schedule.offset + np.arange(64))
    exact = objectives.exact_distances(QUADRATIC, rates, np.float64(schedule.start))
    assert np.max(np.abs(mean - exact.reshape(4, 16).mean(axis=1)) / error) < 5
    assert np.max(error / mean) < 0.02  # A wrong factor of a tenth would be seen.


def test_constants_are_what_codecs_claim() -> None:
    dithers, of_k = [1 + min(64 / s**2, 8 / s) for s in (4, 1, 16)], [64 / k for k in (16, 4, 32)]
    for name, codecs in COMPRESSIONS.items():
        expected = dithers if "dither" in name else of_k
        np.testing.assert_allclose([*map(constant_of, codecs)], expected)
    # The stretches 4 of the delay of 3 steps and 4 of a quarter of the coordinates add up.
    stretch = CELLS["delayed, top-k, feedback"].choices(4)[0].stretch
    assert stretch == 7
    scale, offset, *_ = make_schedule(PROBLEMS["quadratic"], QUADRATIC, stretch, 1.0)
    assert scale / offset == pytest.approx(1 / (7 * 4))  # L is 4.


def test_fits_and_bins() -> None:
    x = np.arange(1.0, 1025.0)
    assert convergence.fit_exponent(x, 7 * x**-0.37) == pytest.approx(-0.37, abs=1e-12)
    assert math.isnan(convergence.fit_exponent([4.0, 4.0], [1.0, 2.0]))
    assert convergence.fit_exponent([1.0, 2.0], [math.nan, 1.0]) == math.inf
    # Borders are at 4, 16, 64 and 256: the first bin has 1, 2 and 3.
    assert next(convergence.binned(x, 5 / x, 5))[:2] == [2.0, np.arange(4, 16).mean()]


@pytest.mark.parametrize(("power", "outcome"), [(-1, "holds"), (-0.5, "does not hold")])
def test_claims(power: float, outcome: str) -> None:
    rows = [
        {"kind": "run", "problem": "quadratic", "cell": "exact mean", "workers": n, "strength": 0,
         "steps": 256, "seed": seed, "symbol": "", "constant": 1.0, "predicted_constant": 0.0,
         "exponent": power + 0.01 * seed,
         "error": n ** (power + 0.01 * seed), "exact_error": n**power}
        for seed in (-1, 0, 1) for n in (4, 16)
    ]  # fmt: skip
    rows += [
        {"kind": "run", "problem": convergence.EXAMPLE, "cell": "stale gradients", "seed": 0,
         "what": "growth", "measured": 1.01, "expected": 1.02, "end_failing": 9, "end_control": 0.5}
    ]  # fmt: skip
    derived = convergence.derive(rows)
    results = Results(Convergence(), derived, convergence.TABLE.lines(derived))
    exact, by_steps, by_workers, *_, fails, as_published = (
        [finding.outcome for finding in claim.judge(results)] for claim in convergence.CLAIMS
    )
    assert exact == ["holds"] and by_steps == by_workers == [outcome]
    assert fails == ["holds"] and as_published == ["does not hold"]


def test_the_stable_rate_is_where_the_largest_root_is_one() -> None:
    for delay in range(1, 8):
        assert growth_of_delayed(stable_rate(delay), delay) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_counterexamples_fail_as_published(name: str) -> None:
    (fails, control), measured, expected = EXAMPLES[name].run(0, EXAMPLES[name].steps // 2)
    assert fails[-1] > 4 * control[-1] and control[-1] < control[0]
    assert measured == pytest.approx(expected, rel=0.25 if "sign" in name else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_runs(name: str) -> None:
    config = Convergence(cells=(name,), workers=(4,), steps=256, seeds=2)
    setting = next(each for each in convergence.settings(config) if each["cell"] == name)
    run = convergence.train(config, setting)
    ends = [[*run(setting, seed, {}, validation=False)][-1] for seed in (0, 1)]
    assert all(0 < end["error"] < 1 for end in ends) and ends[0]["error"] != ends[1]["error"]
    assert -2 < ends[0]["exponent"] < -0.3
