"""A loss with collectives of its own has the gradient of the global loss; what it must not do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm
from jaxcomm import scheduling
from tests.slow import slow
from tests.training.losses import draw
from tests.training.places import SGD, at, begun, devices_at
from tests.training.test_any_loss import close, moved, wide

X, PARAMS = draw(16, 3), {"w": draw(3, 4, seed=1), "unused": jnp.ones(2)}
PLACES = ["auto", "simulated", slow("explicit"), slow("auto 4x2"), slow("simulated 4x2")]


def axes_of(where: str) -> tuple[str, ...]:
    return ("data", "inner") if where[-1] == "2" else ("data",)


def rows_of(params: Any, x: jax.Array) -> jax.Array:
    """One value a row, by a loop whose first carry is a constant."""
    body = lambda total, w: (total + jnp.tanh(x @ w), None)  # noqa: E731
    return lax.scan(body, jnp.zeros(len(x)), params["w"].T)[0]


def errors(params: Any, x: jax.Array) -> jax.Array:
    return (rows_of(params, x) - 1) ** 2


def tokens(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the errors of valid rows, and their number."""
    valid = jnp.where(x[:, 0] > 0, jnp.float32(1), jnp.float32(0))
    return jnp.sum(errors(params, x) * valid), jnp.sum(valid)


def per_token(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / count


def embedded(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x @ params["w"], jnp.tanh(x @ params["w"])


def gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    for axis in reversed(axes):  # `jax.vmap` gathers over one axis at a time.
        x = lax.all_gather(x, axis, tiled=True)
    return x


def contrastive(left: jax.Array, right: jax.Array, first: Any) -> jax.Array:
    scores = left @ right.T
    own = first + jnp.arange(len(left))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, own))


def logarithm_of_sum(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    largest = lax.pmax(lax.stop_gradient(jnp.max(y)), axes)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(y - largest)), axes)) + largest


# By name: the loss of a worker, which is called with its axes, and that of all rows.
COMMUNICATING: dict[str, Any] = {
    "count of tokens": (
        lambda p, x, axes: per_token(*lax.psum(tokens(p, x), axes)),
        lambda p, x: per_token(*tokens(p, x)),
    ),
    "own share of the count of tokens": (
        lambda p, x, axes: lax.psum(1, axes) * tokens(p, x)[0] / lax.psum(tokens(p, x)[1], axes),
        lambda p, x: per_token(*tokens(p, x)),
    ),
    "contrastive": (
        lambda p, x, axes: contrastive(
            embedded(p, x)[0],
            gathered(embedded(p, x)[1], axes),
            lax.axis_index(axes) * len(x),
        ),
        lambda p, x: contrastive(*embedded(p, x), 0),
    ),
    "largest value of all": (
        lambda p, x, axes: logarithm_of_sum(rows_of(p, x), axes),
        lambda p, x: jax.nn.logsumexp(rows_of(p, x)),
    ),
}


def check_one_step(loss: Any, whole: Any, where: str, tx: Any = SGD) -> None:
    """The metrics and the parameters of the loss of all rows."""
    expected, gradient = wide(jax.jit(jax.value_and_grad(whole))(PARAMS, X))
    step, state = begun(loss, tx, at(where), PARAMS)
    params, _, metrics = step(PARAMS, state, X)
    close(metrics["loss"], expected)
    close(params, moved(PARAMS, gradient), PARAMS)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "auto") for name in COMMUNICATING),
        *(slow(name, "simulated") for name in COMMUNICATING),
        *(slow("contrastive", where) for where in ("explicit", "auto 4x2", "simulated 4x2")),
    ],
)
def test_its_gradient_is_that_of_the_global_loss(name: str, where: str) -> None:
    local, whole = COMMUNICATING[name]
    aggregator = jaxcomm.mean() if where == "auto" else scheduling.wait_free(jaxcomm.mean())
    tx = optax.chain(aggregator, optax.sgd(0.1))
    check_one_step(lambda p, x: local(p, x, axes_of(where)), whole, where, tx)


# What a function given as `gradients=` must not do: nothing shows whether a mean was meant.
SUMMED: dict[str, Any] = {
    "by pmean": lambda gradient: lax.pmean(gradient, "data"),
    "one leaf": lambda gradient: gradient | {"w": lax.pmean(gradient["w"], "data")},
}


@pytest.mark.parametrize("where", ["auto", "simulated", "explicit"])
@pytest.mark.parametrize("how", SUMMED)
def test_gradients_that_are_summed_already(how: str, where: str) -> None:
    def gradients(loss: Any, params: Any, x: jax.Array) -> Any:
        value, gradient = jaxcomm.local_value_and_grad(loss)(params, x)
        return value, SUMMED[how](gradient)

    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2 * jnp.sum(p["unused"]))  # noqa: E731
    for aggregator in (jaxcomm.mean(), jaxcomm.top_k_sgd(ratio=0.5)):
        tx = optax.chain(aggregator, optax.sgd(0.1))
        step, state = begun(loss, tx, at(where), PARAMS, gradients=gradients)
        with pytest.raises(ValueError, match="summed already"):
            jax.eval_shape(step, PARAMS, state, X)


