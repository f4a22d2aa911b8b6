"""The laws of `jaxcomm.testing` hold of every row, and each of them can fail."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm
from jaxcomm import (
    Aggregator,
    Claims,
    Codec,
    Context,
    Entries,
    Fast,
    Memory,
    PerWorker,
    gossip,
    scattered,
)
from jaxcomm._axis import is_simulated
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.testing import check_aggregator, check_codec, check_gossip


# Codecs of integers between two levels, and what is wrong with them.
class Levels(NamedTuple):
    codes: jax.Array


class Peak(NamedTuple):
    max_abs: Any


def whole(
    *,
    levels: Callable[[int], int] = lambda workers: 127 // workers,
    round_: Callable[[Context, jax.Array], jax.Array] | None = None,
    **changes: Any,
) -> Codec:
    """Rounds to int8, relative to the largest magnitude over workers."""

    def stochastic(context: Context, x: jax.Array) -> jax.Array:
        return jnp.floor(x + jax.random.uniform(context.keys.private, x.shape))

    rounded = round_ or stochastic

    def encode(context: Context, x: jax.Array) -> tuple[Levels, Memory]:
        peak, most = context.statistics.max_abs, levels(context.workers)
        scaled = jnp.clip(rounded(context, x / jnp.where(peak > 0, peak, 1) * most), -most, most)
        return Levels(scaled.astype(jnp.int8)), context.memory

    def decode(context: Context, payload: Levels) -> jax.Array:
        step = context.statistics.max_abs / (levels(context.workers) * context.count)
        return payload.codes.astype(jnp.float32) * step

    codec = Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: Peak(jnp.max(jnp.abs(x))),
        reduce_statistics=Peak("max"),
        combine="sum",
        claims=Claims(variance=lambda size, workers: size * workers / (4 * levels(workers) ** 2)),
    )
    return codec.replace(**changes)


def with_memory(memory: Memory, **changes: Any) -> Codec:
    return whole(init=lambda x: memory, **changes)


def _encode_then(change: Callable[[Memory], Memory], codec: Codec) -> Codec:
    def encode(context: Context, x: jax.Array) -> tuple[Any, Memory]:
        payload, after = codec.encode(context, x)
        return payload, change(after)

    return codec.replace(encode=encode)


def _decoded(change: Callable[[Context, jax.Array], jax.Array], codec: Codec) -> Codec:
    return codec.replace(
        decode=lambda context, payload: change(context, codec.decode(context, payload))
    )


class Halves(NamedTuple):
    at: jax.Array
    value: jax.Array


def _same_entry_twice() -> Codec:
    """The largest coordinate of each half."""

    def encode(context: Context, x: jax.Array) -> tuple[Halves, Memory]:
        flat = x.ravel()
        at = jnp.argmax(jnp.abs(flat)).astype(jnp.uint32)
        return Halves(at, flat[at]), context.memory

    def entries(context: Context, payload: Halves) -> Entries:
        half = payload.value / (2 * context.count)
        return Entries(jnp.stack([payload.at] * 2), jnp.stack([half] * 2))

    return Codec(encode=encode, decode=scattered(entries), fast=Fast(entries=entries))


def _private(context: Context, x: jax.Array) -> jax.Array:
    return x + jax.random.uniform(context.keys.private)


def _counted() -> Codec:
    """Its payload depends on how often it was traced."""
    calls: list[None] = []

    def encode(context: Context, x: jax.Array) -> tuple[Levels, Memory]:
        calls.append(None)
        return Levels(jnp.round(x).astype(jnp.int8) + jnp.int8(len(calls))), context.memory

    return Codec(encode=encode, decode=lambda context, payload: payload.codes.astype(jnp.float32))


def _called_again() -> Codec:
    """Its payload depends on how often its program ran."""
    calls: list[None] = []

    def number(x: np.ndarray) -> np.ndarray:
        calls.append(None)
        return np.full_like(x, len(calls))

    def encode(context: Context, x: jax.Array) -> tuple[Levels, Memory]:
        counted = jax.pure_callback(number, x, x, vmap_method="expand_dims")
        return Levels(counted.astype(jnp.int8)), context.memory

    return Codec(encode=encode, decode=lambda context, payload: payload.codes.astype(jnp.float32))


def _different_under_vmap() -> Codec:
    """It behaves differently under `jax.vmap`."""

    @jax.custom_batching.custom_vmap
    def codes(x: jax.Array) -> jax.Array:
        return jnp.round(x).astype(jnp.int8)

    @codes.def_vmap
    def mapped(axis_size: int, in_batched: Any, x: jax.Array) -> Any:
        return jnp.ceil(x).astype(jnp.int8), True

    return Codec(
        encode=lambda context, x: (Levels(codes(x)), context.memory),
        decode=lambda context, payload: payload.codes.astype(jnp.float32),
    )


def _finalized_differently() -> Codec:
    """Its shared memory after a step differs by worker."""

    def finalize(context: Context, payload: Any, mean: jax.Array) -> tuple[jax.Array, Memory]:
        own = jax.random.uniform(context.keys.private)
        return mean, context.memory._replace(shared=own)

    return with_memory(Memory(shared=jnp.zeros(())), finalize=finalize)


def _about_the_mean() -> Codec:
    """Claims that coordinates are independent, though all depend on their mean."""
    codec = whole(layout="shared_statistics")

    def encode(context: Context, x: jax.Array) -> tuple[Levels, Memory]:
        return codec.encode(context, x - jnp.mean(x))

    return codec.replace(encode=encode)


COUNT = Memory(shared=jnp.zeros(()))
OWN = Memory(own=jnp.zeros(()))
BROKEN_CODECS: dict[str, tuple[str, Callable[[], Codec]]] = {
    "rounds towards zero": ("unbiased", lambda: whole(round_=lambda context, x: jnp.trunc(x))),
    "claims half the variance": (
        "variance",
        lambda: whole(claims=Claims(variance=lambda size, workers: 1e-5)),
    ),
    "claims too much contraction": (
        "contraction",
        lambda: top_k(k=4).replace(claims=Claims(contraction=lambda size, workers: 0.5)),
    ),
    "wraps": ("sums", lambda: whole(levels=lambda workers: 127)),
    "forgets the count": (
        "sums",
        lambda: _decoded(lambda context, x: x * context.count, whole()),
    ),
    "decodes by the private key": ("receivers decode", lambda: _decoded(_private, whole())),
    "decodes by its memory": (
        "receivers decode",
        lambda: _decoded(lambda context, x: x + context.memory.own, with_memory(OWN)),
    ),
    "tells a coordinate twice": ("entries", _same_entry_twice),
    "measures no NaN": (
        "NaN shows",
        lambda: whole(
            measure=lambda context, x: Peak(jnp.nanmax(jnp.abs(x))),
            fast=Fast(exposes_nonfinite=("measure",)),
        ),
    ),
    "encodes a NaN as an integer": (
        "NaN shows",
        lambda: whole(fast=Fast(exposes_nonfinite=("encode",))),
    ),
    "decodes NaN statistics to numbers": (
        "NaN shows",
        lambda: _decoded(lambda context, x: jnp.nan_to_num(x), whole()).replace(
            fast=Fast(exposes_nonfinite=("decode",))
        ),
    ),
    "draws again in each call": ("same keys", _called_again),
    "draws again in each trace": ("jit", _counted),
    "rounds otherwise under vmap": ("vmap", _different_under_vmap),
    "changes what is shared in encode": (
        "encode leaves shared memory",
        lambda: _encode_then(
            lambda after: after._replace(shared=after.shared + 1), with_memory(COUNT)
        ),
    ),
    "shares its own": ("finalize is equal on all workers", _finalized_differently),
    "remembers in another dtype": (
        "memory types",
        lambda: _encode_then(
            lambda after: after._replace(own=after.own.astype(jnp.bfloat16)), with_memory(OWN)
        ),
    ),
    "decodes to bfloat16": (
        "decoded",
        lambda: _decoded(lambda context, x: x.astype(jnp.bfloat16), whole()),
    ),
    "depends on all that it says it does not": ("layout", _about_the_mean),
    "lies as no codec does": ("layout", lambda: whole(layout="joind")),
    "has a mean for a statistic, and says that it is shared": (
        "layout",
        lambda: whole(
            layout="shared_statistics", measure=lambda context, x: Peak(jnp.mean(jnp.abs(x)))
        ),
    ),
    "sends a number": ("payload", lambda: whole(encode=lambda context, x: ((1.0,), Memory()))),
    "agrees on a mean": ("statistics", lambda: whole(reduce_statistics=Peak("mean"))),
    "measures in bfloat16": (
        "statistics",
        lambda: whole(measure=lambda context, x: Peak(jnp.max(x).astype(jnp.bfloat16))),
    ),
}


def named(law: str) -> str:
    return re.escape(f"law {law!r}: ")


@pytest.mark.slow
def test_the_honest_codec_passes() -> None:
    check_codec(whole(), size=16, workers=[3])
    check_codec(with_memory(OWN), size=16, workers=[2])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BROKEN_CODECS)
def test_a_broken_codec_is_caught(mistake: str) -> None:
    law, codec = BROKEN_CODECS[mistake]
    with pytest.raises(AssertionError, match=named(law)):
        check_codec(codec(), size=16, workers=[3])


def changed(
    change: Callable[[Any, Any], Any], tx: Any = None, *, before: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The mean, with updates and state changed by `change`."""
    inner = jaxcomm.mean() if tx is None else tx

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if before:
            updates, state = change(updates, state)
            return inner.update(updates, state, params, **extra)
        return change(*inner.update(updates, state, params, **extra))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def each(fn: Callable[[jax.Array], jax.Array]) -> Callable[[Any, Any], Any]:
    return lambda updates, state: (jax.tree.map(fn, updates), state)


