"""Wrappers of optax around, before and after an aggregator: they train, or say what to use."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jaxcomm
from tests.frameworks.test_flax import METHODS
from tests.slow import slow
from tests.workers import mesh_of

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def start() -> Any:
    return {"w": jnp.full((4, 4), 0.1), "b": jnp.zeros(4)}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"][None] - 2 * x) ** 2)


def aggregate(rate: float = -1.0) -> optax.GradientTransformation:
    """Compressed means with error feedback, and SGD with that rate: -1 is the mean itself."""
    return METHODS["feedback"](rate)


def before(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An aggregator before that optimizer."""
    return optax.chain(aggregate(), optimizer)


def scheduled() -> optax.GradientTransformation:
    decay = optax.adamw(
        optax.warmup_cosine_decay_schedule(0, 0.1, 3, 30), mask={"w": True, "b": False}
    )
    return before(optax.chain(optax.clip_by_global_norm(1.0), decay))


WORKS: dict[str, Any] = {
    "apply_if_finite around the optimizer": lambda: before(
        optax.apply_if_finite(optax.sgd(0.1), 3)
    ),
    "MultiSteps around the optimizer": lambda: before(
        optax.MultiSteps(optax.sgd(0.2), 2).gradient_transformation()
    ),
    "schedule_free around all": lambda: optax.contrib.schedule_free(aggregate(0.2), 0.2),
    "muon": lambda: before(optax.contrib.muon(0.1)),
    "clip, decay with a mask, schedule": scheduled,
    "flatten": lambda: optax.flatten(aggregate(0.1)),
    "reduce_on_plateau": lambda: before(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    ),
}
WITH_VALUE = {"reduce_on_plateau"}

REFUSED: dict[str, Any] = {
    "MultiSteps": (lambda: optax.MultiSteps(aggregate(0.1), 2), r"jaxcomm.accumulate\(tx, k\)"),
    "MultiSteps as a transformation": (
        lambda: optax.MultiSteps(aggregate(0.1), 2).gradient_transformation(),
        r"`jaxcomm.accumulate\(tx, k\)` in place of `optax.MultiSteps\(tx, k\)`",
    ),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(aggregate(0.1), 3),
        r"cannot run inside `optax.apply_if_finite`.*: use `jaxcomm.skip_nonfinite\(tx\)`",
    ),
    "conditionally_transform": (
        lambda: optax.conditionally_transform(aggregate(0.1), lambda step, **extra: step % 2 == 0),
        "cannot run inside `optax.conditionally_transform`.*: place it around",
    ),
    "a mask without the rest": (
        lambda: optax.chain(optax.masked(aggregate(), {"w": True, "b": False}), optax.sgd(0.1)),
        r"The update at \['b'\] differs by worker.*Place an aggregator",
    ),
}


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax multiplies its counts of steps by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", ["muon", *map(slow, sorted({*WORKS} - {"muon"}))])
def test_supported_transformations_train(name: str) -> None:
    mesh, tx, params = mesh_of(4), WORKS[name](), start()
    opt_state = jaxcomm.init(tx, params, mesh)
    step = jaxcomm.make_step(loss_fn, tx, mesh)
    losses = [float(loss_fn(params, X))]
    for _ in range(30):
        extra = {"value": jnp.float32(losses[-1])} if name in WITH_VALUE else {}
        params, opt_state, metrics = step(params, opt_state, X, **extra)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_transformations_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        tx = make()
        opt_state = jaxcomm.init(tx, start(), mesh_of(4))
        jaxcomm.make_step(loss_fn, tx, mesh_of(4))(start(), opt_state, X)
    assert "\n" not in str(caught.value).split("\n---")[0]


def test_lookahead_wraps_the_aggregator() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w) ** 2)

    def of_fast(loss: Any, params: Any, batch: Any) -> Any:
        return jaxcomm.local_value_and_grad(loss)(params.fast, batch)

    params, x = optax.LookaheadParams.init_synced(jnp.ones((6, 4))), jnp.ones((4, 6))
    inside, sgd = jaxcomm.power_sgd(rank=1), optax.sgd(0.1)
    right = optax.lookahead(optax.chain(inside, sgd), 5, 0.5)
    step = jaxcomm.simulate(loss, right, 2, gradients=of_fast, donate=False)
    new, _, _ = step(params, jaxcomm.init(right, params, 2), x)
    assert (new.fast != params.fast).all()
