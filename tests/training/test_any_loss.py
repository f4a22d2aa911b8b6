"""A loss that runs under `jax.jit(jax.value_and_grad(loss))` runs in every step, unchanged.

Every loss runs with the mean, and with one that is sent in the backward pass. A few, of every kind
of program, run in every place and with everything else that calls a loss.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip, scheduling, synchronization
from jaxcomm.training import (
    fully_sharded_value_and_grad,
    make_overlapped_step,
    slice_specs,
)
from tests.slow import slow
from tests.training.losses import LOSSES, WITH_KEY, WITH_STATE, Loss
from tests.training.places import at, begun, devices_at

DEVICES, RATE, KEY, SINGLE = 8, 0.1, jax.random.key(1), np.float32(0)
FEW = [
    "distillation",
    "constant_carry",
    "constant_branch",
    "pallas_kernel",
    "host_callback",
    "half_precision",
    "axis_of_its_own",
    "linen_batch_norm",
    "dropout_in_a_scan",
]
OTHERS = [name for name in LOSSES if name not in FEW]
WITHOUT_STATE = [name for name in FEW if name not in WITH_STATE]
WITHOUT_KEY = [name for name in WITHOUT_STATE if name not in WITH_KEY]


def first_quick(*factors: Any) -> list[Any]:
    """All combinations, of which the quick run has the first."""
    first, *rest = itertools.product(*factors)
    return [first, *(slow(*each) for each in rest)]


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


def shared_of(loss: Loss) -> dict[str, Any]:
    return {} if loss.shared is None else {"shared": loss.shared}


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
        given = loss.params if params is None else own(params)
        result, gradient = plain(name)(given, *args, *keys, **shared_of(loss))
        value, state = result if loss.model_state is not None else (result, None)
        found.append(Alone(*wide((value, gradient, state))))
    return found


@functools.cache
def at_first(name: str, devices: int) -> list[Alone]:
    return alone(name, devices)


def rounding(like: Any) -> float:
    """The relative difference to allow in the coarsest dtype of `like`."""
    dtypes = [jnp.asarray(x).dtype for x in jax.tree.leaves(like)]
    units = [jnp.finfo(x).eps for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    unit = float(max(units, default=0))
    return 2 * unit if unit > 1e-3 else 64 * unit


def close(got: Any, expected: Any, like: Any = SINGLE, scale: float = 0.0) -> None:
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


def moved(params: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, wide(params), gradient)


def build(name: str, tx: Any, workers: Any, params: Any = None, **options: Any) -> tuple[Any, Any]:
    """The step and its carry: parameters, model state if any, and state of the optimizer."""
    loss = LOSSES[name]()
    params = loss.params if params is None else params
    has_model_state = loss.model_state is not None
    step, state = begun(loss.call, tx, workers, params, has_model_state=has_model_state, **options)
    return step, (params, *states_of(loss), state)


def stepped(step: Any, name: str, carry: tuple[Any, ...], key: Any = KEY) -> Any:
    """One step: the next carry, and metrics."""
    loss = LOSSES[name]()
    keys = {"key": key} if loss.key else {}
    *new, metrics = step(*carry, loss.batch, **keys, **shared_of(loss))
    return tuple(new), metrics


def check_the_mean(name: str, where: str, aggregator: Any) -> None:
    step, carry = build(name, optax.chain(aggregator, optax.sgd(RATE)), at(where))
    carry, metrics = stepped(step, name, carry)
    loss, each = LOSSES[name](), at_first(name, devices_at(where))
    expected = mean_of(each)
    close(metrics["loss"], expected.value)
    close(carry[0], moved(loss.params, expected.gradient), loss.params, RATE * size_of(each))
    if loss.model_state is not None:
        close(carry[1], expected.model_state, loss.model_state)


OF_THE_MEAN = [
    *((name, "simulated") for name in LOSSES),
    *first_quick(FEW, ["auto", "explicit", "auto 4x2", "explicit 2x4", "simulated 4x2", "auto 1"]),
    *(slow(name, "auto") for name in OTHERS),
]


@pytest.mark.parametrize(("name", "where"), OF_THE_MEAN)
def test_the_mean_of_workers_is_one_device(name: str, where: str) -> None:
    check_the_mean(name, where, jaxcomm.mean())


IN_THE_BACKWARD_PASS = [
    *first_quick(FEW, ["auto", "explicit", "auto 4x2"]),
    *(slow(name, "simulated") for name in LOSSES),
]


@pytest.mark.parametrize(("name", "where"), IN_THE_BACKWARD_PASS)
def test_sent_in_the_backward_pass(name: str, where: str) -> None:
    check_the_mean(name, where, scheduling.wait_free(jaxcomm.mean()))


@pytest.mark.parametrize(("name", "where"), first_quick(FEW, ["auto", "explicit", "simulated"]))
def test_a_scan_of_steps_is_a_loop(name: str, where: str) -> None:
    tx, keys = optax.chain(jaxcomm.mean(), optax.sgd(RATE)), jax.random.split(KEY)
    step, first = build(name, tx, at(where))

    def body(carry: Any, key: Any) -> Any:
        carry, metrics = stepped(step, name, carry, key)
        return carry, metrics["loss"]

    found, values = jax.jit(lambda carry: jax.lax.scan(body, carry, keys))(first)
    carry, losses = first, []
    for key in keys:
        carry, loss = body(carry, key)
        losses.append(loss)
    like, size = LOSSES[name]().params, RATE * size_of(at_first(name, devices_at(where)))
    close(values, wide(jnp.stack(losses)), like)
    close(found[:-1], wide(carry[:-1]), like, size)


# Of methods whose parameters differ by worker: what one step makes of each worker's own.
RING = np.array([[np.isin((i - j) % 8, [0, 1, 7]) / 3 for j in range(8)] for i in range(8)])
LOCAL = [np.eye(8), np.full((8, 8), 1 / 8)]
LOCAL_METHODS: dict[str, tuple[Callable[[], Any], list[np.ndarray]]] = {
    "auto": (lambda: synchronization.diloco(optax.sgd(RATE), optax.sgd(1.0), 2), LOCAL),
    "simulated": (lambda: optax.chain(optax.sgd(RATE), synchronization.local_sgd(2)), LOCAL),
    "explicit": (
        lambda: optax.chain(
            optax.sgd(RATE), gossip.dpsgd(gossip.ring(8), order="adapt_then_combine")
        ),
        [RING, RING],
    ),
}


def own_of(params: Any) -> Any:
    return jax.tree.map(np.asarray, params.per_worker["data"])


@pytest.mark.parametrize(("name", "where"), first_quick(FEW, LOCAL_METHODS))
def test_every_workers_own_gradient(name: str, where: str) -> None:
    """Two steps, in NumPy: each worker's gradient at its own parameters, mixed by a matrix."""
    loss, workers = LOSSES[name](), at(where)
    make, mixings = LOCAL_METHODS[where]
    params, *states = (jaxcomm.replicate(x, workers) for x in (loss.params, *states_of(loss)))
    step, (_, *_, opt_state) = build(name, make(), workers, params, metrics="own")
    carry: Any = (params, *states, opt_state)
    for mixing in mixings:
        before = own_of(carry[0])
        each = alone(name, DEVICES, before, own_of(carry[1]) if states else None)
        carry, metrics = stepped(step, name, carry)
        expected = jax.tree.map(
            lambda p, *g: np.tensordot(mixing, p - RATE * np.stack(g), 1),  # noqa: B023
            wide(before),
            *(one.gradient for one in each),
        )
        close(metrics["loss"], np.stack([one.value for one in each]))
        close(own_of(carry[0]), expected, loss.params, RATE * size_of(each))
        if states:
            kept = jax.tree.map(lambda *xs: np.stack(xs), *(one.model_state for one in each))
            close(own_of(carry[1]), kept, loss.model_state)


