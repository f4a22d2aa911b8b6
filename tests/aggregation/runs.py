"""Several steps of an aggregator or of a training, what they send, and calls that are refused."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.wire._account import Account
from tests.workers import Mode, abstract, aggregator, count, initial, mesh_of

WORKERS = 4
WHERE = pytest.mark.parametrize("where", [mesh_of(WORKERS), WORKERS], ids=["mesh", "simulated"])
"""Where four workers are, for `prepared`."""


def steps(
    tx: Any, given: Iterable[Any], mode: Mode = "vmap", weights: Any = None, state: Any = None
) -> Iterator[tuple[Any, Any]]:
    """Every worker's results, and the state, after each of the updates [workers, ...]."""
    for number, each in enumerate(given):
        updates = jax.tree.map(jnp.asarray, each)
        workers = count(updates)
        weight = np.ones(workers) if weights is None else weights[number]
        run = aggregator(tx, workers, mode, weighted=weights is not None)
        state = initial(tx, updates, mode) if state is None else state
        results, state = run(updates, state, jnp.asarray(weight, jnp.float32))
        yield results, state


def last(tx: Any, given: Iterable[Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """The results and the state of the last one."""
    *_, both = steps(tx, given, *args, **options)
    return both


def _program(tx: Any, updates: Any, mode: Mode, weighted: bool) -> tuple[Any, tuple[Any, ...]]:
    given = updates, abstract(tx, updates, mode), jnp.ones(count(updates))
    return aggregator(tx, count(updates), mode, weighted), given


def sent(tx: Any, updates: Any, mode: Mode = "checked", weighted: bool = False) -> Account:
    """What an update sends."""
    run, given = _program(tx, updates, mode, weighted)
    return jaxcomm.wire.account(run, *given)


def compiled(tx: Any, updates: Any, mode: Mode = "checked", weighted: bool = False) -> Account:
    """What the compiled program of an update sends."""
    updates = jax.tree.map(jnp.asarray, updates)
    run = aggregator(tx, count(updates), mode, weighted)
    given = updates, initial(tx, updates, mode), jnp.ones(count(updates))
    return jaxcomm.wire.account(run.lower(*given))


def prepared(loss: Any, tx: Any, params: Any, where: Any, **options: Any) -> tuple[Any, Any]:
    """A step on a mesh or of simulated workers, and the first state."""
    make: Any = jaxcomm.make_step if isinstance(where, Mesh) else jaxcomm.simulate
    axis = {name: x for name, x in options.items() if name == "axis_name"}
    return make(loss, tx, where, donate=False, **options), jaxcomm.init(tx, params, where, **axis)


def averaged(tx: Any, **extra: Any) -> Callable[[Any], Any]:
    """An update that starts from `tx.init`."""
    return lambda x: tx.update(x, tx.init(x), **extra)[0]


def simulated(tx: Any, updates: Any, **extra: Any) -> Any:
    """The results of one such update under `jax.vmap`."""
    return jax.vmap(averaged(tx, **extra), axis_name="data")(updates)


def over(mesh: Any, axes: Any, fn: Callable[[Any], Any], **options: Any) -> Any:
    """The function of each worker's own updates, whose results are equal, under `jax.jit`."""
    local = lambda rows: fn(jax.tree.map(lambda x: x[0], rows))  # noqa: E731
    options = {"out_specs": P(), **options}
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(axes), **options))


def require_same(one: Any, other: Any) -> None:
    """Checks that structures, shapes, dtypes and all bits are equal; of keys, their words."""

    def words(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    one, other = jax.tree.map(words, (one, other))
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    chex.assert_trees_all_equal(one, other)


def refuse(message: str, call: Callable[[], Any]) -> None:
    """Checks that the call is an error with this message."""
    with pytest.raises(ValueError, match=message):
        call()
