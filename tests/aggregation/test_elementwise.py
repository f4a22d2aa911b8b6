"""Which optimizers `sharded_server` accepts: those of which each coordinate is independent."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from optax import contrib

import jaxcomm
from tests.aggregation.runs import refuse
from tests.slow import slow
from tests.workers import mesh_of


@pytest.fixture(autouse=True)
def _promotion_that_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


PARAMS = {"b": jnp.ones(3), "k": jnp.ones((130, 129)), "s": jnp.ones(())}


def check(tx: Any, workers: int = 2, params: Any = PARAMS, **extra: Any) -> None:
    """Traces `init` and a step."""
    sharded = jaxcomm.sharded_server(tx)
    state = jax.eval_shape(lambda p: jaxcomm.init(sharded, p, mesh_of(workers)), params)
    loss = lambda p, b: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)) * jnp.mean(b)  # noqa: E731
    step = jaxcomm.make_step(loss, sharded, mesh_of(workers))
    new = jax.eval_shape(lambda *args: step(*args, **extra), params, state, jnp.ones(workers))
    chex.assert_trees_all_equal_shapes_and_dtypes(new[:2], (params, state))


def is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def each(fn: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Applies a function to each leaf."""
    return optax.stateless(lambda updates, params: jax.tree.map(fn, updates))


def stateful(
    init: Callable[[Any], Any], fn: Callable[[jax.Array, Any], tuple[jax.Array, Any]]
) -> optax.GradientTransformation:
    """Applies a function to each leaf and to the state of that leaf."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        pairs = {name: fn(x, state[name]) for name, x in updates.items()}
        return {k: u for k, (u, _) in pairs.items()}, {k: s for k, (_, s) in pairs.items()}

    def start(params: Any) -> Any:
        return {name: init(x) for name, x in params.items()}

    return optax.GradientTransformation(start, update)


def newton(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, y: y - (y * y - x) / (2 * y + 1), x)


def looped(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1]


ACCEPTED = {
    **{
        name: getattr(optax, name)(0.1)
        for name in ("lion", "adagrad", "adadelta", "yogi", "nadam", "radam", "adan", "rprop")
    },
    "adam of 16 bits": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "adamw, masked by ndim": optax.adamw(0.1, mask=is_matrix),
    "adamw, masked by path": optax.adamw(0.1, mask={"b": False, "k": True, "s": False}),
    "injected": optax.inject_hyperparams(optax.adamw)(0.1),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"b": "a", "k": "b", "s": "a"}
    ),
    "schedule-free": contrib.schedule_free_sgd(0.1),
    "a conditional of the step": optax.conditionally_transform(optax.scale(2.0), lambda s: s > 3),
    "a loop of each coordinate": each(newton),
    "a loop with a counter": each(looped),
    "a compiled function": each(jax.jit(lambda x: jnp.where(x > 0, x, jnp.zeros_like(x)))),
    "dead norms": each(lambda x: (x, jnp.linalg.norm(x.ravel()))[0]),
}


def quick_first(names: Iterable[str], *quick: str) -> list[Any]:
    return [*quick, *(slow(name) for name in names if name not in quick)]


@pytest.mark.parametrize(
    "name", quick_first(ACCEPTED, "adamw, masked by ndim", "a loop with a counter")
)
def test_an_elementwise_optimizer_is_accepted(name: str) -> None:
    check(ACCEPTED[name])


def of_position(x: jax.Array) -> jax.Array:
    return x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)


def while_large(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 1, lambda y: y * 0.5, x)


def while_scalar(x: jax.Array) -> jax.Array:
    return x if x.ndim else lax.while_loop(lambda y: y > 1, lambda y: y * 0.5, x)


def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, y: (c, 2 * y), 0, x)[1] if x.ndim else x


REFUSED = {
    "adafactor": (optax.adafactor(0.1), r"`reduce_sum` to the leaf at \['k'\].*factorized"),
    "lamb": (optax.lamb(0.1), "`reduce_sum`"),
    "clip by global norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        r"`reduce_sum` .*pass `max_norm` to `sharded_server`",
    ),
    "a check for NaN": (optax.apply_if_finite(optax.adam(0.1), 3), "`reduce_and`"),
    "square transposed": (
        each(lambda x: x.T),
        r"`transpose` to the leaf at \['q'\]",
    ),
    "of the position": (each(of_position), "depend on the position"),
    "a constant array": (
        optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, PARAMS)),
        "noise or a constant",
    ),
    "of the size": (each(lambda x: x / x.size), "a constant depends on the shapes"),
    "only large leaves": (
        each(lambda x: x * 2.0 if x.size == 130 * 129 else x),
        "operations depend on the shapes",
    ),
    "a loop of all coordinates": (each(while_large), "`reduce_max`"),
    "a loop of a scalar leaf": (each(while_scalar), r"length of a loop depends on .*\['s'\]"),
    "a scan over rows": (each(scanned), r"scans over the first axis of the leaf at \['b'\]"),
    "a conditional of a scalar leaf": (
        each(lambda x: x if x.ndim else lax.cond(x > 0, lambda x: x, lambda x: -x, x)),
        r"a conditional depends on the leaf at \['s'\]",
    ),
    "a norm in the state": (
        stateful(lambda x: jnp.linalg.norm(x.ravel()), lambda x, s: (x * s, s)),
        "`reduce_sum`|`reshape`",
    ),
    "a scalar leaf in a counter": (
        stateful(lambda x: jnp.zeros(()), lambda x, s: (x, s if x.ndim else s + x)),
        r"a scalar of its state depends on the leaf at \['s'\]",
    ),
    "noise in the state": (
        stateful(lambda x: jax.random.normal(jax.random.key(0), x.shape), lambda x, s: (x + s, s)),
        "position of a coordinate",
    ),
    "an update without gradients": (
        each(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)),
        "its update depends on the positions",
    ),
}


@pytest.mark.parametrize("name", quick_first(REFUSED, "adafactor", "of the position"))
def test_another_optimizer_is_refused_by_name(name: str) -> None:
    tx, message = REFUSED[name]
    params = {"q": jnp.ones((4, 4))} if name == "square transposed" else PARAMS
    refuse(rf"(?s)must be element-wise.*({message})", lambda: check(tx, params=params))


@pytest.mark.parametrize("name", ["of the size", slow("lamb"), slow("only large leaves")])
def test_one_worker_refuses_the_same_optimizers(name: str) -> None:
    """Otherwise a program that was written on one device would fail on two."""
    refuse("must be element-wise", lambda: check(REFUSED[name][0], workers=1))


def test_extra_arguments_are_checked_in_update() -> None:
    plateau = optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(factor=0.5, patience=1))
    check(plateau, value=jnp.float32(1))

    def update(updates: Any, state: Any, params: Any = None, *, mask: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda x: x * mask if x.ndim > 1 else x, updates), state

    whole = optax.GradientTransformationExtraArgs(lambda params: (), update)
    refuse("noise or a constant", lambda: check(whole, mask=jnp.ones((130, 129))))
