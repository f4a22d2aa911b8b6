"""What policies conserve, and the settings in which they become simpler ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import Context, gossip
from jaxcomm.compression.quantizers import dither
from jaxcomm.synchronization import deterministic, events, shifted_exponential
from jaxcomm.synchronization.events import Event, Policy
from jaxcomm.synchronization.events._asy_lpg import rounding_error
from jaxcomm.synchronization.events._engine import Progress, Record
from jaxcomm.synchronization.events._lazy import _nearest_on_grid
from tests.synchronization.events import problem
from tests.synchronization.events.simulated import run_named


def run(policy: Policy, count: int, work: Any = problem.work, **options: Any) -> Any:
    """The progress, the records and the model after some events."""
    options = {"straggler": shifted_exponential(1.0), "workers": problem.WORKERS, **options}
    loop = events.event_loop(policy, work, options.pop("straggler"), **options)

    @jax.jit
    def simulate(params: Any) -> tuple[Progress, Record, Any]:
        progress, records = loop.run(loop.start(params), count)
        return progress, records, loop.model(progress)

    return simulate(problem.tree(problem.START))


def still(point: Any, event: Event) -> tuple[jax.Array, Any]:
    return jnp.float32(0), jax.tree.map(jnp.zeros_like, point)


def test_stale_reads_do_not_depend_on_speeds() -> None:
    policy = events.stale_synchronous(optax.sgd(0.3), 2)
    losses = []
    for straggler in (shifted_exponential(1.0), deterministic([3.0, 1.0, 1.0, 2.0])):
        _, records, _ = run(policy, 48, straggler=straggler)
        pairs = zip(records.worker.tolist(), records.number.tolist(), strict=True)
        losses.append(dict(zip(pairs, np.asarray(records.loss), strict=True)))
    shared = losses[0].keys() & losses[1].keys()
    assert len(shared) > 30
    for pair in shared:
        np.testing.assert_allclose(losses[0][pair], losses[1][pair], rtol=1e-5)


@pytest.mark.slow
def test_no_staleness_is_synchronous_with_momentum_too() -> None:
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    models = [
        problem.vector(run(policy, 40)[2])
        for policy in (events.stale_synchronous(tx, 0), events.bulk_synchronous(tx))
    ]
    state, x = tx.init(jnp.asarray(problem.START)), jnp.asarray(problem.START)
    for step in range(10):
        g = np.mean([problem.gradient(np.asarray(x), i, step) for i in range(4)], axis=0)
        updates, state = tx.update(jnp.asarray(g, jnp.float32), state)
        x = x + updates
    np.testing.assert_allclose(models, [x, x], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_elastic_steps_and_pairs_conserve_the_sum() -> None:
    away = events.easgd(optax.sgd(1.0), elasticity=0.2)
    state = run(away, 9, lambda point, event: (jnp.float32(0), _only_late(point, event)))[0].policy
    after = run(away, 60, lambda point, event: (jnp.float32(0), _only_late(point, event)))[0].policy
    sums = [problem.vector(s.params).sum(axis=0) + problem.vector(s.center) for s in (state, after)]
    np.testing.assert_allclose(*sums, atol=1e-5)
    spread = [
        np.abs(problem.vector(s.params) - problem.vector(s.center)).max() for s in (state, after)
    ]
    assert spread[1] < 0.1 * spread[0]
    pairs = events.asynchronous_pairs(optax.sgd(1.0), gossip.ring(4))
    state = run(pairs, 60, lambda point, event: (jnp.float32(0), _only_late(point, event)))[
        0
    ].policy
    own = problem.vector(state.params)
    np.testing.assert_allclose(own.mean(axis=0), problem.START - 5 / 4, atol=1e-5)
    np.testing.assert_allclose(own - own.mean(axis=0), 0, atol=1e-3)


def _only_late(point: Any, event: Event) -> Any:
    """A gradient of ones in the first five events, and of zeros afterwards."""
    return jax.tree.map(lambda x: jnp.where(event.position < 5, jnp.ones_like(x), 0), point)


@pytest.mark.slow
def test_a_threshold_of_0_uploads_always_and_others_save() -> None:
    full = np.sum(problem.CURVATURE * problem.MINIMUM, axis=0) / np.sum(problem.CURVATURE, axis=0)
    uploads, sizes = [], []
    for policy in (
        events.lag_wk(0.5, threshold=0.0),
        events.laq(0.5, 8, threshold=0.0, max_skip=0),
        events.lag_wk(0.5, threshold=0.5),
        events.laq(0.5, 8, threshold=0.5),
    ):
        _, records, model = run(policy, 4 * 40, problem.whole)
        np.testing.assert_allclose(problem.vector(model), full, atol=1e-3)
        uploads.append(int(records.sent.uploads.sum()))
        sizes.append(int(records.sent.upload_bytes.sum()))
    assert uploads[:2] == [160, 160]
    assert max(uploads[2:]) < 0.8 * 160
    assert sizes[0] == 160 * 24 and sizes[1] == 160 * (4 + 4 + 2 * 4)


@pytest.mark.parametrize(
    "bits", [3, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (1, 8, 16))]
)
def test_points_of_the_grid_are_the_nearest(bits: int) -> None:
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
def test_the_rounding_error_of_the_precision_rule_is_exact() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=2000), jnp.float32)
    codec, context = dither(bits=4), Context.of(x)
    context = context.replace(statistics=codec.measure(context, x))

    def error(key: jax.Array) -> jax.Array:
        drawn = context.replace(coins=context.coins._replace(private=key))
        return jnp.sum(jnp.square(codec.decode(drawn, codec.encode(drawn, x)[0]) - x))

    errors = jax.jit(jax.vmap(error))(jax.random.split(jax.random.key(0), 200))
    deviation = float(jnp.std(errors)) / 200**0.5
    assert abs(float(jnp.mean(errors)) - float(rounding_error({"a": x}, 4))) < 5 * deviation


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
        received = problem.vector(state.read)[worker]
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
    errors = [
        np.abs(problem.vector(run(policy, 24 * 30)[2]) - minimum).max()
        for policy in (rounded, plain)
    ]
    assert errors[0] < 1e-3 < 0.05 < errors[1]


@pytest.mark.slow
def test_what_feedback_withholds_is_kept() -> None:
    found = run_named("parameter_server_top_k")
    residuals = [
        np.asarray(leaf).reshape(4, -1) for leaf in jax.tree.leaves(found.progress.policy.memory)
    ]
    np.testing.assert_allclose(np.hstack(residuals), found.rule.residual, atol=1e-4)


@pytest.mark.slow
def test_rates_can_be_mapped() -> None:
    def final(rate: jax.Array) -> Any:
        loop = events.event_loop(
            events.stale_synchronous(optax.sgd(rate), 1),
            problem.work,
            shifted_exponential(1.0),
            workers=4,
        )
        start = loop.start(problem.tree(problem.START))
        return loop.model(loop.run(start, 40)[0])

    rates = jnp.array([0.1, 0.3])
    mapped = jax.jit(jax.vmap(final))(rates)
    for number in range(2):
        one = jax.jit(final)(rates[number])
        found = jax.tree.map(lambda x: x[number], mapped)  # noqa: B023
        np.testing.assert_allclose(problem.vector(found), problem.vector(one), rtol=1e-5)
