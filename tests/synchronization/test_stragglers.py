"""Times of workers, in closed form and drawn, and what waiting for them costs."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.synchronization import (
    Straggler,
    bernoulli_sleep,
    deterministic,
    pareto,
    recorded_times,
    run_time,
    shifted_exponential,
)

N = 8
MODELS = {
    "exponential": shifted_exponential(mean=2.0),
    "shifted": shifted_exponential(mean=2.0, shift=1.0),
    "pareto": pareto(scale=1.0, shape=4.0),
    "sleep": bernoulli_sleep(base=1.0, sleep=5.0, probability=0.5),
    "deterministic": deterministic([1.0] * 4 + [3.0] * 4),
}


def drawn(model: Straggler, draws: int = 8000) -> np.ndarray:
    """One mini-batch of each worker, [draws, workers]."""
    draw = jax.jit(lambda key: model.sample(key, jnp.uint32(0), (N, draws)))
    return np.asarray(draw(jax.random.key(1)), np.float64).T


@pytest.mark.parametrize("name", MODELS)
def test_drawn_times_have_the_expected_order_statistics(name: str) -> None:
    model, times = MODELS[name], drawn(MODELS[name])
    error = times.std(axis=0) / len(times) ** 0.5
    assert (np.abs(times.mean(axis=0) - model.means(N)) <= 5 * error + 1e-6).all()
    ordered = np.sort(times, axis=1)
    for k in range(1, N + 1):
        column = ordered[:, k - 1]
        expected = model.order_statistic(N, k)
        assert abs(column.mean() - expected) <= 5 * column.std() / len(column) ** 0.5 + 1e-6


def test_values_match_a_hand_calculation() -> None:
    exponential = shifted_exponential(1.0)
    found = [
        exponential.order_statistic(8, 8),
        exponential.order_statistic(8, 1),
        run_time(exponential, 10, 8).seconds_per_update,
        shifted_exponential(1.0, shift=3.0).order_statistic(8, 8),
        # Of two, the larger of Pareto(1, 2): 2 E T - E min = 4 - 4/3.
        pareto(1.0, 2.0).order_statistic(2, 2),
        bernoulli_sleep(1.0, 10.0, 0.5).order_statistic(2, 2),
    ]
    expected = [2.717857, 1 / 8, 1.428968, 5.717857, 8 / 3, 1 + 10 * 0.75]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_trace_repeats(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text("1,2\n3,4\n5,6\n")
    model = recorded_times(file)
    for step in range(5):
        times = model.sample(jax.random.key(0), jnp.uint32(step), (2, 3))
        expected = [[1, 2], [3, 4], [5, 6]][step % 3]
        np.testing.assert_array_equal(times, np.tile(np.array(expected)[:, None], (1, 3)))
    np.testing.assert_array_equal(model.means(2), [3, 4])
    assert model.order_statistic(2, 2) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,-2\n", "must hold positive seconds"),
        ("1,2\n3,1e39\n", "in the range of float32"),
        ("1e-50,2\n", "in the range of float32"),
        ("1,2\n", "times of 2 workers, for 3 workers"),
    ],
)
def test_malformed_traces_are_refused(text: str, message: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        recorded_times(file).sample(jax.random.key(0), jnp.uint32(0), (3, 1))


def test_seconds_are_above_0() -> None:
    with pytest.raises(ValueError, match="`seconds` must be a positive number per worker"):
        deterministic([1.0, 0.0])


def test_a_trace_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxcomm.synchronization._stragglers.MAX_TRACE_BYTES", 8)
    with pytest.raises(ValueError, match="more than 8 bytes"):
        recorded_times("/dev/zero")