@pytest.mark.parametrize("where", PLACES)
def test_loop_counters_are_equal_on_all_workers(where: str) -> None:
    """A counter that a loop returns beside the loss is no counter that differs by worker."""

    def call(params: Any, state: Any, x: jax.Array) -> Any:
        count = lax.fori_loop(0, 3, lambda i, count: count + 1, state["count"])
        mean = lax.scan(lambda m, row: (m + row / len(x), None), jnp.zeros(3), x)[0]
        new = {"count": count, "reset": jnp.int32(7), "mean": mean}
        return jnp.mean(errors(params, x)), (new, {"largest": jnp.max(x), "one": jnp.float32(1)})

    state = {"count": jnp.int32(2), "reset": jnp.int32(0), "mean": jnp.zeros(3)}
    step, opt_state = begun(call, SGD, at(where), PARAMS, has_model_state=True, has_aux=True)
    _, new, _, metrics = step(PARAMS, state, opt_state, X)
    assert new["count"] == 5 and new["reset"] == 7 and new["count"].dtype == jnp.int32
    np.testing.assert_allclose(new["mean"], np.mean(X, axis=0), rtol=1e-5, atol=1e-6)
    largest = np.max(np.reshape(X, (devices_at(where), -1)), axis=1)
    np.testing.assert_allclose(metrics["largest"], np.mean(largest), rtol=1e-6)
    assert metrics["one"] == 1


@pytest.mark.parametrize("where", ["auto", "simulated"])
def test_references_hold_per_worker_values(where: str) -> None:
    """Its first value is a constant, and so says nothing about the later ones."""

    def call(params: Any, state: Any, x: jax.Array) -> Any:
        held = jax.new_ref(jnp.zeros_like(state))
        held[...] += 2 * x[0, 0].astype(state.dtype)
        return jnp.mean(errors(params, x)), held[...]

    step, opt_state = begun(call, SGD, at(where), PARAMS, has_model_state=True)
    _, new, _, _ = step(PARAMS, jnp.float32(0), opt_state, X)
    np.testing.assert_allclose(new, 2 * np.mean(X[::2, 0]), rtol=1e-5)
    with pytest.raises(ValueError, match="int32 and differs over"):
        step(PARAMS, jnp.int32(0), opt_state, X)


# Conditions of which the program itself shows that they are equal on all workers.
EQUAL: dict[str, Any] = {
    "of parameters": lambda p, x, axes: jnp.sum(p["unused"]) > 0,
    "of a reduced value": lambda p, x, axes: lax.pmax(jnp.max(x), axes) > 0,
    "of a loop over a reduced value": lambda p, x, axes: (
        lax.while_loop(
            lambda c: c[1] & (c[0] < 3),
            lambda c: (c[0] + 1, lax.psum(jnp.sum(x), axes) < 1e3),
            (jnp.int32(0), True),
        )[0]
        == 3
    ),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "auto") for name in EQUAL),
        *(slow(name, "simulated") for name in EQUAL),
        *(slow("of a reduced value", where) for where in ("explicit", "auto 4x2")),
    ],
)
def test_a_collective_under_a_condition_that_is_equal(name: str, where: str) -> None:
    axes = axes_of(where)

    def local(params: Any, x: jax.Array) -> jax.Array:
        own = jnp.mean(errors(params, x))
        held = EQUAL[name](params, x, axes)
        return lax.cond(held, lambda: lax.pmean(own, axes) + own, lambda: own)

    check_one_step(local, lambda p, x: 2 * jnp.mean(errors(p, x)), where)


def shifted(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])


# By name: a collective that a worker reaches if its own row says so, inside of other operations.
UNREACHED: dict[str, Any] = {
    "a shift": lambda own, x: lax.cond(x[0, 0] > 0, lambda: shifted(own), lambda: own),
    "a shift in a scan": lambda own, x: lax.scan(
        lambda c, row: (lax.cond(row > 0, shifted, lambda c: c, c), None), own, x[:, 0]
    )[0],
    "a shift in a loop under `jax.checkpoint`": lambda own, x: (
        own
        + jax.checkpoint(
            lambda x: lax.while_loop(lambda c: c < 3, lambda c: jnp.abs(shifted(c)) + 1, x[0, 0])
        )(lax.stop_gradient(x))
    ),
}


@pytest.mark.parametrize("where", ["auto", "simulated"])
@pytest.mark.parametrize("name", UNREACHED)
def test_a_collective_that_some_workers_do_not_reach(name: str, where: str) -> None:
    """On a mesh they would wait forever, so the step is only traced."""
    loss = lambda p, x: UNREACHED[name](jnp.mean((x @ p["w"]) ** 2), x)  # noqa: E731
    step, state = begun(loss, SGD, at(where), PARAMS)
    with pytest.raises(ValueError, match="All workers must run the same branch"):
        jax.eval_shape(step, PARAMS, state, X)
