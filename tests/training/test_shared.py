"""What all workers share: `step(..., shared=)`, equal to one device, which has it in its loss."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import scheduling, synchronization
from jaxcomm._mesh import place
from jaxcomm.aggregation import weight_gather
from jaxcomm.training import (
    _make_step,
    describe_nonfinite,
    fully_sharded_value_and_grad,
    make_overlapped_step,
)
from tests.laws.test_wire import COLLECTIVE
from tests.slow import slow

ROWS, SIDE, CLASSES, RATE = 32, 8, 16, 0.5
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


def mesh_of(kind: AxisType, *sizes: int) -> Any:
    names = ("data", "inner")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=devices)


WHERE: dict[str, Callable[[], Any]] = {
    "auto": lambda: mesh_of(AxisType.Auto, 8),
    "simulated": lambda: 8,
    "explicit": lambda: mesh_of(AxisType.Explicit, 8),
    "inner devices": lambda: mesh_of(AxisType.Auto, 4, 2),
    "explicit inner devices": lambda: mesh_of(AxisType.Explicit, 4, 2),
    "simulated inner devices": lambda: {"data": 4, "inner": 2},
    "one device": lambda: mesh_of(AxisType.Auto, 1),
}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def start() -> Any:
    return {"w": jnp.asarray(normal(0, SIDE, CLASSES))}


def batch() -> Any:
    return {"x": normal(1, ROWS, SIDE), "labels": np.arange(ROWS, dtype=np.int32) * 5 % CLASSES}


def rows_of_each() -> list[Any]:
    return [{name: np.split(x, 8)[i] for name, x in batch().items()} for i in range(8)]


def shared(coefficient: float = 0.5) -> Any:
    return {
        "weights": np.linspace(0.1, 5, CLASSES, dtype=np.float32),
        "teacher": {"w": jnp.asarray(normal(2, SIDE, CLASSES))},
        "coefficient": coefficient,
    }


def loss(params: Any, batch: Any, *, shared: Any) -> jax.Array:
    """Weights of classes, as many as half of the rows; a teacher; and a number of this step."""
    logits, taught = batch["x"] @ params["w"], batch["x"] @ shared["teacher"]["w"]
    errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    distance = jnp.mean((logits - taught) ** 2)
    return jnp.mean(shared["weights"][batch["labels"]] * errors) + shared["coefficient"] * distance


def make(workers: Any, tx: Any, loss_fn: Any = loss, **options: Any) -> Any:
    build: Any = jaxcomm.simulate if isinstance(workers, int | dict) else jaxcomm.make_step
    return build(loss_fn, tx, workers, **options)


def descended(params: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient)


def by_plain_jax(values: list[Any]) -> Any:
    """The oracle: one device, with the whole batch."""
    params, losses = start(), []
    for value in values:
        found, gradient = jax.value_and_grad(loss)(params, batch(), shared=value)
        params = descended(params, gradient)
        losses.append(found)
    return params, losses


@pytest.mark.parametrize("where", [*[*WHERE][:3], *map(slow, [*WHERE][3:])])
def test_equals_one_device_and_compiles_once(where: str) -> None:
    traced, workers = [], WHERE[where]()

    def counted(*args: Any, **kwargs: Any) -> jax.Array:
        traced.append(1)
        return loss(*args, **kwargs)

    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    step = make(workers, tx, counted)
    params, state, losses, counts = start(), jaxcomm.init(tx, start(), workers), [], []
    values = [shared(coefficient) for coefficient in (0.5, 0.25, 0.0)]
    for value in values:
        params, state, metrics = step(params, state, batch(), shared=value)
        losses.append(metrics["loss"])
        counts.append(len(traced))
    assert counts[0] == counts[1] == counts[2]
    expected, those = by_plain_jax(values)
    close(losses, those)
    close(params["w"], expected["w"])
    close(values[0]["teacher"]["w"], normal(2, SIDE, CLASSES))  # It was not donated.


@pytest.mark.parametrize("where", ["auto", "simulated", *map(slow, ["explicit", "one device"])])
def test_a_target_network_that_is_the_parameters(where: str) -> None:
    """It shares buffers with what the first step donates, and stays."""
    tx, workers, target = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), WHERE[where](), start()
    step, expected = make(workers, tx), start()
    params, state = target, jaxcomm.init(tx, target, workers)
    for _ in range(2):
        params, state, _ = step(params, state, batch(), shared={**shared(), "teacher": target})
        gradient = jax.grad(loss)(expected, batch(), shared={**shared(), "teacher": start()})
        expected = descended(expected, gradient)
    close(params["w"], expected["w"])
    close(target["w"], start()["w"])


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit", "inner devices"])])
def test_beside_a_key_and_a_model_state(where: str) -> None:
    def noisy(params: Any, state: Any, batch: Any, key: Any, *, shared: Any) -> Any:
        noise = jax.random.normal(key, batch["x"].shape)
        value = loss(params, {**batch, "x": batch["x"] + noise}, shared=shared)
        return value, state + jnp.mean(batch["x"] @ shared["teacher"]["w"], axis=0)

    tx, workers, key = (
        optax.chain(jaxcomm.mean(), optax.sgd(RATE)),
        WHERE[where](),
        jax.random.key(3),
    )
    step, state = make(workers, tx, noisy, has_model_state=True), jnp.zeros(CLASSES)
    params, state, _, metrics = step(
        start(), state, jaxcomm.init(tx, start(), workers), batch(), key=key, shared=shared()
    )

    def together(params: Any) -> Any:
        found = [
            noisy(params, jnp.zeros(CLASSES), rows, jax.random.fold_in(key, i), shared=shared())
            for i, rows in enumerate(rows_of_each())
        ]
        return jax.tree.map(lambda *xs: sum(xs) / 8, *found)

    (value, expected), gradient = jax.value_and_grad(together, has_aux=True)(start())
    close(metrics["loss"], value)
    close(params["w"], descended(start(), gradient)["w"])
    close(state, expected)


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "inner devices"])])
def test_in_windows_of_mini_batches(where: str) -> None:
    """What `gradients=` receives has it already: each finished mini-batch weighs the same."""
    workers = WHERE["simulated" if where == "simulated" else "auto"]()
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    step = make(workers, tx, gradients=synchronization.window_gradients)
    finished = np.arange(8, dtype=np.int32) % 4
    windows = jax.tree.map(lambda x: x.reshape(32, 1, *x.shape[1:]), batch())
    params, _, metrics = step(
        start(), jaxcomm.init(tx, start(), workers), (windows, finished), shared=shared()
    )
    chosen = [4 * i + j for i in range(8) for j in range(finished[i])]
    rows = jax.tree.map(lambda x: x[np.array(chosen)], batch())
    value, gradient = jax.value_and_grad(loss)(start(), rows, shared=shared())
    close(metrics["loss"], value)
    close(params["w"], descended(start(), gradient)["w"])


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit", "inner devices"])])
def test_in_the_backward_pass(where: str) -> None:
    workers = WHERE[where]()
    tx = optax.chain(scheduling.wait_free(jaxcomm.mean()), optax.sgd(RATE))
    step = make(workers, tx)
    params, _, metrics = step(start(), jaxcomm.init(tx, start(), workers), batch(), shared=shared())
    expected, (value,) = by_plain_jax([shared()])
    close(metrics["loss"], value)
    close(params["w"], expected["w"])


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit"])])
def test_along_directions(where: str) -> None:
    """The slope along a direction u is that of plain JAX: the update is a multiple of u."""
    quadratic = lambda p, b, *, shared: jnp.mean(  # noqa: E731
        (b["x"] @ (p["w"] - shared["teacher"]["w"])) ** 2
    )
    workers = WHERE[where]()
    direction = jaxcomm.zeroth_order(distribution="rademacher", smoothing=0.5)
    tx = optax.chain(direction, optax.sgd(RATE))
    step = make(workers, tx, quadratic)
    params, _, _ = step(start(), jaxcomm.init(tx, start(), workers), batch(), shared=shared())
    moved = np.asarray(params["w"] - start()["w"])
    signs = np.sign(moved)
    slope = np.sum(jax.grad(quadratic)(start(), batch(), shared=shared())["w"] * signs)
    assert abs(slope) > 0.1
    np.testing.assert_allclose(moved, -RATE * slope * signs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit"])])
def test_with_local_steps(where: str) -> None:
    workers, values = WHERE[where](), [shared(0.5), shared(0.25)]
    tx = synchronization.diloco(optax.sgd(RATE), optax.sgd(1.0), 2)
    params = jaxcomm.replicate(start(), workers)
    step, state = make(workers, tx, metrics="own"), jaxcomm.init(tx, params, workers)
    each = [start()] * 8
    for value in values:
        params, state, _ = step(params, state, batch(), shared=value)
        gradients = map(functools.partial(jax.grad(loss), shared=value), each, rows_of_each())
        each = [*map(descended, each, gradients)]
    expected = np.mean([own["w"] for own in each], axis=0)
    close(params.per_worker["data"]["w"], np.broadcast_to(expected, (8, *expected.shape)))


def test_with_overlapped_exchanges() -> None:
    mesh, exchange = WHERE["auto"](), optax.sgd(1.0)
    tx = synchronization.streaming_diloco(optax.sgd(RATE), exchange, 4, fragments=1, overlap=1)
    params = jaxcomm.replicate(start(), mesh)
    step = make_overlapped_step(loss, tx, mesh)
    params, _, metrics = step(params, jaxcomm.init(tx, params, mesh), batch(), shared=shared())
    found = [jax.value_and_grad(loss)(start(), rows, shared=shared()) for rows in rows_of_each()]
    close(metrics["loss"], [value for value, _ in found])
    close(
        params.per_worker["data"]["w"],
        np.stack([descended(start(), gradient)["w"] for _, gradient in found]),
    )


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("where", ["auto", slow("explicit"), slow("one device")])
def test_fully_sharded(where: str, gather: bool) -> None:
    mesh, specs = WHERE[where](), {"w": P("data")}

    def by_slices(slices: Any, batch: Any, key: Any, *, shared: Any) -> jax.Array:
        return loss(weight_gather(specs)(slices, key), batch, shared=shared)

    run = fully_sharded_value_and_grad(loss if gather else by_slices, mesh, specs, gather=gather)
    params = jax.device_put(start(), NamedSharding(mesh, P("data")))
    value, gradient = jax.jit(run)(params, batch(), shared=shared())
    expected, those = jax.value_and_grad(loss)(start(), batch(), shared=shared())
    close(value, expected)
    close(gradient["w"], those["w"])


@pytest.mark.parametrize("where", ["simulated", slow("auto")])
def test_its_nan_is_described(where: str) -> None:
    given = shared()
    given["weights"][5] = np.nan  # Labels of rows 1 and 17.
    found = describe_nonfinite(loss, start(), batch(), WHERE[where](), shared=given)
    assert found == "workers 0, 4 of 8: NaN in the loss and NaN in the gradient of `w`"
    assert describe_nonfinite(loss, start(), batch(), WHERE[where](), shared=shared()) is None


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit", "inner devices"])])
def test_nothing_is_sent_for_it(where: str) -> None:
    tx, workers = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), WHERE[where]()
    args = (start(), jaxcomm.init(tx, start(), workers), batch())
    sent = jaxcomm.wire.account(make(workers, tx), *args, shared=shared())
    closed = make(workers, tx, functools.partial(loss, shared=jax.tree.map(jnp.asarray, shared())))
    assert sent.bytes_by_axis == jaxcomm.wire.account(closed, *args).bytes_by_axis
    assert sent.bytes_by_axis["data"] > 0


def gathers(fn: Any, *args: Any, **kwargs: Any) -> bool:
    text = jax.jit(fn).lower(*args, **kwargs).compile().as_text() or ""
    return any("all-gather" in line for line in text.splitlines() if COLLECTIVE.search(line))


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_a_teacher_that_is_sharded_as_the_parameters_is_not_gathered(
    kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2)
    sharding = NamedSharding(mesh, P(None, "model"))
    params = jax.device_put(start(), sharding)
    teacher = jax.device_put({"w": normal(2, SIDE, CLASSES)}, sharding)
    pull = lambda p, x, *, shared: jnp.mean(  # noqa: E731
        jnp.sum((p["w"] - shared["w"]) ** 2) * jnp.mean(x**2)
    )
    tx = optax.chain(jaxcomm.shard_local(jaxcomm.mean(), {"w": sharding.spec}), optax.sgd(RATE))
    state = jaxcomm.init(tx, params, mesh, shard_axes="model")
    step = jaxcomm.make_step(pull, tx, mesh, shard_axes="model", donate=False)
    placed: list[Any] = []

    def recorded(*args: Any) -> Any:
        placed.append(place(*args))
        return placed[-1]

    monkeypatch.setattr(_make_step, "place", recorded)
    x = batch()["x"]
    found, _, _ = step(params, state, x, shared=teacher)
    gradient = jax.grad(pull)(start(), x, shared={"w": normal(2, SIDE, CLASSES)})
    close(found["w"], descended(start(), gradient)["w"])
    assert found["w"].sharding.is_equivalent_to(sharding, 2)
    assert any(teacher["w"] is x for x in jax.tree.leaves(placed))  # As it was, on its devices.
    assert not gathers(step, params, state, x, shared=teacher)


@pytest.mark.parametrize("where", ["auto", "simulated", slow("explicit")])
def test_traced_steps(where: str) -> None:
    """The coefficient of each step is scanned, and the rest is a constant of the loop."""
    tx, workers = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), WHERE[where]()
    step, given = make(workers, tx), jax.tree.map(jnp.asarray, shared())

    def body(carry: Any, coefficient: jax.Array) -> Any:
        *carry, metrics = step(*carry, batch(), shared={**given, "coefficient": coefficient})
        return tuple(carry), metrics["loss"]

    carry = (start(), jaxcomm.init(tx, start(), workers))
    (params, _), losses = jax.jit(functools.partial(jax.lax.scan, body))(
        carry, jnp.array([0.5, 0.25])
    )
    expected, those = by_plain_jax([shared(0.5), shared(0.25)])
    close(losses, those)
    close(params["w"], expected["w"])


SECOND = r"different numbers of rows.*`step\(\.\.\., shared=\)`"
MISTAKES: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "in the batch": (loss, {}, {**batch(), "weights": shared()["weights"]}, SECOND),
    "a scalar in the batch": (
        loss,
        {},
        {"rate": 0.5, **batch()},
        SECOND,
    ),
}


@pytest.mark.parametrize("where", ["auto", "simulated"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, where: str) -> None:
    loss_fn, options, given, message = MISTAKES[name]
    tx, workers = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), WHERE[where]()
    step = make(workers, tx, loss_fn, donate=False)
    with pytest.raises(ValueError, match=message):
        step(start(), jaxcomm.init(tx, start(), workers), given, **options)


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit"])])
def test_rows_of_several_kinds(where: str) -> None:
    """A graph per worker: edges name nodes of the same graph, and are more of them."""
    tx, workers = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), WHERE[where]()
    graphs = {"nodes": normal(3, 16, SIDE), "edges": np.arange(24, dtype=np.int32) * 7 % 2}

    def of_edges(params: Any, graph: Any) -> jax.Array:
        return jnp.mean(jnp.sin(graph["nodes"] @ params["w"])[graph["edges"]])

    state = jaxcomm.init(tx, start(), workers)
    with pytest.raises(ValueError, match="`rows_differ=True`"):
        make(workers, tx, of_edges, donate=False)(start(), state, graphs)
    step = make(workers, tx, of_edges, rows_differ=True)
    params, _, metrics = step(start(), state, graphs)
    parts = [{name: np.split(x, 8)[i] for name, x in graphs.items()} for i in range(8)]
    whole = lambda p: sum(of_edges(p, part) for part in parts) / 8  # noqa: E731
    value, gradient = jax.value_and_grad(whole)(start())
    close(metrics["loss"], value)
    close(params["w"], descended(start(), gradient)["w"])


def of_rows(params: Any, batch: Any) -> jax.Array:
    logits = batch["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def weighted(loss_fn: Any, params: Any, batch: Any) -> Any:
    """As `gradients=`: the mean over real rows, and their number as the weight."""
    del loss_fn
    mean = lambda p: (  # noqa: E731
        jnp.sum(batch["weight"] * of_rows(p, batch)) / jnp.maximum(jnp.sum(batch["weight"]), 1)
    )
    value, gradient = jaxcomm.local_value_and_grad(mean)(params)
    return value, gradient, jnp.sum(batch["weight"])


def averaged(params: Any, batch: Any) -> jax.Array:
    """As a loss: the mean over the real rows of all workers."""
    total, count = jnp.sum(batch["weight"] * of_rows(params, batch)), jnp.sum(batch["weight"])
    return jax.lax.psum(total, "data") / jax.lax.psum(count, "data")


@pytest.mark.parametrize("form", ["weights", slow("loss")])
@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit"])])
def test_a_ragged_batch(where: str, form: str) -> None:
    """It is padded. The last worker has added rows only."""
    ragged = {name: x[:27] for name, x in batch().items()}
    tx, workers = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), WHERE[where]()
    options: Any = {"gradients": weighted} if form == "weights" else {}
    step = make(workers, tx, averaged, donate=False, **options)
    state = jaxcomm.init(tx, start(), workers)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 5)] + [(0, 0)] * (x.ndim - 1)), ragged)
    padded["weight"] = (np.arange(32) < 27).astype(np.float32)
    params, _, metrics = step(start(), state, padded)
    value, gradient = jax.value_and_grad(lambda p: jnp.mean(of_rows(p, ragged)))(start())
    close(metrics["loss"], value)
    close(params["w"], descended(start(), gradient)["w"])
