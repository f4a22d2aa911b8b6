"""A loss that runs under `jax.jit(jax.value_and_grad(loss))` runs in every step, unchanged."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import gossip, scheduling, synchronization
from jaxcomm.training import (
    describe_nonfinite,
    fully_sharded_value_and_grad,
    make_overlapped_step,
    slice_specs,
)
from tests.slow import slow
from tests.training.losses import LOSSES, WITH_KEY, WITH_STATE, Loss

DEVICES, RATE, KEY = 8, 0.1, jax.random.key(1)


class Alone(NamedTuple):
    """What one device computes alone from the rows of one worker, in NumPy float64."""

    value: Any
    gradient: Any
    model_state: Any


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def mean_of(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.mean(xs, axis=0), *trees)


@functools.cache
def plain(name: str) -> Callable[..., Any]:
    loss = LOSSES[name]()
    return jax.jit(jax.value_and_grad(loss.call, has_aux=loss.model_state is not None))


def states_of(loss: Loss) -> list[Any]:
    return [] if loss.model_state is None else [loss.model_state]


def alone(
    name: str, devices: int, params: Any = None, model_state: Any = None, key: Any = KEY
) -> list[Alone]:
    """The oracle: plain JAX on one device, once with the rows and the key of each device.

    `params` and `model_state` have a leading axis of devices; the default is what `loss` has.
    """
    loss, found = LOSSES[name](), []
    batch = jax.tree.map(lambda x: jnp.reshape(x, (devices, -1, *x.shape[1:])), loss.batch)
    for index in range(devices):
        own = functools.partial(jax.tree.map, operator.itemgetter(index))
        args = [*states_of(loss), own(batch)]
        if model_state is not None:
            args[0] = own(model_state)
        keys = [jax.random.fold_in(key, index)] if loss.key else []
        result, gradient = plain(name)(loss.params if params is None else own(params), *args, *keys)
        value, state = result if loss.model_state is not None else (result, None)
        found.append(Alone(*wide((value, gradient, state))))
    return found


@functools.cache
def at_first(name: str, devices: int) -> list[Alone]:
    return alone(name, devices)


def together(name: str, devices: int) -> Alone:
    """What all workers compute together: the whole batch on one device, or the mean of each."""
    each = at_first(name, 1 if LOSSES[name]().is_mean else devices)
    return mean_of(each)


def rounding(like: Any) -> float:
    """The relative difference to allow in the coarsest dtype of `like`."""
    dtypes = [jnp.asarray(x).dtype for x in jax.tree.leaves(like)]
    units = [jnp.finfo(x).eps for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    unit = float(max(units, default=0))
    return 2 * unit if unit > 1e-3 else 64 * unit


def close(got: Any, expected: Any, like: Any, scale: float = 0.0) -> None:
    """Equal up to rounding in the coarsest dtype of `like`.

    That is relative to the largest value of the tree, or to `scale` if it is larger. A leaf may
    have a gradient of nothing but rounding, as has a bias of keys in attention.
    """
    scale = max([scale, *(np.abs(x).max(initial=0) for x in jax.tree.leaves(expected))])
    atol = scale * rounding(like)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    jax.tree.map(compare, wide(got), expected)


def size_of(found: list[Alone]) -> float:
    """The largest gradient of a worker: means of large gradients round like these."""
    return max(
        float(np.abs(x).max(initial=0)) for x in jax.tree.leaves([a.gradient for a in found])
    )


def moved(name: str, gradient: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, wide(LOSSES[name]().params), gradient)


def stepped(step: Any, loss: Loss, carry: tuple[Any, ...], key: Any = KEY) -> Any:
    """One step: the next carry (parameters, model state if any, optimizer state), and metrics."""
    *new, metrics = step(*carry, loss.batch, **({"key": key} if loss.key else {}))
    return tuple(new), metrics


def mesh_of(kind: AxisType, *sizes: int) -> Any:
    names = ("data", "inner")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


WHERE: dict[str, Callable[[], Any]] = {
    "auto": lambda: mesh_of(AxisType.Auto, 8),
    "simulated": lambda: 8,
    "explicit": lambda: mesh_of(AxisType.Explicit, 8),
    "auto, inner devices": lambda: mesh_of(AxisType.Auto, 4, 2),
    "explicit, inner devices": lambda: mesh_of(AxisType.Explicit, 2, 4),
    "simulated, inner devices": lambda: {"data": 4, "inner": 2},
    "auto, one device": lambda: mesh_of(AxisType.Auto, 1),
    "explicit, one device": lambda: mesh_of(AxisType.Explicit, 1),
    "simulated, one device": lambda: 1,
}
FIRST_TWO = ["auto", "simulated", *map(slow, list(WHERE)[2:])]


def count_of(workers: Any) -> int:
    if isinstance(workers, int):
        return workers
    return int(np.prod(list(dict(getattr(workers, "shape", workers)).values())))


def build(loss: Loss, tx: Any, workers: Any, **options: Any) -> Any:
    make: Any = jaxcomm.simulate if isinstance(workers, int | dict) else jaxcomm.make_step
    return make(
        loss.call,
        tx,
        workers,
        has_model_state=loss.model_state is not None,
        donate=False,
        **options,
    )


def check_the_mean(name: str, where: str, aggregator: Any) -> None:
    loss, workers = LOSSES[name](), WHERE[where]()
    tx = optax.chain(aggregator, optax.sgd(RATE))
    step = build(loss, tx, workers)
    carry = (loss.params, *states_of(loss), jaxcomm.init(tx, loss.params, workers))
    carry, metrics = stepped(step, loss, carry)
    expected = together(name, count_of(workers))
    size = RATE * size_of(at_first(name, count_of(workers)))
    close(metrics["loss"], expected.value, jnp.float32(0))
    close(carry[0], moved(name, expected.gradient), loss.params, size)
    if loss.model_state is not None:
        close(carry[1], expected.model_state, loss.model_state)


@pytest.mark.parametrize("where", FIRST_TWO)
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_workers_is_one_device(name: str, where: str) -> None:
    check_the_mean(name, where, jaxcomm.mean())


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["auto", "simulated", "explicit", "auto, inner devices"])
@pytest.mark.parametrize("name", LOSSES)
def test_sent_in_the_backward_pass(name: str, where: str) -> None:
    check_the_mean(name, where, scheduling.wait_free(jaxcomm.mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_table(name: str) -> None:
    """What is marked as a mean over rows is one, and nothing else."""
    whole, parts = at_first(name, 1)[0], mean_of(at_first(name, DEVICES))
    size = size_of(at_first(name, DEVICES))
    assert size > 0
    if LOSSES[name]().is_mean:
        close(parts.value, whole.value, jnp.float32(0))
        close(parts.gradient, whole.gradient, LOSSES[name]().params, size)
    else:
        with pytest.raises(AssertionError):
            close(parts.gradient, whole.gradient, LOSSES[name]().params)


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["auto", "explicit", "simulated", "auto, one device"])
@pytest.mark.parametrize("name", LOSSES)
def test_two_steps_in_a_scan(name: str, where: str) -> None:
    loss, workers = LOSSES[name](), WHERE[where]()
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    step = build(loss, tx, workers)
    count, keys = count_of(workers), jax.random.split(KEY)
    carry = (loss.params, *states_of(loss), jaxcomm.init(tx, loss.params, workers))

    @jax.jit
    def train(carry: Any) -> Any:
        def body(carry: Any, key: Any) -> Any:
            carry, metrics = stepped(step, loss, carry, key)
            return carry, metrics["loss"]

        return jax.lax.scan(body, carry, keys)

    carry, values = train(carry)
    params, state, expected, size = wide(loss.params), loss.model_state, [], 0.0
    for key in keys:
        narrow = jax.tree.map(lambda x, p: jnp.asarray(x, p.dtype), params, loss.params)
        params = wide(narrow)
        same = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (count, *x.shape)))
        each = alone(name, count, same(narrow), None if state is None else same(state), key)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, mean_of(each).gradient)
        if state is not None:
            state = jax.tree.map(
                lambda new, old: jnp.asarray(new, old.dtype), mean_of(each).model_state, state
            )
        expected.append(mean_of(each).value)
        size = max(size, RATE * size_of(each))
    close(values, np.asarray(expected), loss.params)
    close(carry[0], params, loss.params, 2 * size)
    if state is not None:
        close(carry[1], wide(state), loss.model_state)


# Of methods whose parameters differ by worker: what one step makes of each worker's own.
RING = np.array([[np.isin((i - j) % 8, [0, 1, 7]) / 3 for j in range(8)] for i in range(8)])
APART: dict[str, tuple[Callable[[], Any], np.ndarray, np.ndarray]] = {
    "diloco": (
        lambda: synchronization.diloco(optax.sgd(RATE), optax.sgd(1.0), 2),
        np.eye(8),
        np.full((8, 8), 1 / 8),
    ),
    "local_sgd": (
        lambda: optax.chain(optax.sgd(RATE), synchronization.local_sgd(2)),
        np.eye(8),
        np.full((8, 8), 1 / 8),
    ),
    "dpsgd": (
        lambda: optax.chain(
            optax.sgd(RATE), gossip.dpsgd(gossip.ring(8), order="adapt_then_combine")
        ),
        RING,
        RING,
    ),
}


def own_of(params: Any) -> Any:
    return jax.tree.map(np.asarray, params.per_worker["data"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", APART)
@pytest.mark.parametrize("where", ["auto", "simulated", "explicit"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_workers_own_gradient(name: str, where: str, method: str) -> None:
    """Two steps, in NumPy: each worker's gradient at its own parameters, mixed by a matrix."""
    loss, workers = LOSSES[name](), WHERE[where]()
    make, *mixings = APART[method]
    tx = make()
    params, *states = (jaxcomm.replicate(x, workers) for x in (loss.params, *states_of(loss)))
    step = build(loss, tx, workers, metrics="own")
    carry: Any = (params, *states, jaxcomm.init(tx, params, workers))
    for mixing in mixings:
        before = own_of(carry[0])
        state = own_of(carry[1]) if states else None
        each = alone(name, DEVICES, before, state)
        carry, metrics = stepped(step, loss, carry)
        expected = jax.tree.map(
            lambda p, *g: np.tensordot(mixing, p - RATE * np.stack(g), 1),  # noqa: B023
            wide(before),
            *(one.gradient for one in each),
        )
        close(metrics["loss"], np.stack([one.value for one in each]), jnp.float32(0))
        close(own_of(carry[0]), expected, loss.params, RATE * size_of(each))
        if states:
            kept = jax.tree.map(lambda *xs: np.stack(xs), *(one.model_state for one in each))
            close(own_of(carry[1]), kept, loss.model_state)


