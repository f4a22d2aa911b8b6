"""Training steps of a row, each one program for all laws that train."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jaxcomm
from tests.cases import Case
from tests.workers import gradients, mesh_of, of_one_worker, towards


@functools.cache
def given_gradients(case: Case, where: int | Mesh) -> tuple[Any, Any]:
    """SGD, and its step on workers whose gradients are the batch."""

    def given(loss_fn: Any, params: Any, batch: Any) -> tuple[jax.Array, Any]:
        del loss_fn, params
        return jnp.zeros(()), of_one_worker(batch)

    tx = optax.chain(case.make(), optax.sgd(0.1))
    make = jaxcomm.simulate if isinstance(where, int) else jaxcomm.make_step
    return tx, make(lambda p, b: jnp.zeros(()), tx, where, gradients=given, donate=False)


def meshes(workers: int) -> list[Mesh]:
    """Automatic and explicit axes."""
    devices = jax.devices()[:workers]
    kinds = (AxisType.Auto, AxisType.Explicit)
    return [
        jax.make_mesh((workers,), ("data",), axis_types=(kind,), devices=devices) for kind in kinds
    ]


def linear(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["kernel"] + params["bias"][None]) ** 2)


@functools.cache
def momentum_sgd(case: Case) -> Any:
    return optax.chain(case.make(), optax.sgd(0.05, momentum=0.9))


@functools.cache
def of_linear(case: Case, donate: bool, gradients: Any = None) -> Any:
    """A step of `linear` on four workers."""
    tx, mesh = momentum_sgd(case), mesh_of(4)
    return jaxcomm.make_step(linear, tx, mesh, donate=donate, gradients=gradients)


def plain_gradients(loss_fn: Any, *args: Any) -> Any:
    """Those of a step, given as `gradients=`: a method that evaluates the loss projects them."""
    return jaxcomm.local_value_and_grad(loss_fn)(*args)


def start_of_linear(case: Case) -> tuple[dict[str, jax.Array], Any, jax.Array]:
    """Parameters, the state, and a batch for all workers."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"kernel": draw(6, 2), "bias": draw(2)}
    return params, jaxcomm.init(momentum_sgd(case), params, mesh_of(4)), draw(16, 6)


SCHEDULE = optax.linear_schedule(0.1, 0.0, 4)


@functools.cache
def scheduled(case: Case) -> tuple[Any, Any]:
    """SGD with an injected schedule, and its step of `towards` on two workers."""
    build = optax.inject_hyperparams(lambda rate: optax.chain(case.make(), optax.sgd(rate)))
    tx = build(rate=SCHEDULE)
    return tx, jaxcomm.make_step(towards, tx, mesh_of(2), donate=False)


def start_and_targets() -> tuple[Any, Any]:
    """Parameters, and the targets of two workers."""
    return of_one_worker(gradients(2)), gradients(2, seed=1)
