"""What a call does on the host before its program runs: nothing for the results of the last."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.training import _arguments, _make_step
from tests.training.places import begun, normal
from tests.workers import mesh_of

WALKS = {
    "require_carry": _make_step,
    "require_carry_kept": _make_step,
    "place_carry": _make_step,
    "unshared": _make_step,
    "place": _arguments,
    "state_specs": _arguments,
}
ROWS = normal(0, 16, 5)
DEVICES = pytest.mark.parametrize("devices", [8, 1])
EVERY = set(WALKS)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The functions that have walked over the state or placed it."""
    called: set[str] = set()

    def recorded(name: str, whole: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return whole(*args, **kwargs)

        return record

    for name, module in WALKS.items():
        monkeypatch.setattr(module, name, recorded(name, getattr(module, name)))
    yield called


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)


def start() -> Any:
    return {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}


def prepared(devices: int, donate: bool = True) -> tuple[Any, Any]:
    tx = optax.chain(jaxcomm.mean(), optax.rmsprop(0.1))
    return begun(loss, tx, mesh_of(devices), start(), donate=donate)


@pytest.mark.parametrize("donate", [True, False])
@DEVICES
def test_the_results_of_the_last_call_are_known(
    devices: int, donate: bool, walked: set[str]
) -> None:
    step, state = prepared(devices, donate=donate)
    carry: Any = (start(), state)
    every = EVERY if donate else EVERY - {"unshared"}
    for expected in (every, set(), set()):
        walked.clear()
        *carry, _ = step(*carry, ROWS)
        assert walked == expected
    walked.clear()
    params, state = carry
    *carry, _ = step({**params}, jax.tree.map(lambda x: x, state), ROWS)  # The same arrays.
    assert not walked
    params, state = carry
    *carry, _ = step({**params, "b": params["b"] + 1}, state, ROWS)
    assert walked == every
    walked.clear()
    *carry, _ = step(*carry, ROWS)
    assert not walked


@DEVICES
def test_results_of_older_and_other_steps(devices: int, walked: set[str]) -> None:
    step, state = prepared(devices, donate=False)
    first = step(start(), state, ROWS)[:2]
    second = step(*first, ROWS)[:2]
    walked.clear()
    again = step(*first, ROWS)[:2]
    assert "require_carry" in walked
    jax.tree.map(np.testing.assert_array_equal, again, second)
    walked.clear()
    other, _ = prepared(devices)
    other(*again, ROWS)
    assert walked == EVERY


@pytest.mark.parametrize("donate", [True, False])
@DEVICES
def test_results_that_another_call_was_given(devices: int, donate: bool) -> None:
    """They are known by their identity, but are gone."""
    step, state = prepared(devices, donate)
    other, _ = prepared(devices)
    carry = step(start(), state, ROWS)[:2]
    other(*carry, ROWS)
    with pytest.raises(ValueError, match=r"params\['b'\] was donated to an earlier step: use the"):
        step(*carry, ROWS)


def test_known_arrays_are_not_kept_alive() -> None:
    step, state = prepared(8, donate=False)
    params, state, _ = step(start(), state, ROWS)
    held = len(jax.live_arrays())
    leaves = len(jax.tree.leaves((params, state)))
    del params, state
    assert len(jax.live_arrays()) == held - leaves


@pytest.mark.parametrize("known", [False, True])
@DEVICES
def test_a_batch_that_is_the_parameters(devices: int, known: bool) -> None:
    """What shares their buffers is not donated, also if the parameters are known."""
    mesh, tx = mesh_of(devices), optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    step = jaxcomm.make_step(lambda p, x: jnp.mean((p - 2 * x[:1]) ** 2), tx, mesh)
    params = jnp.arange(24.0).reshape(8, 3)
    state = jaxcomm.init(tx, params, mesh)
    for _ in range(1 + known):
        batch, w = params, np.array(params)
        params, state, _ = step(params, state, batch)
        firsts = w.reshape(devices, -1, 3)[:, :1]
        expected = w - np.mean(2 * (w[None] - 2 * firsts), axis=0) / w.size
        np.testing.assert_allclose(params, expected, rtol=1e-6)
