"""What a step tells, and what telling it sends."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import diloco, local_sgd, pr_sgd, slowmo, streaming_diloco

N = 4
TARGETS = np.arange(N, dtype=np.float32)
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)


def mesh_of() -> Mesh:
    return jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:N])


def build(kind: str, tx: Any, apart: bool, **options: Any) -> tuple[Any, Any, Any]:
    workers: Any = mesh_of() if kind == "mesh" else N
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    params = jaxcomm.replicate(jnp.float32(0), workers) if apart else jnp.float32(0)
    step = make(lambda w, x: jnp.mean((w - x) ** 2), tx, workers, donate=False, **options)
    return step, params, jaxcomm.init(tx, params, workers)


KINDS = pytest.mark.parametrize("kind", ["mesh", "simulated"])


@KINDS
def test_each_workers_own(kind: str) -> None:
    tx = optax.chain(optax.sgd(0.1), local_sgd(2))
    step, params, state = build(kind, tx, True, metrics="own")
    _, _, metrics = step(params, state, TARGETS)
    np.testing.assert_allclose(metrics["loss"], TARGETS**2)


@KINDS
def test_means_now_and_then(kind: str) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.0), optax.scale_by_schedule(lambda count: 1.0))
    step, params, state = build(kind, tx, False, metrics=3)
    told = []
    for _ in range(6):
        params, state, metrics = step(params, state, TARGETS)
        told.append(float(metrics["loss"]))
    mean = float((TARGETS**2).mean())
    np.testing.assert_allclose(told, [np.nan, np.nan, mean] * 2)


class Again(NamedTuple):
    count: jax.Array


def test_counters_that_begin_anew_do_not_count() -> None:
    again = optax.GradientTransformation(
        lambda params: Again(jnp.zeros((), jnp.int32)),
        lambda updates, state, params=None: (updates, Again((state.count + 1) % 3)),
    )
    tx = optax.chain(jaxcomm.mean(), again, optax.scale_by_schedule(lambda count: 1.0))
    step, params, state = build("simulated", tx, False, metrics=2)
    told = []
    for _ in range(6):
        params, state, metrics = step(params, state, TARGETS)
        told.append(bool(np.isnan(metrics["loss"])))
    assert told == [True, False] * 3


def test_a_period_needs_a_counter() -> None:
    step, params, state = build(
        "simulated", optax.chain(jaxcomm.mean(), optax.sgd(0.1)), False, metrics=3
    )
    with pytest.raises(ValueError, match=r"needs a counter of steps.*'mean' or 'own'"):
        step(params, state, TARGETS)


@KINDS
@pytest.mark.parametrize("weights", [[1, 0, 0, 3], [0, 0, 0, 0], [1, -1, 2, 0], [1, np.inf, 0, 0]])
def test_weighted_means_of_finite_parts(kind: str, weights: list[float]) -> None:
    def gradients(loss_fn: Any, w: Any, batch: Any) -> Any:
        x, weight = batch
        # A mean over no rows is NaN.
        loss = jnp.where(weight[0] == 0, jnp.nan, (w - x[0]) ** 2)
        return loss, jnp.where(weight[0] == 0, jnp.nan, 2 * (w - x[0])), weight[0]

    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.5))
    step, params, state = build(kind, tx, False, gradients=gradients)
    counts = np.asarray(weights, np.float32)
    params, _, metrics = step(params, state, (TARGETS, counts))
    valid = np.isfinite(counts).all() and (counts >= 0).all()
    if not valid:
        assert np.isnan(metrics["loss"]) and np.isnan(params)
    elif not counts.any():
        assert np.isnan(metrics["loss"]) and params == 0
    else:
        np.testing.assert_allclose(metrics["loss"], np.average(TARGETS**2, weights=counts))
        np.testing.assert_allclose(params, np.average(TARGETS, weights=counts))
        assert metrics["weight"] == counts.sum()


LOCAL = {
    "local_sgd": optax.chain(optax.sgd(0.1), local_sgd(4)),
    "slowmo": optax.chain(optax.sgd(0.1), slowmo(4)),
    "diloco": diloco(optax.sgd(0.1), optax.sgd(0.7), 4),
    "streaming": streaming_diloco(optax.sgd(0.1), optax.sgd(0.7), 4, fragments=1),
    "pr_sgd": pr_sgd(optax.sgd(0.1), 4),
    "dpsgd": optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(N))),
    "matcha": optax.chain(
        optax.sgd(0.1), gossip.matcha(gossip.matcha_plan(gossip.ring(N), budget=0.5))
    ),
}


def collectives_by_computation(text: str) -> dict[str, set[str]]:
    """The collectives of each computation of a compiled program."""
    name, holds = "", dict[str, set[str]]()
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = match[1]
        if match := COLLECTIVE.search(line):
            holds.setdefault(name, set()).add(match[1])
    return holds


def branches(text: str) -> set[str]:
    """The computations that run under a condition."""
    found = set(re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", text))
    for group in re.findall(r"branch_computations=\{([^}]*)\}", text):
        found |= {each.strip().lstrip("%") for each in group.split(",")}
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", LOCAL)
def test_an_inner_step_sends_nothing_but_by_its_own_rule(name: str) -> None:
    step, params, state = build("mesh", LOCAL[name], True, metrics="own")
    text = jax.jit(step).lower(params, state, TARGETS).compile().as_text()
    found, conditional = collectives_by_computation(text), branches(text)
    assert found  # It does meet.
    outside = {kind for where, kinds in found.items() if where not in conditional for kind in kinds}
    assert outside <= ({"collective-permute"} if name == "dpsgd" else set())
