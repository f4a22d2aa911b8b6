"""A method over an axis with another name: the error names it, and the axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm
from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase
from tests.cases._local import LOCAL, LocalCase

WORKERS, SIZE = 8, 32
ADVICE = (
    r"`axis_name`='data' is not bound here, where the axes are \['batch'\]: "
    r"pass `axis_name='batch'`"
)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((w[None] - x) ** 2)


def mesh_of_batch() -> Any:
    return jax.make_mesh((WORKERS,), ("batch",), axis_types=(AxisType.Auto,))


def mapped(step: Callable[..., Any]) -> Any:
    return jax.eval_shape(
        jax.vmap(step, in_axes=(None, 0), axis_name="batch"),
        jnp.ones(SIZE),
        jnp.ones((WORKERS, SIZE)),
    )


def sharded(step: Callable[..., Any]) -> Any:
    run = jax.shard_map(
        lambda w, x: jax.tree.map(lambda y: y[None], step(w, x[0])),
        mesh=mesh_of_batch(),
        in_specs=(P(), P("batch")),
        out_specs=P("batch"),
    )
    return jax.eval_shape(run, jnp.ones(SIZE), jnp.ones((WORKERS, SIZE)))


@pytest.mark.parametrize("case", [*CASES, *GOSSIP, *LOCAL], ids=repr)
def test_a_wrong_axis_name_is_reported(case: Case | GossipCase | LocalCase) -> None:
    """Users had the advice to use what they used: `jaxcomm.init` and `jaxcomm.make_step`."""
    if isinstance(case, Case):
        tx = case.make()
    elif isinstance(case, GossipCase):
        tx = case.make(WORKERS)
    else:
        tx = case.make(optax.sgd(0.1))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        updates, _ = tx.update(x, tx.init(w), w, value=jnp.sum(x))
        return updates

    with pytest.raises(ValueError, match="`axis_name`='data' is not bound here"):
        mapped(step)
    with pytest.raises(ValueError, match=ADVICE):
        sharded(step)


@pytest.mark.parametrize(
    "tx",
    [
        jaxcomm.mean(),
        jaxcomm.skip_nonfinite(jaxcomm.mean("batch")),
    ],
)
def test_steps_report_a_wrong_axis_name_too(tx: Any) -> None:
    w, x = jnp.ones((SIZE, 4)), jnp.ones((WORKERS, SIZE, 4))
    simulated, mesh = jaxcomm.simulate(loss, tx, WORKERS, axis_name="batch"), mesh_of_batch()
    for workers, step in (
        (WORKERS, simulated),
        (mesh, jaxcomm.make_step(loss, tx, mesh, axis_name="batch")),
    ):
        with pytest.raises(ValueError, match=ADVICE):
            step(w, jaxcomm.init(tx, w, workers, axis_name="batch"), x)
