"""The table of losses, and what they are made of."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TIME, WIDTH, CLASSES = 16, 4, 3, 5


class Loss(NamedTuple):
    """A loss `(params, batch) -> value`, and what it is called with in addition.

    With `model_state` it is `(params, model_state, batch) -> (value, model_state)`. With `key`, it
    takes a key as its last argument, and with `shared` an argument of that name.
    """

    call: Callable[..., Any]
    params: Any
    batch: Any
    model_state: Any = None
    key: bool = False
    shared: Any = None


LOSSES: dict[str, Callable[[], Loss]] = {}
WITH_STATE: set[str] = set()
WITH_KEY: set[str] = set()


def listed(*, key: bool = False, model_state: bool = False) -> Any:
    """Adds a loss to the table: whoever reads the names builds no model."""

    def add(make: Callable[[], Loss]) -> Callable[[], Loss]:
        name = make.__name__
        WITH_KEY.update([name] if key else [])
        WITH_STATE.update([name] if model_state else [])
        LOSSES[name] = functools.cache(lambda: make()._replace(key=key))
        return LOSSES[name]

    return add


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def labels(*shape: int, classes: int = CLASSES) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, classes, size=shape), jnp.int32)


def sequences() -> tuple[jax.Array, jax.Array]:
    return draw(ROWS, TIME, WIDTH), draw(ROWS, seed=2)


def third_party(call: Callable[..., Any]) -> Callable[..., Any]:
    """Libraries promote dtypes and ranks where this project's tests do not allow it."""

    @functools.wraps(call)
    def lenient(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return call(*args)

    return lenient
