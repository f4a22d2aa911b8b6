"""Under `optax.inject_hyperparams` every option works, or the error says how to keep it static."""

import ast
import inspect
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import aggregation
from jaxcomm.catalogue import METHODS
from tests.cases.page import names

SIZE = 10**4  # Coordinates for the letters of the calls.
CALLS = [
    *(method.call for method in METHODS.values() if method.kind in ("mean", "wrapper")),
    "jaxcomm.top_k_sgd(k=k)",
    "jaxcomm.merged_mean(exponential_dither())",
    "jaxcomm.recursive_doubling_mean(lambda added: nonzero(density=1.0, granularity='element'))",
    "jaxcomm.adaptive_budgets("
    "lambda levels: dither(levels=levels), 7, [{}, {0: 1}], target_seconds=0.5)",
]
WITHOUT_NUMBERS = {"per_worker", "shard_local", "sliced"}  # Or a codec, which the catalogue calls.
NEEDED = {"adaptive_budgets": {"seconds_per_byte": 1e-4}}  # in `update`
CHOSEN = {"memory_rank": 2}  # Of optional numbers, those that another one bounds.


def _constructors() -> set[str]:
    public = {*jaxcomm.__all__, *aggregation.__all__}
    functions = {name: found for name in public if inspect.isfunction(found := _named(name))}
    return {
        name
        for name, function in functions.items()
        if "GradientTransformation" in str(inspect.signature(function).return_annotation)
    }


def _named(name: str) -> Any:
    return getattr(jaxcomm, name, None) or getattr(aggregation, name)


def _first_calls() -> dict[str, ast.Call]:
    """Of each constructor, the first call in the catalogue, without what is around it."""
    found: dict[str, ast.Call] = {}
    for text in CALLS:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.setdefault(node.func.attr, node)
    return {name: node for name, node in found.items() if name in _constructors()}


def _arguments(node: ast.Call) -> dict[str, Any]:
    def value(part: ast.expr) -> Any:
        return eval(ast.unparse(part), names(SIZE))

    signature = inspect.signature(value(node.func))
    words = {word.arg: value(word.value) for word in node.keywords if word.arg}
    return signature.bind(*map(value, node.args), **words).arguments


def _number(parameter: inspect.Parameter) -> int | float | None:
    """The default of an option, or a number of the kind that it may be."""
    if injected(parameter.default):
        return parameter.default
    hint = parameter.annotation
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    plain = [typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind for kind in kinds]
    chosen = CHOSEN.get(parameter.name, 8 if int in plain else 0.5)
    return chosen if {int, float} & {*plain} else None


def injected(value: Any) -> bool:
    """Whether optax makes an array of it."""
    return not isinstance(value, bool) and isinstance(value, int | float)


def _options(name: str, node: ast.Call) -> dict[str, Any]:
    given = _arguments(node)
    numbers = {
        option: number
        for option, parameter in inspect.signature(_named(name)).parameters.items()
        if (number := _number(parameter)) is not None
    }
    return {**numbers, **given}


CALLED = _first_calls()
OPTIONS = [
    (name, option)
    for name, node in CALLED.items()
    for option, value in _options(name, node).items()
    if injected(value)
]


def test_every_constructor_has_a_row() -> None:
    assert {*CALLED} | WITHOUT_NUMBERS == _constructors()


def _run(name: str, option: str) -> None:
    """Traces `init` and an update, with all others static and as in the call."""
    options = _options(name, CALLED[name])
    given = {**_arguments(CALLED[name]), option: options[option]}
    given.pop({"k": "ratio", "ratio": "k"}.get(option, ""), None)  # A call has one of them.
    static = [other for other in inspect.signature(_named(name)).parameters if other != option]
    tx = optax.inject_hyperparams(_named(name), static_args=static)(**given)
    extra = {key: jnp.float32(value) for key, value in NEEDED.get(name, {}).items()}
    update = jax.vmap(lambda g: tx.update(g, tx.init(g), g, **extra)[0], axis_name="data")
    jax.eval_shape(update, {"w": jnp.ones((3, 4, 3)), "b": jnp.ones((3, 3, 1))})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_options_work_or_explain_how(name: str, option: str) -> None:
    try:
        _run(name, option)
    except ValueError as error:
        assert f"`{option}` must" in str(error) and f"static_args=('{option}',)" in str(error)


def test_the_decay_of_a_residual_may_be_scheduled() -> None:
    schedule = optax.linear_schedule(1.0, 0.5, 1)
    tx = optax.inject_hyperparams(jaxcomm.ef_sign_sgd)(decay=schedule)

    def three_steps(g: jax.Array) -> jax.Array:
        state, updates = tx.init(g), []
        for _ in range(3):
            update, state = tx.update(g, state, g)
            updates.append(update)
        return jnp.stack(updates)

    residual, given = np.zeros(2), np.array([3.0, -1.0])
    for decay, update in zip([1, 0.5, 0.5], np.asarray(run(three_steps, given)), strict=True):
        aim = given + decay * residual
        sent = np.abs(aim).mean() * np.sign(aim)
        residual = aim - sent
        np.testing.assert_allclose(update, sent, rtol=1e-5)


def run(fn: Any, given: np.ndarray) -> jax.Array:
    """The batch of one worker."""
    return jax.jit(jax.vmap(fn, axis_name="data"))(jnp.asarray(given[None], jnp.float32))[0]
