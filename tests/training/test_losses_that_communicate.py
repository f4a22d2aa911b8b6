"""A loss with collectives of its own has the gradient of the global loss; what it must not do."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm
from jaxcomm import scheduling
from tests.training.losses import LOSSES, draw
from tests.training.test_any_loss import RATE, WHERE, build, close, count_of, wide

X, PARAMS = draw(16, 3), {"w": draw(3, 4, seed=1), "unused": jnp.ones(2)}
AXES = {False: ("data",), True: ("data", "inner")}
PLACES = ["auto", "simulated", "explicit", "auto, inner devices", "simulated, inner devices"]
WITHOUT_INNER = PLACES[:3]


def rows_of(params: Any, x: jax.Array) -> jax.Array:
    """One value a row, by a loop whose first carry is a constant."""
    body = lambda total, w: (total + jnp.tanh(x @ w), None)  # noqa: E731
    return lax.scan(body, jnp.zeros(len(x)), params["w"].T)[0]


def errors(params: Any, x: jax.Array) -> jax.Array:
    return (rows_of(params, x) - 1) ** 2


def valid(x: jax.Array) -> jax.Array:
    return jnp.where(x[:, 0] > 0, jnp.float32(1), jnp.float32(0))


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


def moments(y: jax.Array, mean: Callable[[Any], Any]) -> jax.Array:
    center = mean(jnp.mean(y, axis=0, keepdims=True))
    return mean(jnp.mean((y - center) ** 4))


def logarithm_of_sum(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    largest = lax.pmax(lax.stop_gradient(jnp.max(y)), axes)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(y - largest)), axes)) + largest


# By name: the loss of a worker, which is called with its axes, and that of all rows.
COMMUNICATING: dict[str, tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "mean of losses": (
        lambda p, x, axes: lax.pmean(jnp.mean(errors(p, x)), axes),
        lambda p, x: jnp.mean(errors(p, x)),
    ),
    "count of tokens": (
        lambda p, x, axes: (
            lax.psum(jnp.sum(errors(p, x) * valid(x)), axes) / lax.psum(jnp.sum(valid(x)), axes)
        ),
        lambda p, x: jnp.sum(errors(p, x) * valid(x)) / jnp.sum(valid(x)),
    ),
    "own share of the count of tokens": (
        lambda p, x, axes: (
            lax.psum(1, axes) * jnp.sum(errors(p, x) * valid(x)) / lax.psum(jnp.sum(valid(x)), axes)
        ),
        lambda p, x: jnp.sum(errors(p, x) * valid(x)) / jnp.sum(valid(x)),
    ),
    "contrastive": (
        lambda p, x, axes: contrastive(
            embedded(p, x)[0],
            gathered(embedded(p, x)[1], axes),
            lax.axis_index(axes) * len(x),
        ),
        lambda p, x: contrastive(*embedded(p, x), 0),
    ),
    "moments over all rows": (
        lambda p, x, axes: moments(x @ p["w"], lambda y: lax.pmean(y, axes)),
        lambda p, x: moments(x @ p["w"], lambda y: y),
    ),
    "largest value of all": (
        lambda p, x, axes: logarithm_of_sum(rows_of(p, x), axes),
        lambda p, x: jax.nn.logsumexp(rows_of(p, x)),
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", COMMUNICATING)
def test_its_gradient_is_that_of_the_global_loss(name: str, where: str) -> None:
    local, whole = COMMUNICATING[name]
    workers, axes = WHERE[where](), AXES["inner" in where]
    loss = LOSSES["hinge"]()._replace(call=lambda p, x: local(p, x, axes), params=PARAMS)
    expected, gradient = wide(jax.jit(jax.value_and_grad(whole))(PARAMS, X))
    for aggregator in (jaxcomm.mean(), scheduling.wait_free(jaxcomm.mean())):
        tx = optax.chain(aggregator, optax.sgd(RATE))
        step = build(loss, tx, workers)
        params, _, metrics = step(PARAMS, jaxcomm.init(tx, PARAMS, workers), X)
        close(metrics["loss"], expected, jnp.float32(0))
        moved = jax.tree.map(lambda p, g: p - RATE * g, wide(PARAMS), gradient)
        close(params, moved, PARAMS)


@pytest.mark.parametrize("where", WITHOUT_INNER)
@pytest.mark.parametrize("reduce", [lax.pmean, lax.psum])
def test_gradients_that_are_summed_already(reduce: Any, where: str) -> None:
    def gradients(loss: Any, params: Any, x: jax.Array) -> Any:
        value, gradient = jaxcomm.local_value_and_grad(loss)(params, x)
        return value, reduce(gradient, "data")

    workers = WHERE[where]()
    loss = LOSSES["hinge"]()._replace(call=lambda p, x: jnp.mean((x @ p["w"]) ** 2))
    for aggregator in (jaxcomm.mean(), jaxcomm.global_qsgd(), jaxcomm.top_k_sgd(ratio=0.5)):
        tx = optax.chain(aggregator, optax.sgd(RATE))
        step = build(loss, tx, workers, gradients=gradients)
        with pytest.raises(ValueError, match="summed already"):
            step(PARAMS, jaxcomm.init(tx, PARAMS, workers), X)


@pytest.mark.parametrize("where", WITHOUT_INNER)
def test_a_part_that_is_summed_already(where: str) -> None:
    """One leaf, as of a layer whose gradient a custom derivative averages."""

    def gradients(loss: Any, params: Any, x: jax.Array) -> Any:
        value, gradient = jaxcomm.local_value_and_grad(loss)(params, x)
        return value, gradient | {"w": lax.pmean(gradient["w"], "data")}

    workers = WHERE[where]()
    loss = LOSSES["hinge"]()._replace(
        call=lambda p, x: jnp.mean((x @ p["w"]) ** 2 * jnp.sum(p["unused"]))
    )
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    step = build(loss, tx, workers, gradients=gradients)
    with pytest.raises(ValueError, match="summed already"):
        step(PARAMS, jaxcomm.init(tx, PARAMS, workers), X)


@pytest.mark.quick(2)
@pytest.mark.parametrize("where", PLACES)
def test_what_a_loop_counts_is_equal_on_all_workers(where: str) -> None:
    """A counter that a loop returns beside the loss is no counter that differs by worker."""

    def call(params: Any, state: Any, x: jax.Array) -> Any:
        count = lax.fori_loop(0, 3, lambda i, count: count + 1, state["count"])
        mean = lax.scan(lambda m, row: (m + row / len(x), None), jnp.zeros(3), x)[0]
        new = {"count": count, "reset": jnp.int32(7), "mean": mean}
        return jnp.mean(errors(params, x)), (new, {"largest": jnp.max(x), "one": jnp.float32(1)})

    workers = WHERE[where]()
    state = {"count": jnp.int32(2), "reset": jnp.int32(0), "mean": jnp.zeros(3)}
    loss = LOSSES["hinge"]()._replace(call=call, model_state=state)
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    step = build(loss, tx, workers, has_aux=True)
    _, new, _, metrics = step(PARAMS, state, jaxcomm.init(tx, PARAMS, workers), X)
    assert new["count"] == 5 and new["reset"] == 7 and new["count"].dtype == jnp.int32
    np.testing.assert_allclose(new["mean"], np.mean(X, axis=0), rtol=1e-5, atol=1e-6)
    largest = np.max(np.reshape(X, (count_of(workers), -1)), axis=1)
    np.testing.assert_allclose(metrics["largest"], np.mean(largest), rtol=1e-6)
    assert metrics["one"] == 1


@pytest.mark.parametrize("where", ["auto", "simulated"])
def test_what_a_reference_holds_differs(where: str) -> None:
    """Its first value is a constant, and so says nothing about the later ones."""

    def call(params: Any, state: Any, x: jax.Array) -> Any:
        held = jax.new_ref(jnp.zeros_like(state))
        held[...] += 2 * x[0, 0].astype(state.dtype)
        return jnp.mean(errors(params, x)), held[...]

    workers = WHERE[where]()
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    loss = LOSSES["hinge"]()._replace(call=call, model_state=jnp.float32(0))
    step, opt_state = build(loss, tx, workers), jaxcomm.init(tx, PARAMS, workers)
    _, new, _, _ = step(PARAMS, jnp.float32(0), opt_state, X)
    np.testing.assert_allclose(new, 2 * np.mean(X[::2, 0]), rtol=1e-5)
    with pytest.raises(ValueError, match="int32 and differs over"):
        step(PARAMS, jnp.int32(0), opt_state, X)


# Conditions of which the program itself shows that they are equal on all workers.
EQUAL: dict[str, Callable[[Any, Any, Any], Any]] = {
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


@pytest.mark.quick(2)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", EQUAL)
def test_a_collective_under_a_condition_that_is_equal(name: str, where: str) -> None:
    workers, axes = WHERE[where](), AXES["inner" in where]

    def local(params: Any, x: jax.Array) -> jax.Array:
        own = jnp.mean(errors(params, x))
        held = EQUAL[name](params, x, axes)
        return lax.cond(held, lambda: lax.pmean(own, axes) + own, lambda: own)

    expected, gradient = wide(
        jax.jit(jax.value_and_grad(lambda p, x: 2 * jnp.mean(errors(p, x))))(PARAMS, X)
    )
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    step = build(LOSSES["hinge"]()._replace(call=local), tx, workers)
    params, _, metrics = step(PARAMS, jaxcomm.init(tx, PARAMS, workers), X)
    close(metrics["loss"], expected, jnp.float32(0))
    close(params, jax.tree.map(lambda p, g: p - RATE * g, wide(PARAMS), gradient), PARAMS)


def shifted(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])


# By name: a collective that a worker reaches if its own row says so, inside of other operations.
UNREACHED: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda own, x: lax.cond(x[0, 0] > 0, lambda: lax.psum(own, "data"), lambda: own),
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


@pytest.mark.parametrize("name", UNREACHED)
def test_a_collective_that_some_workers_do_not_reach_is_found(name: str) -> None:
    workers = WHERE["auto"]()
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    loss = LOSSES["hinge"]()._replace(
        call=lambda p, x: UNREACHED[name](jnp.mean((x @ p["w"]) ** 2), x)
    )
    step, opt_state = build(loss, tx, workers), jaxcomm.init(tx, PARAMS, workers)
    with pytest.raises(ValueError, match="All workers must run the same branch"):
        jax.eval_shape(step, PARAMS, opt_state, X)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxcomm
from jax import lax

def loss(w, x):
    ours = jnp.mean((x - w) ** 2)
    return lax.cond(x[0] > 3, lambda: ours + lax.psum(ours, "data"), lambda: 2 * ours)

tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
workers = {workers}
step = {make}(loss, tx, workers)
try:
    step(jnp.float32(1), jaxcomm.init(tx, jnp.float32(1), workers), np.arange(8, dtype=np.float32))
except {errors} as error:
    print("refused:", str(error).split(chr(10))[0])
"""
PLACES_OF_PROGRAM = {
    "mesh": ("jax.make_mesh((8,), ('data',))", "jaxcomm.make_step"),
    "simulated": ("8", "jaxcomm.simulate"),
}


@pytest.mark.parametrize("place", PLACES_OF_PROGRAM)
def test_a_collective_that_some_workers_do_not_reach(place: str) -> None:
    """On a mesh they would wait for ever, so this has a process of its own."""
    workers, make = PLACES_OF_PROGRAM[place]
    program = PROGRAM.format(workers=workers, make=make, errors="(ValueError, TypeError)")
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False
    )
    assert "refused:" in done.stdout, done.stdout + done.stderr[-2000:]