@pytest.mark.parametrize("name", [WITHOUT_STATE[0], *map(slow, WITHOUT_STATE[1:])])
def test_overlapped(name: str) -> None:
    loss, mesh = LOSSES[name](), at("auto")
    tx = synchronization.streaming_diloco(
        optax.sgd(RATE), optax.sgd(1.0), 4, fragments=1, overlap=1
    )
    params = jaxcomm.replicate(loss.params, mesh)
    step = make_overlapped_step(loss.call, tx, mesh, donate=False)
    carry, metrics = stepped(step, name, (params, jaxcomm.init(tx, params, mesh)))
    each = at_first(name, DEVICES)
    expected = jax.tree.map(
        lambda p, *g: p - RATE * np.stack(g), wide(loss.params), *(one.gradient for one in each)
    )
    close(metrics["loss"], np.stack([one.value for one in each]))
    close(own_of(carry[0]), expected, loss.params, RATE * size_of(each))


@pytest.mark.parametrize(("name", "where"), first_quick(WITHOUT_KEY, ["auto", "explicit"]))
def test_fully_sharded(name: str, where: str) -> None:
    loss, mesh = LOSSES[name](), at(where)
    specs = slice_specs(loss.params, mesh, least=1)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), loss.params, specs
    )
    value_and_grad = jax.jit(fully_sharded_value_and_grad(loss.call, mesh, specs))
    value, gradient = value_and_grad(placed, loss.batch, **shared_of(loss))
    each = at_first(name, mesh.size)
    close(value, mean_of(each).value)
    close(gradient, mean_of(each).gradient, loss.params, size_of(each))


@pytest.mark.parametrize(("name", "where"), first_quick(WITHOUT_STATE, ["auto", "simulated"]))
def test_along_a_direction(name: str, where: str) -> None:
    """With one direction of signs, the update shows it: the slope has one size everywhere."""
    smoothing, first = 0.125, LOSSES[name]().params
    direction = jaxcomm.zeroth_order(smoothing=smoothing, distribution="rademacher")
    step, carry = build(name, optax.chain(direction, optax.sgd(1.0)), at(where))
    (params, _), metrics = stepped(step, name, carry)
    descent, values = jax.tree.map(np.subtract, wide(first), wide(params)), []
    for sign in (1, -1):
        point = jax.tree.map(
            lambda p, d: jnp.broadcast_to(
                p + jnp.asarray(sign * smoothing * np.sign(d), p.dtype),  # noqa: B023
                (DEVICES, *p.shape),
            ),
            first,
            descent,
        )
        values.append(mean_of(alone(name, DEVICES, point)).value)
    slope = (values[0] - values[1]) / (2 * smoothing)
    size = max(1.0, *(np.abs(x).max(initial=0) for x in jax.tree.leaves(wide(first))))
    size = max(size, *(abs(value) / smoothing for value in values))
    for leaf in jax.tree.leaves(descent):
        np.testing.assert_allclose(np.abs(leaf), slope, atol=rounding(first) * size)
    close(metrics["loss"], np.mean(values), first)
