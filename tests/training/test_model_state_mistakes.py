"""Mistakes with model state and objects of frameworks: one line that names leaf and remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.synchronization import window_gradients
from tests.workers import mesh_of

N = 4
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
TX = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
STATE = {"mean": jnp.zeros(3), "count": jnp.int32(0)}


def params_of() -> Any:
    return {"w": jnp.ones((3, 1))}


def new(rows: Any, **changes: Any) -> Any:
    return {"mean": jnp.mean(rows, axis=0), "count": jnp.int32(1), **changes}


def returning(state_of: Callable[[Any], Any], state: Any = STATE, **options: Any) -> Any:
    """One step whose loss returns that state."""

    def mistake(make: Any, workers: Any) -> Any:
        def loss(params: Any, state: Any, rows: Any) -> Any:
            return jnp.mean((rows @ params["w"]) ** 2), state_of(rows)

        step = make(loss, TX, workers, has_model_state=True, donate=False, **options)
        given = state(workers) if callable(state) else state
        return step(params_of(), given, jaxcomm.init(TX, params_of(), workers), X)

    return mistake


def with_loss(loss: Callable[..., Any], **options: Any) -> Any:
    """One step with that loss."""

    def mistake(make: Any, workers: Any) -> Any:
        state = [STATE] if options.get("has_model_state") else []
        step = make(loss, TX, workers, donate=False, **options)
        return step(params_of(), *state, jaxcomm.init(TX, params_of(), workers), X)

    return mistake


def over_devices(state_of: Callable[[Any, Any], Any]) -> Any:
    """One step of workers with two devices each, that keep their own state."""

    def mistake(make: Any, workers: Any) -> Any:
        if make is jaxcomm.make_step:
            types = (AxisType.Auto,) * 2
            workers = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
        else:
            workers = {"data": 2, "model": 2}
        loss = lambda p, s, b: (jnp.mean(b @ p["w"]), state_of(s, b))  # noqa: E731
        step = make(loss, TX, workers, has_model_state=True, donate=False)
        state = jaxcomm.replicate(STATE, workers)
        return step(params_of(), state, jaxcomm.init(TX, params_of(), workers), X)

    return mistake


def in_windows(state_of: Callable[[Any, Any], Any], **options: Any) -> Any:
    """One step of windows, with that state after each mini-batch."""

    def mistake(make: Any, workers: Any) -> Any:
        loss = lambda p, s, b: (jnp.mean(b @ p["w"]), state_of(s, b))  # noqa: E731
        gradients = window_gradients
        step = make(loss, TX, workers, has_model_state=True, gradients=gradients, **options)
        windows = (jnp.ones((2 * N, 2, 3)), jnp.ones(N, jnp.int32))
        return step(params_of(), STATE, jaxcomm.init(TX, params_of(), workers), windows)

    return mistake


def initial_for(params: Callable[[], Any]) -> Any:
    """The initial state for these parameters."""
    return lambda make, workers: jaxcomm.init(TX, params(), workers)


def train_state() -> TrainState:
    return TrainState.create(apply_fn=lambda x: x, params=params_of(), tx=TX)


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "another dtype": (
        returning(lambda rows: new(rows, mean=jnp.mean(rows, axis=0).astype(jnp.bfloat16))),
        r"returned `model_state\['mean'\]` as bfloat16\[3\], but received it as float32\[3\]",
    ),
    "one value per example": (
        returning(lambda rows: new(rows, mean=rows)),
        r"returned `model_state\['mean'\]` as float32\[2, 3\], but received it as float32\[3\]",
    ),
    "a counter that differs": (
        returning(lambda rows: new(rows, count=jnp.sum(rows > 0, dtype=jnp.int32))),
        r"`model_state\['count'\]` is int32 and differs over \['data'\].*jaxcomm.replicate",
    ),
    "a model state for other workers": (
        returning(new, lambda workers: jaxcomm.replicate(STATE, 2)),
        "The model state at .* is for 2 workers, but there are 4 here",
    ),
    "a model state over another axis": (
        returning(new, lambda workers: jaxcomm.replicate(STATE, 4, axis_name="other")),
        r"`model_state` differs over the axes \['other'\], with which `axis_name`='data'",
    ),
    "a part that differs by worker": (
        returning(new, lambda workers: {**STATE, "own": jaxcomm.replicate(STATE, workers)}),
        r"Some leaves of `model_state` differ by worker.*the whole of it to `jaxcomm.replicate`",
    ),
    "a counter that differs over the devices of a worker": (
        over_devices(lambda s, rows: {**s, "count": jnp.sum(rows > 0, dtype=jnp.int32)}),
        r"`model_state\['count'\]` is int32 and differs over \['model'\]",
    ),
    "windows: another dtype": (
        in_windows(lambda s, rows: {**s, "mean": jnp.mean(rows, axis=0).astype(jnp.bfloat16)}),
        r"returned `model_state\['mean'\]` as bfloat16\[3\], but received it as float32\[3\]",
    ),
}


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, kind: str) -> None:
    make, workers = (jaxcomm.make_step, mesh_of(N)) if kind == "mesh" else (jaxcomm.simulate, N)
    mistake, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message) as caught:
        mistake(make, workers)
    assert "\n" not in str(caught.value).split("\n---")[0]


def test_a_donated_model_state_is_named() -> None:
    step = jaxcomm.make_step(
        lambda p, s, b: (jnp.mean(b @ p["w"]), s), TX, mesh_of(N), has_model_state=True
    )
    opt_state = jaxcomm.init(TX, params_of(), mesh_of(N))
    state = jax.tree.map(jnp.copy, STATE)
    placed = step(params_of(), state, opt_state, X)[1]
    step(params_of(), placed, opt_state, X)
    with pytest.raises(ValueError, match=r"model_state\['count'\] was donated to an earlier step"):
        step(params_of(), placed, opt_state, X)
