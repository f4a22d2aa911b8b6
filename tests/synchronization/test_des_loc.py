"""DES-LOC against its equations in NumPy, and its special case."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.synchronization import des_loc, pr_sgd
from jaxcomm.synchronization._des_loc import averaged_moments
from tests.synchronization.towards import account, run

N, SIZE, STEPS = 4, 6, 13
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
ADAM = optax.adam(0.05, b1=0.8, b2=0.95)


@pytest.fixture(autouse=True)
def _as_optax_needs() -> Iterator[None]:
    """Adam multiplies a float by a count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def by_hand(of_params: int, of_mu: int, of_nu: int) -> np.ndarray:
    """The equations of the paper, whose averages precede the next step, in float64."""
    x, u, v = (np.zeros((N, SIZE)) for _ in range(3))
    found = []
    for t in range(STEPS):
        gradient = x - TARGETS
        u = 0.8 * u + 0.2 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        x = x - 0.05 * (u / (1 - 0.8 ** (t + 1))) / (np.sqrt(v / (1 - 0.95 ** (t + 1))) + 1e-8)
        x, u, v = (
            np.tile(a.mean(axis=0), (N, 1)) if (t + 1) % period == 0 else a
            for a, period in ((x, of_params), (u, of_mu), (v, of_nu))
        )
        found.append(x)
    return np.stack(found)


def test_each_moment_has_its_period() -> None:
    found, _ = run(des_loc(ADAM, 2, {"mu": 3, "nu": 6}), TARGETS, STEPS)
    np.testing.assert_allclose(found, by_hand(2, 3, 6), rtol=0, atol=2e-5)


def test_a_moment_that_is_not_named_is_not_averaged() -> None:
    found, _ = run(des_loc(ADAM, 2, {"mu": 4}), TARGETS, STEPS)
    np.testing.assert_allclose(found, by_hand(2, 4, 99), rtol=0, atol=2e-5)


def test_with_equal_periods_it_is_pr_sgd() -> None:
    inner = optax.sgd(0.1, momentum=0.9)
    found, _ = run(des_loc(inner, 3, {"trace": 3}), TARGETS, STEPS)
    expected, _ = run(pr_sgd(inner, 3), TARGETS, STEPS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_what_is_sent_when() -> None:
    """An array per period of each state: half of Local Adam's, "2x less" in the abstract."""
    sent = account(des_loc(ADAM, 2, {"mu": 6, "nu": 12}), TARGETS)
    array = 2 * 3 / 4 * 4 * SIZE
    by_place = sorted(c.bytes_per_worker for c in sent.collectives if c.bytes_per_worker > 20)
    assert by_place == [array] * 3
    assert all(any("cond" in part for part in c.path) for c in sent.collectives)


def test_a_worker_without_steps_does_not_count() -> None:
    tx = averaged_moments(optax.sgd(0.1, momentum=0.9), {"trace": 2}, "data")
    params = jaxcomm.replicate(jnp.zeros(2), 2)
    step = jaxcomm.simulate(lambda w, x: jnp.sum(w * x[0]), tx, 2)
    state = jaxcomm.init(tx, params, 2)
    for batch in ([[1.0, 1.0], [np.nan, 1.0]], [[2.0, 1.0], [np.inf, 1.0]]):
        params, state, _ = step(params, state, jnp.float32(batch))
    traces = state.optimizer.per_worker["data"][0].trace
    np.testing.assert_allclose(traces, np.tile(np.float32([2.9, 1.9]), (2, 1)), rtol=1e-6)


def test_a_field_that_is_missing() -> None:
    params = jaxcomm.replicate(jnp.zeros(2), 2)
    with pytest.raises(ValueError, match=r"no floating-point field 'mu', of \['trace'\]"):
        jaxcomm.init(des_loc(optax.sgd(0.1, momentum=0.9), 2, {"mu": 4}), params, 2)
