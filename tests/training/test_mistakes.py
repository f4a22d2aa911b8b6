"""Mistakes with a step are one line that names the argument, the rule, the value and the remedy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression import feedback, sparsifiers
from tests.workers import mesh_of

N = 4
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def start() -> Any:
    return {"w": jnp.ones((5, 2))}


def qsgd() -> Any:
    return optax.chain(jaxcomm.global_qsgd(bits=8), optax.sgd(0.1))


def compressed() -> Any:
    codec = feedback.error_feedback(sparsifiers.top_k(ratio=0.5))
    return optax.chain(jaxcomm.all_gather_mean(codec), optax.sgd(0.1))


def exact() -> Any:
    return optax.chain(jaxcomm.mean(), optax.sgd(0.1))


class Here(NamedTuple):
    """Devices or simulated workers, and the step of them."""

    workers: Any
    make: Callable[..., Any]

    def step(self, tx: Any, loss_fn: Any = loss_fn, **options: Any) -> Any:
        return self.make(loss_fn, tx, self.workers, donate=options.pop("donate", False), **options)

    def init(self, tx: Any, params: Any = None) -> Any:
        return jaxcomm.init(tx, start() if params is None else params, self.workers)


def aux_of_examples(params: Any, batch: Any) -> Any:
    return loss_fn(params, batch), {"errors": jnp.sum(batch @ params["w"], 1)}


def again(here: Here) -> None:
    step = here.step(qsgd(), donate=True)
    params, state = start(), here.init(qsgd())
    params, state, _ = step(params, state, X)
    step(params, state, X)
    step(params, state, X)


def grown(workers: int, here: Here) -> None:
    few = mesh_of(workers) if here.make is jaxcomm.make_step else workers
    state = jaxcomm.init(compressed(), start(), few)
    here.step(compressed())(start(), state, X)


MISTAKES: dict[str, tuple[Callable[[Here], Any], str]] = {
    "a transformation that is not called": (
        lambda here: here.init(jaxcomm.mean),
        r"`tx` must be an optax transformation, got the function `mean`: call it",
    ),
    "parameters in place of a transformation": (
        lambda here: jaxcomm.init(start(), qsgd(), here.workers),
        "`tx` must be an optax transformation, got a `dict`",
    ),
    "parameters in place of workers": (
        lambda here: jaxcomm.init(qsgd(), start(), start()),
        "must be an int of at least 1, or a dict of sizes by axis, got a `dict`",
    ),
    "no transformation": (lambda here: here.step(3), "`tx` must be an optax transformation, got 3"),
    "the state of another": (
        lambda here: here.step(qsgd())(start(), here.init(optax.adam(0.1)), X),
        r"state belongs to another transformation.*got `ScaleByAdamState`.*`jaxcomm\.init`",
    ),
    "MultiSteps": (
        lambda here: here.step(optax.MultiSteps(qsgd(), 4)),
        r"`tx` is `optax\.MultiSteps`.*`jaxcomm\.accumulate\(tx, k\)`",
    ),
    "MultiSteps as a transformation": (
        lambda here: here.step(tx := optax.MultiSteps(qsgd(), 4).gradient_transformation())(
            start(), here.init(tx), X
        ),
        r"`jaxcomm\.accumulate\(tx, k\)` in place of `optax\.MultiSteps\(tx, k\)`",
    ),
    "apply_if_finite": (
        lambda here: here.step(tx := optax.apply_if_finite(qsgd(), 3))(start(), here.init(tx), X),
        r"cannot run inside `optax\.apply_if_finite`.*: use `jaxcomm\.skip_nonfinite\(tx\)`",
    ),
    "donated twice": (again, r"params\['w'\] was donated to an earlier step.*`donate=False`"),
    "one value an example": (
        lambda here: here.step(qsgd(), aux_of_examples, has_aux=True)(
            start(), here.init(qsgd()), X
        ),
        r"`aux\['errors'\]` has shape \(4,\), one value per example.*metrics='own'",
    ),
    "axes in no order": (
        lambda here: here.make(loss_fn, exact(), here.workers, axis_name={"data"}),
        r"`axis_name` must be the name of a mesh axis, or a tuple of several .*, got \{'data'\}",
    ),
    "no axis": (
        lambda here: here.make(loss_fn, exact(), here.workers, axis_name=()),
        r"`axis_name` must be the name of a mesh axis, or a tuple of several .*, got \(\)",
    ),
    "an unmarked optimizer before gossip": (
        lambda here: here.init(
            optax.chain(optax.trace(0.9), gossip.dpsgd(gossip.ring(N))),
            jaxcomm.replicate(start(), here.workers),
        ),
        r"optimizer state at \[0\]\.trace\['w'\] differs by worker.*`?jaxcomm\.per_worker\(",
    ),
    "state of twice as many workers": (
        lambda here: grown(2 * N, here),
        r"optimizer state at \[0\].*is for 8 workers, but there are 4 here",
    ),
    "state of fewer workers": (
        lambda here: grown(3, here),
        r"optimizer state at \[0\].*is for 3 workers, but there are 4 here",
    ),
    "parameters of twice as many workers": (
        lambda here: here.init(
            gossip.dpsgd(gossip.ring(N)), jaxcomm.PerWorker({"data": jnp.zeros((8, 3))})
        ),
        "parameters at .* is for 8 workers, but there are 4 here",
    ),
}


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, kind: str) -> None:
    here = Here(mesh_of(N), jaxcomm.make_step) if kind == "mesh" else Here(N, jaxcomm.simulate)
    mistake, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message) as caught:
        mistake(here)
    assert "\n" not in str(caught.value).split("\n---")[0]


def test_errors_of_the_users_own_functions_stay_what_they_are() -> None:
    def wrong(params: Any, batch: Any) -> jax.Array:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        jaxcomm.simulate(wrong, qsgd(), N)(start(), jaxcomm.init(qsgd(), start(), N), X)


def test_as_many_classes_as_rows_are_no_examples() -> None:
    def of_classes(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch), {"counts": jnp.zeros(4)}

    step = jaxcomm.simulate(of_classes, qsgd(), N, has_aux=True)
    _, _, metrics = step(start(), jaxcomm.init(qsgd(), start(), N), X)
    assert metrics["counts"].shape == (4,)


def test_examples_of_a_workers_devices_are_not_mixed_up() -> None:
    sizes = {"dcn": 2, "ici": 2}
    tx = optax.chain(jaxcomm.mean("dcn"), optax.sgd(0.1))
    step = jaxcomm.simulate(
        aux_of_examples, tx, sizes, axis_name="dcn", has_aux=True, metrics="own"
    )
    state = jaxcomm.init(tx, start(), sizes, axis_name="dcn")
    with pytest.raises(ValueError, match=r"one value per example.*return its mean\.(\n|$)"):
        step(start(), state, X)


def test_used_extra_arguments_reach_the_transformation() -> None:
    tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(N)))
    params = jaxcomm.PerWorker({"data": {"w": jnp.arange(N * 10.0).reshape(N, 5, 2)}})
    step = jaxcomm.simulate(loss_fn, tx, N, donate=False)
    state = jaxcomm.init(tx, params, N)
    alone, _, _ = step(params, state, X, present=jnp.zeros(N, bool))
    together, _, _ = step(params, state, X, present=jnp.ones(N, bool))
    assert (alone.per_worker["data"]["w"] != together.per_worker["data"]["w"]).any()
