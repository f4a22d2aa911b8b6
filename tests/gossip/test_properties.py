"""What is peculiar to one method or another: what it reaches, its rates, and diagnostics."""

import jax
import numpy as np
import optax
import pytest
from jax import lax

from jaxcomm import compression, gossip
from tests.gossip.workers import start, trajectory

ALL = compression.sparsifiers.top_k(k=12)


def test_d2_but_not_dpsgd_reaches_the_optimum_of_heterogeneous_workers() -> None:
    targets, rng = start(8, seed=3), np.random.default_rng(4)
    curvature = rng.uniform(0.5, 2, (8, 12)).astype(np.float32)
    best = np.sum(curvature * targets, axis=0) / np.sum(curvature, axis=0)

    def distance(tx: optax.GradientTransformation) -> float:
        def worker(x: jax.Array, target: jax.Array, curve: jax.Array) -> jax.Array:
            def body(carry: tuple[jax.Array, optax.OptState], _: None) -> tuple:
                x, state = carry
                change, state = tx.update(-0.05 * curve * (x - target), state, x)
                return (optax.apply_updates(x, change), state), None

            return lax.scan(body, (x, tx.init(x)), length=1500)[0][0]

        run = jax.jit(jax.vmap(worker, axis_name="data"))
        return float(np.sum((np.asarray(run(0 * targets, targets, curvature)) - best) ** 2))

    mixing = gossip.lazy_mixing(gossip.ring(8))
    assert distance(gossip.d2(mixing)) < 1e-8 and distance(gossip.dpsgd(mixing)) > 0.1


def test_the_step_size_of_theory() -> None:
    # r = 1 - 1/3, b = 4/3 of a ring of 4: eigenvalues 1, 1/3, 1/3, -1/3 of uniform weights.
    r, b, delta = 2 / 3, 4 / 3, 0.25
    expected = r**2 * delta / (16 * r + r**2 + 4 * b**2 + 2 * r * b**2 - 8 * r * delta)
    found = gossip.choco_step_size(gossip.to_mixing(gossip.ring(4), "uniform"), delta)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        gossip.dpsgd(gossip.ring(8), diagnostics=True),
        gossip.choco_sgd(gossip.ring(8), ALL, step_size=0.3, diagnostics=True),
        gossip.choco_sgd(gossip.ring(8), ALL, step_size=0.3, per_neighbor=True, diagnostics=True),
    ],
    ids=["dpsgd", "choco_sgd", "per_neighbor"],
)
def test_diagnostics_report_the_disagreement_of_neighbors(tx: optax.GradientTransformation) -> None:
    x, w = start(8), gossip.mixing_matrix(gossip.ring(8))
    distance = np.sum(w * np.sum((x[:, None] - x[None]) ** 2, axis=-1))
    _, state = trajectory(tx, x, np.zeros((1, 8, 12), np.float32))
    np.testing.assert_allclose(state.diagnostics["disagreement"], distance, rtol=1e-5)
    assert state.diagnostics["rounds"] == 2
