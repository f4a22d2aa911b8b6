"""What is peculiar to one method or another: rates, identities, and who is absent."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import _noise, compression, gossip
from tests.gossip.graphs import GRAPHS, Base
from tests.gossip.workers import flags_of, matrices_of, start, steps, trajectory
from tests.slow import slow

TOP = compression.sparsifiers.top_k(k=3)
ALL = compression.sparsifiers.top_k(k=12)


def distance(x: np.ndarray) -> np.ndarray:
    """The sum of squared distances from the mean, of each step."""
    return np.sum((x - x.mean(axis=-2, keepdims=True)) ** 2, axis=(-2, -1))


@pytest.mark.parametrize("rule", ["metropolis", "best_constant"])
def test_disagreement_contracts_as_predicted(rule: str) -> None:
    mixing = gossip.to_mixing(gossip.ring(8), rule)
    x = start(8)
    found, _ = trajectory(gossip.dpsgd(mixing), x, np.zeros((20, 8, 12), np.float32))
    left = distance(np.concatenate([x[None], found]))
    assert (left[1:] <= mixing.rho * left[:-1] * (1 + 1e-4)).all()
    # In the end, only the slowest direction is left.
    np.testing.assert_allclose(left[-1] / left[-2], mixing.rho, rtol=0.02)


def test_the_complete_graph_is_an_all_reduce() -> None:
    x, updates = np.tile(start(1), (8, 1)), steps(5, 8)
    found, _ = trajectory(
        gossip.dpsgd(gossip.to_mixing(nx.complete_graph(8), "uniform"), order="adapt_then_combine"),
        x,
        updates,
    )
    together = x[0] + np.cumsum(updates.astype(np.float64).mean(axis=1), axis=0)
    np.testing.assert_allclose(found, np.broadcast_to(together[:, None], found.shape), atol=1e-6)


def descend(tx: optax.GradientTransformation, rate: float, count: int) -> np.ndarray:
    """8 workers, each with a quadratic of its own; where they end."""
    targets = jnp.asarray(start(8, seed=3))
    curvature = jnp.asarray(np.random.default_rng(4).uniform(0.5, 2, (8, 12)).astype(np.float32))

    def loss(x: jax.Array, data: tuple[jax.Array, jax.Array]) -> jax.Array:
        target, curve = (a[0] for a in data)
        return 0.5 * jnp.sum(curve * (x - target) ** 2)

    step = jaxcomm.simulate(loss, optax.chain(optax.sgd(rate), tx), 8)
    params = jaxcomm.replicate(jnp.zeros(12), 8)
    state = jaxcomm.init(optax.chain(optax.sgd(rate), tx), params, 8)

    @jax.jit
    def run(params: object, state: object) -> object:
        body = lambda carry, _: (step(*carry, (targets, curvature))[:2], None)  # noqa: E731
        return jax.lax.scan(body, (params, state), None, length=count)[0][0]

    best = np.sum(np.asarray(curvature * targets), 0) / np.sum(np.asarray(curvature), 0)
    return np.asarray(run(params, state).per_worker["data"], np.float64) - best


def test_d2_reaches_the_optimum_of_unlike_workers_and_dpsgd_does_not() -> None:
    mixing = gossip.lazy_mixing(gossip.ring(8))
    exact = descend(gossip.d2(mixing), 0.05, 1500)
    off = descend(gossip.dpsgd(mixing), 0.05, 1500)
    assert np.sum(exact**2) < 1e-8 and np.sum(off**2) > 0.1


@pytest.mark.slow
def test_choco_converges_at_its_step_size_and_not_far_beyond() -> None:
    x, nothing = start(8), np.zeros((1500, 8, 12), np.float32)
    slow_but_sure, _ = trajectory(gossip.choco_sgd(gossip.ring(8), TOP, step_size=0.3), x, nothing)
    assert distance(slow_but_sure[-1]) < 1e-8
    too_fast, _ = trajectory(gossip.choco_sgd(gossip.ring(8), TOP, step_size=1.0), x, nothing)
    assert not distance(too_fast[-1]) < 1


def test_the_step_size_of_theory() -> None:
    # r = 1 - 1/3, b = 4/3 of a ring of 4: eigenvalues 1, 1/3, 1/3, -1/3 of uniform weights.
    r, b, delta = 2 / 3, 4 / 3, 0.25
    expected = r**2 * delta / (16 * r + r**2 + 4 * b**2 + 2 * r * b**2 - 8 * r * delta)
    found = gossip.choco_step_size(gossip.to_mixing(gossip.ring(4), "uniform"), delta)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [gossip.choco_sgd, gossip.deep_squeeze])
def test_a_codec_that_loses_nothing_makes_it_dpsgd(method: object) -> None:
    x, updates = start(8), steps(8, 8)
    exact, _ = trajectory(gossip.dpsgd(gossip.ring(8), order="adapt_then_combine"), x, updates)
    found, _ = trajectory(method(gossip.ring(8), ALL, step_size=1.0), x, updates)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_both_ends_of_a_link_have_the_same_copies() -> None:
    plan = gossip.matcha_plan(gossip.ring(8), budget=0.5)
    tx = gossip.choco_sgd(plan, TOP, step_size=0.3)
    _, state = trajectory(tx, start(8), steps(50, 8))
    pairs = state.own.per_worker["data"]
    assert len(pairs) == len(plan.matchings)
    for matching, ((mine,), (theirs,)) in zip(plan.matchings, pairs, strict=True):
        for i, j in matching:
            np.testing.assert_array_equal(mine[i], theirs[j])
            np.testing.assert_array_equal(mine[j], theirs[i])
            assert np.abs(mine[i]).max() > 0


def test_what_deep_squeeze_leaves_out_is_remembered() -> None:
    x, updates = start(8), steps(1, 8)
    _, state = trajectory(gossip.deep_squeeze(gossip.ring(8), TOP, step_size=0.3), x, updates)
    (residual,) = state.own.per_worker["data"]
    given = x + updates[0]
    sent = given - np.asarray(residual)
    assert (np.count_nonzero(sent, axis=1) == 3).all()
    np.testing.assert_array_equal(sent[sent != 0], given[sent != 0])


def test_halves_of_one_peer_are_the_exact_mean_in_log2_steps() -> None:
    x = start(8)
    tx = gossip.sgp(gossip.one_peer_exponential(8))
    found, state = trajectory(tx, x, np.zeros((3, 8, 12), np.float32))
    np.testing.assert_allclose(found[-1], np.tile(x.mean(axis=0), (8, 1)), atol=1e-6)
    np.testing.assert_array_equal(state.own.per_worker["data"].mass, np.ones(8))


def test_masses_correct_for_weights_that_do_not_add_to_one() -> None:
    graph = gossip.exponential(8)
    graph.add_edges_from((0, j) for j in range(1, 8))
    x = start(8)
    found, state = trajectory(gossip.sgp(graph, overlap=1), x, np.zeros((300, 8, 12), np.float32))
    assert np.ptp(state.own.per_worker["data"].mass) > 0.1
    np.testing.assert_allclose(found[-1], np.tile(x.mean(axis=0), (8, 1)), atol=1e-4)


@pytest.mark.parametrize("base", [GRAPHS[0], *map(slow, GRAPHS[1:])], ids=repr)
def test_flags_are_those_of_the_plan(base: Base) -> None:
    draws = 4000
    plan = gossip.matcha_plan(base.matchings, budget=0.5)
    mixing = gossip.to_mixing(plan)
    active = flags_of(mixing, draws).mean(axis=0)
    chances = np.asarray(plan.probabilities)
    error = np.sqrt(chances * (1 - chances) / draws)
    assert (np.abs(active - chances) <= 4 * error + 1e-6).all()
    assert abs(active.sum() - plan.expected_rounds) <= 3 * np.sqrt(np.sum(error**2)) + 1e-6
    assert abs(plan.expected_rounds - 0.5 * len(plan.matchings)) < 1e-4
    np.testing.assert_allclose(mixing.rho, plan.rho, atol=1e-6)


def test_all_workers_draw_the_same_flags() -> None:
    mixing = gossip.to_mixing(gossip.matcha_plan(GRAPHS[0].matchings, budget=0.5))

    def flags(worker: jax.Array, step: jax.Array) -> jax.Array:
        coin, _ = _noise.make_coins(jax.random.key(0), step, 2, worker)
        return mixing.active(coin.public, step)

    of_workers = jax.vmap(jax.vmap(flags, (None, 0)), (0, None))
    drawn = np.asarray(of_workers(jnp.arange(8), jnp.arange(50, dtype=jnp.uint32)))
    assert (drawn == drawn[:1]).all() and 0 < drawn.mean() < 1


@pytest.mark.parametrize("base", [GRAPHS[0], *map(slow, GRAPHS[1:])], ids=repr)
def test_what_is_left_of_a_direction_is_that_of_the_formula(base: Base) -> None:
    plan = gossip.matcha_plan(base.matchings, budget=0.5)
    mixing = gossip.to_mixing(plan)
    changes = [m - np.eye(plan.workers) for m in mixing.matrices]
    mean = np.eye(plan.workers) + sum(
        p * c for p, c in zip(plan.probabilities, changes, strict=True)
    )
    square = mean @ mean + sum(
        p * (1 - p) * c @ c for p, c in zip(plan.probabilities, changes, strict=True)
    )
    x = np.random.default_rng(0).normal(size=plan.workers)
    found = np.array([np.sum((w @ x) ** 2) for w in matrices_of(mixing, 4000)])
    assert abs(found.mean() - x @ square @ x) <= 3 * found.std() / len(found) ** 0.5


def test_all_links_now_and_then_is_as_good_as_computed_elsewhere() -> None:
    # rho of the periodic baseline at budgets .5, .2, .1, computed with another programme.
    known = {0: (0.8269, 0.9308, 0.9654), 1: (0.9650, 0.9860, 0.9930), 5: (0.7772, 0.9109, 0.9554)}
    graphs = {0: GRAPHS[0], 1: GRAPHS[1], 5: next(g for g in GRAPHS if g.graph.size() == 8)}
    for number, values in known.items():
        for budget, rho in zip((0.5, 0.2, 0.1), values, strict=True):
            found = gossip.random_periodic(graphs[number].graph, budget).rho
            np.testing.assert_allclose(found, rho, atol=1e-3)


def test_a_worker_without_weight_only_mixes() -> None:
    x, updates = start(8), steps(1, 8)
    weight = jnp.asarray([1.0, 0, 2, 1, 1, 0, 1, 1])
    updates[0, 1] = np.nan  # A mean over no samples.
    found, _ = trajectory(gossip.dpsgd(gossip.ring(8)), x, updates, weight=weight)
    w = gossip.mixing_matrix(gossip.ring(8))
    share = weight / (np.ceil(w) @ weight / 3)  # Of a worker and its two neighbors.
    expected = w @ x + np.where(weight[:, None] == 0, 0, share[:, None] * updates[0])
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


PRESENT = jnp.asarray([True, True, False, True, True, True, False, True])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "tx",
    [
        gossip.dpsgd(gossip.ring(8)),
        gossip.choco_sgd(gossip.ring(8), TOP, step_size=0.3, per_neighbor=True),
        slow(gossip.deep_squeeze(gossip.ring(8), TOP, step_size=0.3)),
        slow(gossip.ad_psgd(gossip.hypercube(8), staleness=0)),
    ],
    ids=["dpsgd", "choco_sgd", "deep_squeeze", "ad_psgd"],
)
def test_who_is_absent_gives_and_takes_nothing(tx: optax.GradientTransformation) -> None:
    x, nothing = start(8), np.zeros((30, 8, 12), np.float32)
    found, _ = trajectory(tx, x, nothing, present=PRESENT)
    absent = ~np.asarray(PRESENT)
    np.testing.assert_array_equal(found[-1][absent], x[absent])
    np.testing.assert_allclose(found[-1].mean(axis=0), x.mean(axis=0), atol=1e-6)
    # The ring falls into two parts, each of which agrees by itself: 0, 1, 7 and 3, 4, 5.
    assert distance(found[-1][[3, 4, 5]]) < distance(x[[3, 4, 5]])


def test_push_sum_keeps_its_sums_without_those_who_are_absent() -> None:
    x, nothing = start(8), np.zeros((30, 8, 12), np.float32)
    tx = gossip.sgp(gossip.exponential(8))
    found, state = trajectory(tx, x, nothing, present=PRESENT)
    mass = np.asarray(state.own.per_worker["data"].mass, np.float64)
    np.testing.assert_allclose((mass[:, None] * found[-1]).sum(axis=0), x.sum(axis=0), atol=1e-5)
    np.testing.assert_array_equal(found[-1][2], x[2])


@pytest.mark.slow
def test_info_tells_how_far_neighbours_are_apart() -> None:
    x = start(8)
    w = gossip.mixing_matrix(gossip.ring(8))
    apart = sum(w[i, j] * np.sum((x[i] - x[j]) ** 2) for i in range(8) for j in range(8))
    none = np.zeros((1, 8, 12), np.float32)
    _, state = trajectory(gossip.dpsgd(gossip.ring(8), diagnostics=True), x, none)
    np.testing.assert_allclose(state.diagnostics["disagreement"], apart, rtol=1e-5)
    assert state.diagnostics["rounds"] == 2
    _, state = trajectory(
        gossip.choco_sgd(gossip.ring(8), ALL, step_size=0.3, diagnostics=True), x, none
    )
    np.testing.assert_allclose(state.diagnostics["disagreement"], apart, rtol=1e-5)
    tx = gossip.choco_sgd(gossip.ring(8), ALL, step_size=0.3, per_neighbor=True, diagnostics=True)
    _, state = trajectory(tx, x, none)
    np.testing.assert_allclose(state.diagnostics["disagreement"], apart, rtol=1e-5)
