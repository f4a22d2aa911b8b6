"""What all workers share: `step(..., shared=)`, and batches whose rows are not as many everywhere.

`test_any_loss` has losses with `shared=` in every step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import synchronization
from jaxcomm._mesh import place
from jaxcomm.aggregation import weight_gather
from jaxcomm.training import _make_step, fully_sharded_value_and_grad
from tests.slow import slow
from tests.training.places import SGD, at, begun, mesh_of, normal

ROWS, SIDE, CLASSES, RATE = 32, 8, 16, 0.1
SHARED = {"teacher": {"w": normal(2, SIDE, CLASSES)}, "coefficient": 0.5}
PARAMS = {"w": jnp.asarray(normal(0, SIDE, CLASSES))}
BATCH = {"x": normal(1, ROWS, SIDE), "labels": np.arange(ROWS, dtype=np.int32) * 5 % CLASSES}
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
PLACES = ["auto", "simulated", slow("explicit")]


def of_rows(params: Any, batch: Any) -> jax.Array:
    logits = batch["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def loss(params: Any, batch: Any, *, shared: Any) -> jax.Array:
    """With a teacher, and a number of this step."""
    distance = jnp.mean((batch["x"] @ (params["w"] - shared["teacher"]["w"])) ** 2)
    return jnp.mean(of_rows(params, batch)) + shared["coefficient"] * distance


def of_step(number: int) -> Any:
    return SHARED | {"coefficient": 0.5 / (1 + number)}


def require_one_device(params: Any, losses: Any, steps: int = 2, whole: Any = loss) -> None:
    """The oracle: plain JAX with the whole batch."""
    expected, those = PARAMS["w"], []
    for number in range(steps):
        value, gradient = jax.value_and_grad(whole)({"w": expected}, BATCH, shared=of_step(number))
        expected -= RATE * gradient["w"]
        those.append(value)
    close(losses, those)
    close(params["w"], expected)


@pytest.mark.parametrize("where", PLACES)
def test_changing_values_compile_once(where: str) -> None:
    traced: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> jax.Array:
        traced.append(1)
        return loss(*args, **kwargs)

    step, state = begun(counted, SGD, at(where), PARAMS, donate=True)
    params, losses, counts = jax.tree.map(jnp.copy, PARAMS), [], []
    target = jax.device_put(SHARED["teacher"])
    for number in range(2):
        shared = of_step(number) | {"teacher": target}
        params, state, metrics = step(params, state, BATCH, shared=shared)
        losses.append(metrics["loss"])
        counts.append(len(traced))
    assert counts[0] == counts[1]
    require_one_device(params, losses)
    close(target["w"], SHARED["teacher"]["w"])  # It was not donated.


@pytest.mark.parametrize("where", PLACES)
def test_a_target_network_that_is_the_parameters(where: str) -> None:
    """It shares buffers with what the first step donates, and stays."""
    step, state = begun(loss, SGD, at(where), PARAMS, donate=True)
    params = target = jax.tree.map(jnp.copy, PARAMS)
    losses = []
    for number in range(2):
        given = of_step(number) | {"teacher": target}
        params, state, metrics = step(params, state, BATCH, shared=given)
        losses.append(metrics["loss"])
    to_start = lambda p, b, shared: loss(p, b, shared=shared | {"teacher": PARAMS})  # noqa: E731
    require_one_device(params, losses, whole=to_start)
    close(target["w"], PARAMS["w"])


@pytest.mark.parametrize("where", ["auto", slow("simulated")])
def test_in_windows_of_mini_batches(where: str) -> None:
    """What `gradients=` receives has it already: each finished mini-batch weighs the same."""
    gradients = synchronization.window_gradients
    step, state = begun(loss, SGD, at(where), PARAMS, gradients=gradients)
    finished = np.arange(8, dtype=np.int32) % 4
    windows = jax.tree.map(lambda x: x.reshape(32, 1, *x.shape[1:]), BATCH)
    params, _, metrics = step(PARAMS, state, (windows, finished), shared=SHARED)
    chosen = np.array([4 * i + j for i in range(8) for j in range(finished[i])])
    of_chosen = lambda p, b, shared: loss(  # noqa: E731
        p, jax.tree.map(lambda x: x[chosen], b), shared=shared
    )
    require_one_device(params, [metrics["loss"]], 1, of_chosen)


@pytest.mark.parametrize("where", PLACES)
def test_traced_steps_send_nothing_for_it(where: str) -> None:
    """The coefficient of each step is scanned, and the rest is a constant of the loop."""
    step, state = begun(loss, SGD, at(where), PARAMS)

    def body(carry: Any, coefficient: jax.Array) -> Any:
        *carry, metrics = step(*carry, BATCH, shared=SHARED | {"coefficient": coefficient})
        return tuple(carry), metrics["loss"]

    run = jax.jit(functools.partial(jax.lax.scan, body))
    (params, _), losses = run((PARAMS, state), jnp.array([0.5, 0.25]))
    require_one_device(params, losses)
    sent = jaxcomm.wire.account(step, PARAMS, state, BATCH, shared=SHARED).bytes_per_worker
    assert sent == 2 * 7 / 8 * 4 * (SIDE * CLASSES + 1)


@pytest.mark.parametrize("where", ["auto", slow("explicit")])
def test_fully_sharded_with_a_loss_that_gathers(where: str) -> None:
    mesh, specs = at(where), {"w": P("data")}

    def by_slices(slices: Any, batch: Any, key: Any, *, shared: Any) -> jax.Array:
        return loss(weight_gather(specs)(slices, key), batch, shared=shared)

    run = fully_sharded_value_and_grad(by_slices, mesh, specs, gather=False)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P("data")))
    value, gradient = jax.jit(run)(params, BATCH, shared=SHARED)
    require_one_device({"w": PARAMS["w"] - RATE * gradient["w"]}, [value], 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_a_sharded_teacher_is_not_gathered(kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of(kind, 2, 4, names=("data", "model"))
    sharding = NamedSharding(mesh, P(None, "model"))
    params, teacher = jax.device_put((PARAMS, SHARED["teacher"]), sharding)
    pull = lambda p, x, *, shared: jnp.mean(  # noqa: E731
        jnp.sum((p["w"] - shared["w"]) ** 2) * jnp.mean(x**2)
    )
    tx = optax.chain(jaxcomm.shard_local(jaxcomm.mean(), {"w": sharding.spec}), optax.sgd(RATE))
    step, state = begun(pull, tx, mesh, params, shard_axes="model")
    placed: list[Any] = []

    def recorded(*args: Any) -> Any:
        placed.append(place(*args))
        return placed[-1]

    monkeypatch.setattr(_make_step, "place", recorded)
    args = (params, state, BATCH["x"])
    found, _, _ = step(*args, shared=teacher)
    gradient = jax.grad(pull)(PARAMS, BATCH["x"], shared=SHARED["teacher"])
    close(found["w"], PARAMS["w"] - RATE * gradient["w"])
    assert found["w"].sharding.is_equivalent_to(sharding, 2)
    assert any(teacher["w"] is x for x in jax.tree.leaves(placed))  # As it was, on its devices.
    compiled = jaxcomm.wire.account(jax.jit(step).lower(*args, shared=teacher))
    assert {c.kind for c in compiled.collectives} == {"all_reduce"}


@pytest.mark.parametrize("where", PLACES)
def test_rows_of_several_kinds(where: str) -> None:
    """A graph per worker: edges name nodes of the same graph, and are more of them."""
    graphs = {"nodes": normal(3, 16, SIDE), "edges": np.arange(24, dtype=np.int32) * 7 % 2}

    def of_edges(params: Any, graph: Any) -> jax.Array:
        return jnp.mean(jnp.sin(graph["nodes"] @ params["w"])[graph["edges"]])

    step, state = begun(of_edges, SGD, at(where), PARAMS)
    with pytest.raises(
        ValueError, match=r"different numbers of rows.*shared=\).*`rows_differ=True`"
    ):
        step(PARAMS, state, graphs)
    step, _ = begun(of_edges, SGD, at(where), PARAMS, rows_differ=True)
    params, _, metrics = step(PARAMS, state, graphs)
    parts = [{name: np.split(x, 8)[i] for name, x in graphs.items()} for i in range(8)]
    mean = lambda p, b, shared: sum(of_edges(p, part) for part in parts) / 8  # noqa: E731
    require_one_device(params, [metrics["loss"]], 1, mean)