def _worker() -> jax.Array:
    return lax.axis_index("data")


def _first_alone(x: jax.Array) -> jax.Array:
    return jnp.where(_worker() == 0, x, jnp.zeros_like(x))


def _doubled_on_a_mesh(x: jax.Array) -> jax.Array:
    return x * 2 if jax.sharding.get_abstract_mesh().manual_axes else x


def _traced_thrice() -> Any:
    """Once in each mode, and once more without jit."""
    traces: list[None] = []

    def change(updates: Any, state: Any) -> Any:
        traces.append(None)
        return jax.tree.map(lambda x: x if len(traces) <= 3 else x + 1, updates), state

    return changed(change)


def _swallowed(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)


def _swallowed_on_one(x: jax.Array) -> jax.Array:
    return jnp.where((_worker() == 0) & jnp.isnan(x), jnp.zeros_like(x), x)


def _remembers_nan() -> Any:
    """A mean that keeps its input, NaN or not, as memory of each worker."""

    def init(params: Any) -> PerWorker:
        return PerWorker({"data": jax.tree.map(lambda x: jnp.zeros_like(x)[None], params)})

    def update(updates: Any, state: PerWorker, params: Any = None, **extra: Any) -> Any:
        results, _ = jaxcomm.mean().update(updates, optax.EmptyState())
        return results, PerWorker({"data": jax.tree.map(lambda x: x[None], updates)})

    return optax.GradientTransformationExtraArgs(init, update)


