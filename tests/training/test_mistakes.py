"""Mistakes with a step are one line that names the argument, the rule, the value and the remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.training.places import SGD, at, begun

N = 4
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
PARAMS = {"w": jnp.ones((5, 2))}
STATE = {"mean": jnp.zeros(5), "count": jnp.int32(0)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def run(workers: Any, tx: Any = SGD, loss: Any = loss_fn, **options: Any) -> Any:
    step, state = begun(loss, tx, workers, PARAMS, **options)
    return step(PARAMS, state, X)


def with_aux(aux_of: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
    """One step whose loss returns these metrics of a batch."""
    loss = lambda p, x: (loss_fn(p, x), aux_of(x))  # noqa: E731
    return lambda workers: run(workers, loss=loss, has_aux=True, **options)


def returning(
    changes: Callable[[Any], Any], given: Any = STATE, batch: Any = X, **options: Any
) -> Callable[[Any], Any]:
    """One step whose loss returns a model state with these changes."""

    def mistake(workers: Any) -> Any:
        new = lambda rows: {"mean": jnp.mean(rows, axis=0), "count": jnp.int32(1)}  # noqa: E731
        loss = lambda p, s, x: (loss_fn(p, x), new(x) | changes(x))  # noqa: E731
        step, state = begun(loss, SGD, workers, PARAMS, has_model_state=True, **options)
        return step(PARAMS, given(workers) if callable(given) else given, state, batch)

    return mistake


def donated_twice(workers: Any) -> None:
    step, state = begun(loss_fn, SGD, workers, PARAMS, donate=True)
    params, state, _ = step(jax.tree.map(jnp.copy, PARAMS), state, X)
    step(params, state, X)
    step(params, state, X)


def of_another(workers: Any) -> None:
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    begun(loss_fn, tx, workers, PARAMS)[0](
        PARAMS, jaxcomm.init(optax.adam(0.1), PARAMS, workers), X
    )


WITH_MEMORY = optax.chain(jaxcomm.top_k_sgd(ratio=0.5), optax.sgd(0.1))
HALF = lambda x: {"mean": jnp.zeros(5, jnp.bfloat16)}  # noqa: E731
COUNTED = lambda x: {"count": jnp.sum(x > 0, dtype=jnp.int32)}  # noqa: E731
WINDOWS = (jnp.ones((2 * N, 2, 5)), jnp.ones(N, jnp.int32))
NOTHING = lambda x: {}  # noqa: E731
OTHER_DTYPE = r"returned `model_state\['mean'\]` as bfloat16\[5\], but received it as float32\[5\]"
MISTAKES: dict[str, Any] = {
    "the state of another": (
        of_another,
        r"state belongs to another transformation.*got `ScaleByAdamState`.*`jaxcomm\.init`",
    ),
    "state of twice as many workers": (
        lambda workers: begun(loss_fn, WITH_MEMORY, workers, PARAMS)[0](
            PARAMS, jaxcomm.init(WITH_MEMORY, PARAMS, 2 * N), X
        ),
        r"optimizer state at \[0\].*is for 8 workers, but there are 4 here",
    ),
    "donated twice": (
        donated_twice,
        r"params\['w'\] was donated to an earlier step.*`donate=False`",
    ),
    "no aggregator": (
        lambda workers: run(workers, optax.sgd(0.1)),
        r"update at \['w'\] differs by worker.*jaxcomm\.mean\(",
    ),
    "momentum before the aggregator": (
        lambda workers: run(workers, optax.chain(optax.trace(0.9), SGD)),
        r"optimizer state at \[0\]\.trace\['w'\] differs by worker",
    ),
    "an unmarked optimizer before gossip": (
        lambda workers: jaxcomm.init(
            optax.chain(optax.trace(0.9), gossip.dpsgd(gossip.ring(N))),
            jaxcomm.replicate(PARAMS, workers),
            workers,
        ),
        r"optimizer state at \[0\]\.trace\['w'\] differs by worker.*`?jaxcomm\.per_worker\(",
    ),
    "one value an example": (
        with_aux(lambda x: {"errors": jnp.sum(x, axis=1)}),
        r"`aux\['errors'\]` has shape \(4,\), one value per example.*metrics='own'",
    ),
    "a period without a counter": (
        lambda workers: run(workers, metrics=3),
        r"needs a counter of steps.*'mean' or 'own'",
    ),
    "a model state of another dtype": (returning(HALF), OTHER_DTYPE),
    "a counter that differs": (
        returning(COUNTED),
        r"`model_state\['count'\]` is int32 and differs over \['data'\].*jaxcomm.replicate",
    ),
    "a model state for other workers": (
        returning(NOTHING, lambda workers: jaxcomm.replicate(STATE, 2)),
        "The model state at .* is for 2 workers, but there are 4 here",
    ),
    "a model state over another axis": (
        returning(NOTHING, lambda workers: jaxcomm.replicate(STATE, N, axis_name="other")),
        r"`model_state` differs over the axes \['other'\], with which `axis_name`='data'",
    ),
}


def require_one_line(mistake: Callable[[Any], Any], workers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        mistake(workers)
    assert "\n" not in str(caught.value).split("\n---")[0]


@pytest.mark.parametrize("where", ["auto 4", "simulated 4"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, where: str) -> None:
    mistake, message = MISTAKES[name]
    require_one_line(mistake, at(where), message)


@pytest.mark.parametrize("where", ["auto 2x2", "simulated 2x2"])
def test_mistakes_over_the_devices_of_a_worker(where: str) -> None:
    of_examples = with_aux(lambda x: {"errors": jnp.sum(x, axis=1)}, metrics="own")
    require_one_line(of_examples, at(where), r"one value per example.*return its mean\.(\n|$)")
    own = lambda workers: jaxcomm.replicate(STATE, workers)  # noqa: E731
    message = r"`model_state\['count'\]` is int32 and differs over \['inner'\]"
    require_one_line(returning(COUNTED, own), at(where), message)


def test_axes_of_a_mesh_and_of_a_simulation() -> None:
    message = r"The mesh with axes .* lacks .*: pass `axis_name=` one of its axes"
    require_one_line(lambda mesh: run(mesh, axis_name="workers"), at("auto"), message)
    axes = ("inner", "data")
    require_one_line(
        lambda sizes: run(sizes, axis_name=axes), at("simulated 2x2"), "in the same order"
    )


def test_what_is_no_mistake() -> None:
    """Metrics with as many values as rows; and errors of the user's own functions stay."""
    counts = with_aux(lambda x: {"counts": jnp.zeros(4)})
    assert counts(N)[2]["counts"].shape == (4,)

    def wrong(params: Any, batch: Any) -> jax.Array:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        run(N, loss=wrong)
