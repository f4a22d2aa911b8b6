"""What the methods of the lab send, without processes and links."""

import functools
from typing import Any, NamedTuple

import jax
import optax

import jaxcomm
from experiments.lab import inputs
from experiments.lab.methods import LABELS, find
from experiments.lab.models import LOSSES
from jaxcomm.wire._account import Account


class Sent(NamedTuple):
    """A step of a method: its account, and the share of the steps that send it."""

    account: Account
    share: float


@functools.cache
def shapes_of_model(model: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the weights."""
    weights = inputs.load(model).first_weights(0)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}


def sent_by(label: str, model: str, workers: int) -> Sent | None:
    """The account of a method on a model; None for those of PyTorch, and if steps differ.

    Args:
      label: The method, such as `global_qsgd:8`.
      model: `mlp` or `transformer`.
      workers: The number of workers.
    """
    if label.partition(":")[0] not in LABELS:
        return None
    method = find(label)
    if method.share is None:
        return None
    sizes = {"cluster": 2, "data": workers // 2} if method.clusters else {"data": workers}
    names = tuple(sizes)
    optimizer = optax.sgd(0.1)
    tx = method.build(
        workers, jaxcomm.per_worker(optimizer) if method.own_parameters else optimizer
    )
    shapes: Any = shapes_of_model(model)
    if method.own_parameters:
        shapes = jax.eval_shape(lambda params: jaxcomm.replicate(params, workers), shapes)
    rows = inputs.load(model).batch(0, 0, 0)
    batch = jax.ShapeDtypeStruct((workers * rows.shape[0], *rows.shape[1:]), rows.dtype)
    metrics: Any = "own" if method.own_parameters else "mean"
    step = jaxcomm.simulate(LOSSES[model], tx, sizes, axis_name=names, metrics=metrics)
    state = jax.eval_shape(lambda params: jaxcomm.init(tx, params, sizes), shapes)
    return Sent(jaxcomm.wire.account(step, shapes, state, batch), method.share)