def _weighted(updates: Any, state: Any, params: Any = None, *, weight: Any = 1.0) -> Any:
    results, state = jaxcomm.mean().update(updates, state)
    return jax.tree.map(lambda x: x * jnp.asarray(weight, x.dtype), results), state


def _grown(updates: Any, state: Any, params: Any = None, *, weight: Any = 1.0) -> Any:
    results, state = jaxcomm.mean().update(updates, state, weight=weight)
    factor = 1 + 1e-3 * lax.psum(jnp.asarray(weight, jnp.float32), "data")
    return jax.tree.map(lambda x: x * factor, results), state


def _counting(dtype: Any) -> Any:
    """A mean with a counter, which comes back in another dtype."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return jaxcomm.mean().update(updates, optax.EmptyState())[0], (state + 1).astype(dtype)

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros((), jnp.int32), update)


class Broken(NamedTuple):
    """An aggregator with a mistake, the law that catches it, and what is claimed."""

    law: str
    make: Callable[[], Any]
    claimed: dict[str, Any] = {}  # noqa: RUF012


BROKEN_AGGREGATORS = {
    "half a mean": Broken(
        "resolution",
        lambda: changed(each(lambda x: x / 2)),
        {"resolution": 0.0, "nonfinite": "coordinate"},
    ),
    "a worker left out": Broken("nonfinite", lambda: changed(each(_first_alone), before=True)),
    "another mean on a mesh": Broken("modes", lambda: changed(each(_doubled_on_a_mesh))),
    "another mean in each trace": Broken("jit", _traced_thrice),
    "half a mean of draws": Broken(
        "unbiased",
        lambda: changed(each(lambda x: x / 2), jaxcomm.global_qsgd(levels=3)),
        {"unbiased": True},
    ),
    "biased rounding": Broken(
        "unbiased",
        lambda: jaxcomm.all_reduce_mean(whole(round_=lambda context, x: jnp.trunc(x))),
        {"unbiased": True},
    ),
    "no worker averages": Broken("replicas", lambda: optax.identity()),
    "a NaN swallowed": Broken(
        "nonfinite", lambda: changed(each(_swallowed), before=True), {"nonfinite": "coordinate"}
    ),
    "a NaN swallowed on one worker": Broken(
        "nonfinite", lambda: changed(each(_swallowed_on_one)), {"nonfinite": "coordinate"}
    ),
    "a NaN in one coordinate alone": Broken("nonfinite", lambda: jaxcomm.mean()),
    "a NaN remembered": Broken(
        "memory after nonfinite", _remembers_nan, {"nonfinite": "coordinate"}
    ),
    "a state of another dtype": Broken("state types", lambda: _counting(jnp.float32)),
    "an update of another dtype": Broken(
        "update types", lambda: changed(each(lambda x: x.astype(jnp.float16)))
    ),
    "a leaf without elements that loses its shape": Broken(
        "shapes",
        lambda: changed(each(lambda x: x if x.size else x.ravel())),
        {"nonfinite": "coordinate"},
    ),
    "a smaller variance than it has": Broken(
        "variance",
        lambda: jaxcomm.global_qsgd(levels=3),
        {"unbiased": True, "variance": lambda size, workers: 0.01},
    ),
    "the first worker counts twice": Broken(
        "permutation",
        lambda: changed(
            each(lambda x: jnp.where(_worker() == 0, 2, 1).astype(x.dtype) * x), before=True
        ),
        {"nonfinite": "coordinate"},
    ),
    "an update of another shape": Broken(
        "update types", lambda: changed(each(lambda x: x.ravel()))
    ),
    "zeros that move": Broken(
        "zeros", lambda: changed(each(lambda x: x + 1)), {"nonfinite": "coordinate"}
    ),
    "a weight that scales": Broken(
        "weights",
        lambda: optax.GradientTransformationExtraArgs(jaxcomm.mean().init, _weighted),
        {"nonfinite": "coordinate", "weighted": True},
    ),
    "a mean that grows with the weights": Broken(
        "equal weights",
        lambda: optax.GradientTransformationExtraArgs(jaxcomm.mean().init, _grown),
        {"nonfinite": "coordinate", "weighted": True},
    ),
}


@pytest.mark.slow
def test_the_honest_aggregators_pass() -> None:
    params = jnp.zeros((2, 4))
    check_aggregator(_counting(jnp.int32), params=params, resolution=0.0, nonfinite="coordinate")
    coded = jaxcomm.all_reduce_mean(whole())
    check_aggregator(coded, params=params, resolution=1 / 42, unbiased=True)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BROKEN_AGGREGATORS)
def test_a_broken_aggregator_is_caught(mistake: str) -> None:
    law, make, claimed = BROKEN_AGGREGATORS[mistake]
    with pytest.raises(AssertionError, match=named(law)):
        check_aggregator(make(), params=jnp.zeros((2, 4)), **claimed)


def _mixed(of: Callable[[jax.Array, jax.Array], jax.Array]) -> Aggregator:
    """Gossip whose change is a function of the step and the difference to the neighbors."""

    def method(mixing_step: Any, memory: Any, x: Any, steps: Any) -> gossip.Mixed:
        differences, disagreement = mixing_step.weighted_differences(x)
        return gossip.Mixed([*map(of, steps, differences)], memory, disagreement)

    mixing = gossip.to_mixing(gossip.ring(4))
    return gossip.gossiped(mixing, lambda units: (), method)


def _spoiling() -> Aggregator:
    tx = _mixed(lambda step, difference: step + difference)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        changes, state = tx.update(updates, state, params, **extra)
        return jax.tree.map(lambda change, x: change + 0 * x, changes, updates), state

    return Aggregator(tx.init, update, "data", "gossip")


BROKEN_GOSSIP: dict[str, tuple[Callable[[], Aggregator], str]] = {
    "drifts": (lambda: _mixed(lambda a, b: a + b + 0.01), "agreement"),
    "steps twice": (lambda: _mixed(lambda a, b: 2 * a + b), "mean"),
    "mixes too little": (lambda: _mixed(lambda a, b: a + 0.01 * b), "consensus"),
    "keeps a NaN": (_spoiling, "nonfinite"),
    "mixes less on a mesh": (
        lambda: _mixed(lambda a, b: a + (b if is_simulated("data") else b / 2)),
        "modes",
    ),
}


@pytest.mark.parametrize("mistake", BROKEN_GOSSIP)
def test_broken_gossip_is_caught(mistake: str) -> None:
    make, law = BROKEN_GOSSIP[mistake]
    with pytest.raises(AssertionError, match=f"law '{law}'"):
        check_gossip(make())
