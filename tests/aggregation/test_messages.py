"""Mistakes with aggregators are one line: the argument, the rule, the value and the remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm
from jaxcomm import global_qsgd
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import simulated
from tests.workers import mesh_of

FEEDBACK = error_feedback(top_k(ratio=0.1))
PARAMS = {"w": jnp.ones((4, 2))}
ADAM = optax.adam(1e-3).init(PARAMS)[0]


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def step(tx: Any) -> Callable[[], Any]:
    """One step with eight workers."""

    def take() -> Any:
        state = jaxcomm.init(tx, PARAMS, mesh_of(8))
        taken = jaxcomm.make_step(loss, tx, mesh_of(8), donate=False)
        return jax.eval_shape(taken, PARAMS, state, jnp.ones((8, 4)))

    return take


def given(tx: Any, state: Any, updates: Any = PARAMS) -> Callable[[], Any]:
    """One update from that state, simulated."""
    of_two = jax.tree.map(lambda x: jnp.stack([x, x]), updates)
    update = jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")
    return lambda: jax.eval_shape(update, of_two)


def given_memory_of(tx: Any, params: Any) -> Callable[[], Any]:
    """One update of other parameters, with memory that workers have of these."""

    def update(updates: Any) -> Any:
        return tx.update(updates, tx.init(params))[0]

    of_two = {"w": jnp.ones((2, 6))}
    return lambda: jax.eval_shape(jax.vmap(update, axis_name="data"), of_two)


def another(tx: Any, holder: str) -> tuple[Callable[[], Any], str]:
    """Of the state of Adam."""
    return given(tx, ADAM), f"another transformation: .*{holder}.* got `ScaleByAdamState`"


MISTAKES: dict[str, Any] = {
    "a codec uncalled": (
        lambda: jaxcomm.two_stage_mean(top_k),
        r"`codec` must be a codec, .* got the function `top_k`: call it",
    ),
    "an axis twice": (
        lambda: jaxcomm.mean(("data", "data")),
        r"a tuple of several distinct axes, got \('data', 'data'\)",
    ),
    "a codec in a chain": (
        step(optax.chain(dither(), optax.sgd(0.1))),
        r"A codec is not an optax .* `optax.chain\(jaxcomm.all_ga",
    ),
    "coded": another(global_qsgd(), "`AggregatorState`"),
    "mean": another(jaxcomm.mean(), "the exact mean expects `EmptyState`"),
    "skip_nonfinite": another(jaxcomm.skip_nonfinite(jaxcomm.mean()), "`skip_nonfinite`"),
    "state of other parameters": (
        given(
            global_qsgd(scope="leaf"),
            global_qsgd(scope="leaf").init({"a": jnp.ones(2), "b": jnp.ones(3)}),
        ),
        "This state has memory of shapes .* it was made for other parameters",
    ),
    "state of other shapes": (
        given_memory_of(jaxcomm.all_gather_mean(FEEDBACK), {"w": jnp.ones((2, 4))}),
        r"has memory of shapes .*\(8,\).*, and these updates need .*\(6,\)",
    ),
    **{
        f"complex, {make.__name__}": (
            given(make(), make().init(PARAMS), {"w": jnp.ones((4, 2), jnp.complex64)}),
            r"\['w'\] is complex64: .*`optax.contrib.split_real_and_imaginary\(tx\)`",
        )
        for make in (jaxcomm.mean, global_qsgd)
    },
    "integers": (
        given(jaxcomm.mean(), optax.EmptyState(), {"w": jnp.ones(3, jnp.int32)}),
        r"\['w'\] is int32: only floating-point .* Mask it with `optax.masked`",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_complex_leaves_are_averaged_as_the_message_says() -> None:
    tx = optax.contrib.split_real_and_imaginary(optax.chain(jaxcomm.mean(), optax.sgd(1.0)))
    with jax.numpy_dtype_promotion("standard"):  # Optax multiplies by 1j.
        update = simulated(tx, jnp.array([[1 + 2j], [3 - 4j]], jnp.complex64))
    assert update.tolist() == [[-2 + 1j]] * 2


def test_an_error_of_code_without_a_module_is_not_hidden() -> None:
    names: dict[str, Any] = {}
    exec("def init(params): raise RuntimeError('its own')", names)
    tx = optax.GradientTransformation(names["init"], lambda updates, state, params=None: updates)
    with pytest.raises(RuntimeError, match="its own"):
        jaxcomm.init(tx, PARAMS, 2)
