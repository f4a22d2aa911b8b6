"""A method over an axis with another name: the error names it, the axes, and the option."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.synchronization import window_gradients
from jaxcomm.training import loss_scaled, loss_scaled_gradients
from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase
from tests.cases._local import LOCAL, LocalCase

WORKERS, SIZE = 8, 32
ADVICE = (
    r"`axis_name`='data' is not bound here, where the axes are \['batch'\]: "
    r"pass `axis_name='batch'` to `"
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
def test_an_axis_of_another_name_is_named(case: Case | GossipCase | LocalCase) -> None:
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

    for by_hand in (mapped, sharded):
        with pytest.raises(ValueError, match=ADVICE):
            by_hand(step)


@pytest.mark.parametrize(
    ("user", "tx"),
    [
        ("mean", jaxcomm.mean()),
        ("power_sgd", jaxcomm.power_sgd(rank=2)),
        ("skip_nonfinite", jaxcomm.skip_nonfinite(jaxcomm.mean("batch"))),
        ("accumulate", jaxcomm.accumulate(optax.chain(jaxcomm.mean("batch")), 2)),
        ("warmup", jaxcomm.warmup([jaxcomm.mean(), jaxcomm.global_qsgd()], 3)),
    ],
)
def test_steps_name_it_too(user: str, tx: Any) -> None:
    w, x = jnp.ones((SIZE, 4)), jnp.ones((WORKERS, SIZE, 4))
    simulated, mesh = jaxcomm.simulate(loss, tx, WORKERS, axis_name="batch"), mesh_of_batch()
    advice = ADVICE + ("mean" if user == "warmup" else user)
    for workers, step in (
        (WORKERS, simulated),
        (mesh, jaxcomm.make_step(loss, tx, mesh, axis_name="batch")),
    ):
        with pytest.raises(ValueError, match=advice):
            step(w, jaxcomm.init(tx, w, workers, axis_name="batch"), x)


def test_functions_of_a_step_name_themselves() -> None:
    tx, w = optax.chain(jaxcomm.mean("batch"), optax.sgd(0.1)), jnp.ones(3)
    state = jaxcomm.init(tx, w, 2, axis_name="batch")
    with pytest.raises(ValueError, match=ADVICE + "window_gradients"):
        jaxcomm.simulate(loss, tx, 2, axis_name="batch", gradients=window_gradients)(
            w, state, (jnp.ones((4, 3)), jnp.array([1, 2]))
        )
    scaled = jaxcomm.simulate(
        lambda w, state, x: (loss(w, x), state),
        tx,
        2,
        axis_name="batch",
        gradients=loss_scaled_gradients,
        has_model_state=True,
    )
    with pytest.raises(ValueError, match=ADVICE + "loss_scaled_gradients"):
        scaled(w, loss_scaled(), state, jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=ADVICE + "local_value_and_grad"):
        mapped(jaxcomm.local_value_and_grad(loss))


def test_of_several_axes_each_is_a_proposal() -> None:
    both = jax.vmap(
        functools.partial(jax.vmap(jaxcomm.or_reduce, axis_name="ici")), axis_name="dcn"
    )
    with pytest.raises(
        ValueError, match=r"'dcn', 'ici'.*'dcn'` \(or others of them\) to `or_reduce`"
    ):
        both(jnp.ones((2, 2, 3), jnp.uint32))


def test_an_option_in_its_place_names_the_keywords() -> None:
    for construct, value, keyword in (
        (jaxcomm.global_qsgd, 8, "`bits=`"),
        (jaxcomm.top_k_sgd, 0.01, "`ratio=`, `k=`"),
        (jaxcomm.mean, jnp.float16, "`wire_dtype=`"),
    ):
        with pytest.raises(ValueError, match=rf"name of a mesh axis.*by keyword: .*{keyword}"):
            construct(value)  # type: ignore[arg-type]
