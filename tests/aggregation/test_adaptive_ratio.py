"""The ratio follows the error that is measured, the same on all workers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import last, refuse, sent, steps
from tests.slow import slow
from tests.workers import Mode

RATIOS = [1 / 32, 1 / 8, 1 / 2]
PATIENCE = 6


def adaptive(target: float, codec: Any = lambda r: top_k(ratio=r), **options: Any) -> Any:
    return jaxcomm.adaptive_ratio(codec, RATIOS, target_error=target, **options)


def concentrated(steps: int, workers: int = 3, size: int = 64) -> np.ndarray:
    """Magnitudes 2^-j: the k largest leave 4^-k of the energy."""
    rng = np.random.default_rng(steps)
    halves = 2.0 ** -np.arange(size).clip(max=40)
    return np.stack(
        [rng.permuted(np.tile(halves, (workers, 1)), axis=1) for _ in range(steps)]
    ) * rng.choice([-1, 1], size=(steps, workers, size))


def flat(steps: int, workers: int = 3, size: int = 64) -> np.ndarray:
    return np.random.default_rng(steps).choice([-1.0, 1.0], size=(steps, workers, size))


def stages_of(tx: Any, updates: Any, mode: Mode = "vmap") -> list[int]:
    """The stage that runs in each step, of updates `[steps, workers, ...]`; the first has 2."""
    return [2, *(int(state.stage) for _, state in steps(tx, updates, mode))][:-1]


@pytest.mark.parametrize("mode", ["vmap", slow("checked")])
def test_ratios_decrease_with_concentrated_energy(mode: Mode) -> None:
    tx = adaptive(0.6, patience=PATIENCE)
    # Of flat updates, only a half leaves less than 0.6.
    updates = np.concatenate([concentrated(6), flat(6)])
    assert stages_of(tx, updates, mode) == [2, 1, 0, 0, 0, 0, 0, 1, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    # 2, 8 and 32 coordinates of 64 leave 1/16, 1/65536 and next to nothing of the energy.
    ("target", "stage"),
    [(0.062, 1), slow(0.063, 0), slow(1.5e-5, 2)],
)
def test_the_smallest_ratio_under_the_target(target: float, stage: int) -> None:
    stages = stages_of(adaptive(target, patience=PATIENCE), concentrated(30))
    # Down to the ratio that is too small, and back; then it is one step in `patience` + 1.
    descent = [*range(2, max(stage - 1, 0), -1)]
    cycle = [stage - 1, *[stage] * PATIENCE] if stage else [0]
    assert stages == [*descent, *cycle * 30][:30]


@pytest.mark.slow
def test_feedback_returns_dropped_coordinates() -> None:
    tx = adaptive(0.3, lambda r: error_feedback(top_k(ratio=r)), diagnostics=True)
    updates, total, ratios = np.concatenate([concentrated(6), flat(6)]), np.zeros(64), []
    for results, state in steps(tx, updates):
        total += np.asarray(results[0], np.float64)
        ratios.append(float(state.diagnostics["ratio"]))
    kept = np.asarray(state.inner.own.per_worker["data"][0].kept, np.float64).mean(axis=0)
    np.testing.assert_allclose(total + kept, updates.sum(axis=0).mean(axis=0), atol=1e-5)
    assert ratios[:3] == RATIOS[::-1] and ratios[-1] == 0.5
    assert set(state.diagnostics) == {"compression_error", "density", "residual_norm", "ratio"}
    assert state.inner.diagnostics == ()


def test_nonfinite_steps_change_nothing() -> None:
    updates = concentrated(4)
    updates[1, 1, 5] = np.nan
    states = [state for _, state in steps(adaptive(0.6), updates)]
    assert [int(state.stage) for state in states] == [1, 1, 0, 0]
    assert {int(state.steps_below_target) for state in states} == {50}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "stage"), [(0.44, 1), (0.43, 2)])
def test_a_mean_of_the_errors_decides_for_all(target: float, stage: int) -> None:
    """One worker's updates are concentrated, another's are flat: at 1/8, they err by 0 and 7/8."""
    updates = np.concatenate([concentrated(12, 1), flat(12, 1)], axis=1)
    assert stages_of(adaptive(target), updates)[-1] == stage


@pytest.mark.parametrize("diagnostics", [False, True])
def test_the_error_is_all_that_is_sent_besides(diagnostics: bool) -> None:
    account = sent(adaptive(0.5, diagnostics=diagnostics), jnp.zeros((4, 64)))
    assert {c.path[-1] for c in account.collectives} == {f"cond {i}/3" for i in range(1, 4)}
    # A half: a bitmap of 64 bits, 32 values, a flag; and three numbers in an all-reduce.
    assert account.bytes_per_worker == 3 * (8 + 128 + 4) + 18


@pytest.mark.slow
def test_any_family_and_any_way_to_form_a_mean() -> None:
    options = {"target_error": 1e-3, "aggregator": jaxcomm.two_stage_mean}
    tx = jaxcomm.adaptive_ratio(lambda bits: dither(bits=int(bits)), [4, 8, 16], **options)
    updates = np.random.default_rng(3).normal(size=(3, 40))
    results, state = last(tx, [updates] * 3)
    assert int(state.stage) == 1  # 4 bits leave more than a thousandth, 8 bits less.
    np.testing.assert_allclose(results[0], updates.mean(axis=0), atol=0.5)


@pytest.mark.parametrize("ratios", [[], [0.5, 0.1]])
def test_ratios_in_another_order_are_refused(ratios: list[float]) -> None:
    build = lambda: jaxcomm.adaptive_ratio(lambda r: top_k(ratio=r), ratios, target_error=0.5)  # noqa: E731
    refuse("`ratios` must be at least one number, in ascending order", build)
