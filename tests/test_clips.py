"""A clip before the aggregator clips each worker's own gradient: an error, unless it is meant."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxcomm
from jaxcomm import global_qsgd, gossip
from jaxcomm._require import require_clips_of_the_mean
from jaxcomm.scheduling import wait_free
from jaxcomm.synchronization import diloco, local_sgd
from tests.aggregation.runs import WHERE, prepared, refuse
from tests.cases import CASES, Case
from tests.cases._local import LOCAL, RECIPES, LocalCase
from tests.workers import mesh_of

N = 4
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
W = jnp.ones(3)
CLIP, MEAN, SGD = optax.clip_by_global_norm(1.0), jaxcomm.mean(), optax.sgd(0.1)


def loss_fn(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w - 1) ** 2)


PER_WORKER: dict[str, Any] = {
    "chain": lambda: optax.chain(CLIP, MEAN, SGD),
    "masked": lambda: optax.chain(optax.masked(CLIP, True), global_qsgd()),
    "injected": lambda: optax.chain(
        optax.inject_hyperparams(optax.clip_by_global_norm)(1.0), jaxcomm.top_k_sgd(ratio=0.5)
    ),
    "injected aggregator": lambda: optax.chain(
        CLIP, optax.inject_hyperparams(jaxcomm.mean, static_args=("axis_name",))("data")
    ),
    "partition": lambda: optax.chain(
        optax.partition({"a": CLIP, "b": optax.identity()}, "a"), global_qsgd()
    ),
    "accumulated": lambda: jaxcomm.accumulate(optax.chain(CLIP, MEAN, SGD), 2),
    "skipped": lambda: jaxcomm.skip_nonfinite(optax.chain(CLIP, jaxcomm.delayed(MEAN), SGD)),
    "sharded server": lambda: optax.chain(CLIP, jaxcomm.sharded_server(SGD)),
}


@pytest.mark.parametrize("name", PER_WORKER)
def test_a_clip_of_each_worker_is_refused(name: str) -> None:
    tx, mesh = PER_WORKER[name](), mesh_of(N)
    message = r"clip each worker's own.*jaxcomm.per_worker\(optax."
    refuse(message, lambda: jaxcomm.init(tx, W, N))
    refuse(message, lambda: jaxcomm.make_step(loss_fn, tx, mesh))
    refuse(message, lambda: jaxcomm.simulate(loss_fn, tx, N))


@pytest.mark.parametrize(
    "clip",
    [
        optax.adaptive_grad_clip(1.0),
        optax.clip(1.0),
        optax.normalize_by_update_norm(),
        optax.scale_by_sign(),
        optax.scale_by_trust_ratio(),
        optax.contrib.normalize(),
    ],
)
def test_every_nonlinear_stateless_transformation_is_known(clip: Any) -> None:
    refuse("clip each worker's own", lambda: jaxcomm.init(optax.chain(clip, MEAN), W, N))


GRAPH = gossip.ring(N)
MEANT: dict[str, Any] = {
    "after": lambda: optax.chain(MEAN, CLIP, SGD),
    "dgc": lambda: optax.chain(jaxcomm.deep_gradient_compression(max_norm=1.0), SGD),
    "linear": lambda: optax.chain(optax.scale(2.0), optax.add_decayed_weights(0.1), MEAN, SGD),
    "local": lambda: optax.chain(CLIP, SGD, local_sgd(2)),
    "aggregated local": lambda: optax.chain(CLIP, SGD, local_sgd(2, aggregator=MEAN)),
    "diloco": lambda: diloco(optax.chain(CLIP, SGD), SGD, 2, aggregator=global_qsgd()),
    "gossip": lambda: optax.chain(CLIP, SGD, gossip.dpsgd(GRAPH)),
    "wait_free": lambda: optax.chain(wait_free(MEAN), CLIP, SGD),
    "branches": lambda: optax.partition({"a": optax.chain(MEAN, CLIP), "b": MEAN}, "a"),
    "a function of the user": lambda: optax.chain(
        optax.stateless(lambda g, p: jax.tree.map(jnp.tanh, g)), MEAN
    ),
}


@pytest.mark.parametrize("name", MEANT)
def test_intended_clips_are_accepted(name: str) -> None:
    tx = MEANT[name]()
    local = name in ("local", "aggregated local", "diloco", "gossip")
    jaxcomm.init(tx, jaxcomm.replicate(W, N) if local else W, N)
    jaxcomm.simulate(loss_fn, tx, N)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_aggregator_behind_a_clip(case: Case) -> None:
    require_clips_of_the_mean(optax.chain(case.make(), CLIP))
    if case.name.startswith("zeroth_order"):  # It refuses what comes before in its own words.
        return
    before = optax.chain(CLIP, optax.scale(1.0), case.make())
    refuse("clip each worker's own", lambda: require_clips_of_the_mean(before))


@pytest.mark.parametrize("case", [*LOCAL, *RECIPES], ids=repr)
def test_local_steps_clip_each_workers_gradients(case: LocalCase) -> None:
    inner = optax.chain(CLIP, SGD)
    for options in ({}, {"aggregator": MEAN})[: 1 + case.aggregates]:
        tx = case.make(inner, 2, **options)
        require_clips_of_the_mean(tx)
        require_clips_of_the_mean(optax.chain(CLIP, tx))


def own_gradients() -> np.ndarray:
    rows = X.reshape(N, -1, 3).astype(np.float64)
    return np.stack([2 * (x * (x @ np.ones(3) - 1)[:, None]).mean(0) for x in rows])


@WHERE
def test_both_remedies(where: Any) -> None:
    clip, gradients = optax.clip_by_global_norm(0.25), own_gradients()
    clipped = lambda g: g * np.minimum(1, 0.25 / np.linalg.norm(g, axis=-1, keepdims=True))  # noqa: E731
    down = optax.sgd(1.0)
    of_mean, of_each = clipped(gradients.mean(0)), clipped(gradients).mean(0)
    for tx, right in (
        (optax.chain(MEAN, clip, down), of_mean),
        (optax.chain(jaxcomm.per_worker(clip), MEAN, down), of_each),
        (jaxcomm.sharded_server(down, max_norm=0.25), of_mean),
    ):
        step, state = prepared(loss_fn, tx, W, where)
        np.testing.assert_allclose(step(W, state, X)[0], 1 - right, rtol=1e-5)


def test_noise_before_an_aggregator_is_refused() -> None:
    """Its key is equal on all workers, so that the mean of 4 had all of it, and not a half."""
    noise = optax.add_noise(1.0, 0.0, key=0)
    for tx in (
        optax.chain(noise, MEAN, SGD),
        optax.chain(optax.noisy_sgd(0.1, key=0), global_qsgd()),
    ):
        refuse("the same noise on all workers", lambda tx=tx: require_clips_of_the_mean(tx))
    require_clips_of_the_mean(optax.chain(MEAN, optax.noisy_sgd(0.1, key=0)))


def test_per_example_gradients_are_not_averaged() -> None:
    """Over workers, unlike over examples; and the noise of a batch was 4 times what it should."""
    private = optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0)
    private = optax.chain(private, SGD)
    for tx in (optax.chain(private, MEAN), optax.chain(MEAN, private)):
        message = r"`gradients=` of .* noise after the aggregator"
        refuse(message, lambda tx=tx: jaxcomm.simulate(loss_fn, tx, N))
    require_clips_of_the_mean(private)
