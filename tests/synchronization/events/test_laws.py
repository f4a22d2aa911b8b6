"""What policies conserve, and the settings in which they become simpler ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import Context
from jaxcomm.synchronization import events, shifted_exponential
from jaxcomm.synchronization.events import Policy
from jaxcomm.synchronization.events._lazy import _nearest_on_grid
from tests.slow import slow
from tests.synchronization.events import problem


def final(policy: Policy, count: int) -> np.ndarray:
    """The model after some events."""
    loop = events.event_loop(policy, problem.work, shifted_exponential(1.0), workers=4)
    run = jax.jit(lambda params: loop.model(loop.run(loop.start(params), count)[0]))
    return problem.vector(run(problem.tree(problem.START)))


@pytest.mark.slow
def test_no_staleness_is_synchronous_with_momentum_too() -> None:
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    models = [final(events.stale_synchronous(tx, 0), 40), final(events.bulk_synchronous(tx), 40)]
    state, x = tx.init(jnp.asarray(problem.START)), jnp.asarray(problem.START)
    for step in range(10):
        g = np.mean([problem.gradient(np.asarray(x), i, step) for i in range(4)], axis=0)
        updates, state = tx.update(jnp.asarray(g, jnp.float32), state)
        x = x + updates
    np.testing.assert_allclose(models, [x, x], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [3, *map(slow, (1, 8, 16))])
def test_grid_points_are_nearest(bits: int) -> None:
    codec = _nearest_on_grid(bits)

    @jax.jit
    def there_and_back(x: jax.Array) -> tuple[Any, jax.Array]:
        context = Context.of(x)
        context = context.replace(statistics=codec.measure(context, x))
        payload, _ = codec.encode(context, x)
        return payload, codec.decode(context.received(), payload)

    x = np.random.default_rng(bits).normal(size=300).astype(np.float32)
    payload, decoded = there_and_back(jnp.asarray(x))
    radius = np.abs(x).max()
    grid = np.linspace(-radius, radius, 2**bits)
    nearest = grid[np.abs(x[:, None] - grid).argmin(axis=1)]
    np.testing.assert_allclose(decoded, nearest, atol=1e-5)
    assert payload.size == -(-300 // (32 // bits))
    assert not there_and_back(jnp.zeros(300))[1].any()


@pytest.mark.slow
def test_a_reply_has_the_fewest_bits_that_the_rule_allows() -> None:
    policy = events.asy_lpg(problem.whole, 0.1, 12, precision=0.3, bits=(4, 6, 8))
    loop = events.event_loop(policy, problem.work, shifted_exponential(1.0), workers=4)
    step = jax.jit(lambda progress: loop.run(progress, 1))
    progress, seen, ratios = jax.jit(loop.start)(problem.tree(problem.START)), set(), []
    lengths = {4: 4 + 4 + 8, 6: 4 + 4 + 8, 8: 4 + 2 + 8, None: 24}
    for _ in range(80):
        before, (progress, records) = progress.policy, step(progress)
        if before.takes_snapshot:
            assert records.sent.upload_bytes == records.sent.download_bytes == 24
            continue
        state, worker = progress.policy, int(records.worker[0])
        x, snapshot = problem.vector(state.params), problem.vector(state.snapshot)
        bound = 0.3 * np.sum((x - snapshot) ** 2)
        fits = [bits for bits in (4, 6, 8) if _expected_error(x, bits) <= bound]
        chosen = fits[0] if fits else None
        assert records.sent.download_bytes == lengths[chosen]
        assert records.sent.upload_bytes == 4 + 2 + 8
        received = problem.vector(progress.own)[worker]
        seen.add(chosen)
        if chosen:
            ratios.append(np.sum((received - x) ** 2) / bound)
        else:
            np.testing.assert_allclose(received, x, rtol=1e-6)
    assert len(seen) > 2 and None in seen and np.mean(ratios) < 1


def _expected_error(x: np.ndarray, bits: int) -> float:
    total = 0.0
    for leaf in (x[:4], x[4:]):
        step = np.abs(leaf).max() / (2 ** (bits - 1) - 1)
        part = leaf / step - np.floor(leaf / step)
        total += step**2 * np.sum(part * (1 - part))
    return total


@pytest.mark.slow
def test_variance_reduction_converges_where_stochastic_gradients_do_not() -> None:
    minimum = np.sum(problem.CURVATURE * problem.MINIMUM, axis=0) / problem.CURVATURE.sum(axis=0)
    rounded = events.asy_lpg(problem.whole, 0.1, 20)
    plain = events.parameter_server(optax.sgd(0.1))
    errors = [np.abs(final(policy, 24 * 30) - minimum).max() for policy in (rounded, plain)]
    assert errors[0] < 1e-3 < 0.05 < errors[1]


@pytest.mark.slow
def test_rates_can_be_mapped() -> None:
    def at_rate(rate: jax.Array) -> Any:
        policy = events.stale_synchronous(optax.sgd(rate), 1)
        loop = events.event_loop(policy, problem.work, shifted_exponential(1.0), workers=4)
        return loop.model(loop.run(loop.start(problem.tree(problem.START)), 40)[0])

    rates = jnp.array([0.1, 0.3])
    mapped = problem.vector(jax.jit(jax.vmap(at_rate))(rates))
    single = [problem.vector(jax.jit(at_rate)(rate)) for rate in rates]
    np.testing.assert_allclose(mapped, single, rtol=1e-5)