WITHOUT_STATE = [name for name in LOSSES if name not in WITH_STATE]
WITHOUT_KEY = [name for name in WITHOUT_STATE if name not in WITH_KEY]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_overlapped(name: str) -> None:
    loss, mesh = LOSSES[name](), WHERE["auto"]()
    tx = synchronization.streaming_diloco(
        optax.sgd(RATE), optax.sgd(1.0), 4, fragments=1, overlap=1
    )
    params = jaxcomm.replicate(loss.params, mesh)
    step = make_overlapped_step(loss.call, tx, mesh, donate=False)
    carry, metrics = stepped(step, loss, (params, jaxcomm.init(tx, params, mesh)))
    each = at_first(name, DEVICES)
    expected = jax.tree.map(
        lambda p, *g: p - RATE * np.stack(g), wide(loss.params), *(one.gradient for one in each)
    )
    close(metrics["loss"], np.stack([one.value for one in each]), jnp.float32(0))
    close(own_of(carry[0]), expected, loss.params, RATE * size_of(each))


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["auto", "explicit", "auto, one device"])
@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_fully_sharded(name: str, where: str) -> None:
    loss, mesh = LOSSES[name](), WHERE[where]()
    specs = slice_specs(loss.params, mesh, least=1)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), loss.params, specs
    )
    value_and_grad = jax.jit(fully_sharded_value_and_grad(loss.call, mesh, specs))
    value, gradient = value_and_grad(placed, loss.batch)
    expected = together(name, mesh.size)
    close(value, expected.value, jnp.float32(0))
    close(gradient, expected.gradient, loss.params, size_of(at_first(name, mesh.size)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["auto", "simulated", "explicit"])
@pytest.mark.parametrize("name", LOSSES)
def test_its_nan_is_described(name: str, where: str) -> None:
    loss, workers = LOSSES[name](), WHERE[where]()

    def spoiled(params: Any, *args: Any) -> Any:
        *states, batch = args[: len(states_of(loss)) + 1]
        value = loss.call(params, *states, batch["rows"], *args[len(states) + 1 :])
        factor = jnp.mean(batch["factor"])
        return (value[0] * factor, value[1]) if states else value * factor

    options: Any = {"model_state": loss.model_state, "key": KEY if loss.key else None}
    factors = np.ones(2 * DEVICES, np.float32)
    for row, expected in ((None, None), (5, "worker 2 of 8: NaN in the loss and ")):
        if row is not None:
            factors[row] = np.nan
        batch = {"rows": loss.batch, "factor": factors}
        found = describe_nonfinite(spoiled, loss.params, batch, workers, **options)
        assert found == expected or (found or "").startswith(expected or "worker")


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["auto", "simulated", "explicit"])
@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_along_a_direction(name: str, where: str) -> None:
    """With one direction of signs, the update tells it: the slope has one size everywhere."""
    loss, workers, smoothing = LOSSES[name](), WHERE[where](), 0.125
    tx = optax.chain(
        jaxcomm.zeroth_order(smoothing=smoothing, distribution="rademacher"), optax.sgd(1.0)
    )
    first, step = loss.params, build(loss, tx, workers)
    (params, _), metrics = stepped(step, loss, (first, jaxcomm.init(tx, first, workers)))
    descent = jax.tree.map(lambda a, b: np.asarray(a - b), wide(first), wide(params))
    values = []
    for sign in (1, -1):
        point = jax.tree.map(
            lambda p, d: p + jnp.asarray(sign * smoothing * np.sign(d), p.dtype),  # noqa: B023
            first,
            descent,
        )
        values.append(mean_of(alone(name, DEVICES, broadcast(point))).value)
    slope = (values[0] - values[1]) / (2 * smoothing)
    size = max(1.0, *(np.abs(x).max(initial=0) for x in jax.tree.leaves(wide(first))))
    size = max(size, *(abs(value) / smoothing for value in values))
    for leaf in jax.tree.leaves(descent):
        np.testing.assert_allclose(np.abs(leaf), slope, atol=rounding(first) * size)
    close(metrics["loss"], np.mean(values), first)


def broadcast(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (DEVICES, *jnp.shape(x))), tree)
