"""Streaming DiLoCo against NumPy, its limit, and what a step sends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import diloco, streaming_diloco
from tests.slow import slow
from tests.workers import mesh_of

N = 4
RNG = np.random.default_rng(0)
SIZES = {"a": 3, "b": 5, "c": 2}
TARGETS = {name: RNG.normal(size=(N, size)).astype(np.float32) for name, size in SIZES.items()}
OUTER = {"learning_rate": 0.7, "momentum": 0.5}


def loss(x: Any, target: Any) -> jax.Array:
    return sum(0.5 * jnp.sum((x[name] - target[name][0]) ** 2) for name in SIZES)


def run(tx: Any, count: int, workers: Any = N) -> tuple[list[dict[str, np.ndarray]], Any]:
    """The parameters of all workers after each step, from zero, and the last state."""
    params: Any = jaxcomm.replicate(
        {name: jnp.zeros(size) for name, size in SIZES.items()}, workers
    )
    make = jaxcomm.simulate if workers == N else jaxcomm.make_step
    step, state = make(loss, tx, workers, donate=False), jaxcomm.init(tx, params, workers)
    found = []
    for _ in range(count):
        params, state, _ = step(params, state, TARGETS)
        found.append(jax.tree.map(np.asarray, params.per_worker["data"]))
    return found, state


def by_hand(count: int, period: int, overlap: int, alpha: float, parts: Any) -> list[Any]:
    """The published loop, fragment by fragment, in float64."""
    x = {name: np.zeros((N, size)) for name, size in SIZES.items()}
    anchor = {name: np.zeros(size) for name, size in SIZES.items()}
    velocity = {name: np.zeros(size) for name, size in SIZES.items()}
    under_way: dict[tuple[int, str], np.ndarray] = {}
    found = []
    for t in range(1, count + 1):
        for number, names in enumerate(parts):
            offset = number * period // len(parts)
            for name in names:
                x[name] = x[name] - 0.1 * (x[name] - TARGETS[name])
                if t >= period and (t - offset) % period == 0:
                    velocity[name] = OUTER["momentum"] * velocity[name] + (
                        anchor[name] - x[name].mean(axis=0)
                    )
                    anchor[name] = anchor[name] - OUTER["learning_rate"] * velocity[name]
                    under_way[t + overlap, name] = anchor[name]
                if (t, name) in under_way:
                    x[name] = alpha * x[name] + (1 - alpha) * under_way[t, name]
        found.append(dict(x))
    return found


@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing", "workers"),
    [(2, 1, 0.5, N), slow(3, 3, 0.25, N), slow(1, 2, 0.0, N), slow(2, 1, 0.5, "mesh")],
)
def test_against_numpy(fragments: int, overlap: int, mixing: float, workers: Any) -> None:
    parts = {1: [["a", "b", "c"]], 2: [["a"], ["b", "c"]], 3: [["a"], ["b"], ["c"]]}[fragments]
    numbers = [number for number, names in enumerate(parts) for _ in names]
    tx = streaming_diloco(
        optax.sgd(0.1),
        optax.sgd(**OUTER),
        4,
        fragments=fragments,
        overlap=overlap,
        mixing_factor=mixing,
        split=lambda params: numbers,
    )
    found, _ = run(tx, 14, N if workers == N else mesh_of(N))
    for x, expected in zip(found, by_hand(14, 4, overlap, mixing, parts), strict=True):
        for name in SIZES:
            np.testing.assert_allclose(x[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_fragment_that_arrives_at_once_is_diloco() -> None:
    both = optax.sgd(0.1, momentum=0.9), optax.sgd(**OUTER)
    streaming, _ = run(streaming_diloco(*both, 3, fragments=1), 7)
    plain, _ = run(diloco(*both, 3), 7)
    for x, y in zip(streaming, plain, strict=True):
        for name in SIZES:
            np.testing.assert_allclose(x[name], y[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_step_sends_one_fragment_at_most_and_compressed_if_asked() -> None:
    aggregator = jaxcomm.all_gather_mean(error_feedback(top_k(k=1)))
    counts = 4 * 2  # Steps that were taken, and left out.
    for given, own in ((None, [4 * 3 + counts, 4 * 7 + counts]), (aggregator, None)):
        tx = streaming_diloco(optax.sgd(0.1), optax.sgd(**OUTER), 6, fragments=2, aggregator=given)
        params = jaxcomm.replicate({n: jnp.zeros(size) for n, size in SIZES.items()}, N)
        step, state = jaxcomm.simulate(loss, tx, N), jaxcomm.init(tx, params, N)
        account = jaxcomm.wire.account(step, params, state, TARGETS)
        inside = [c for c in account.collectives if c.path]
        if own:
            assert {c.path for c in inside} == {("cond 1/3",), ("cond 2/3",)}
            assert account.bytes_of_branches == 2 * 3 / 4 * (sum(own) + 4)
            assert account.bytes_per_worker == 2 * 3 / 4 * (max(own) + 4)
            assert account.amortized_bytes_per_worker(1 / 3) == 2 * 3 / 4 * (max(own) / 3 + 4)
        else:
            assert {c.primitive for c in inside if c.shape != (2,)} == {"all_gather"}
            kept = [jax.tree.leaves(f.aggregator.own) for f in run(tx, 10)[1][1].fragments]
            assert all(np.abs(leaf).max() > 0 for leaves in kept for leaf in leaves)


@pytest.mark.slow
def test_equal_leaves_of_two_fragments_are_rounded_apart() -> None:
    # Before its first meeting, a fragment moves by so many equal steps: signs and norms agree.
    aggregator = jaxcomm.all_gather_mean(dither(levels=1, norm="l2"))
    tx = streaming_diloco(optax.sgd(1.0), optax.sgd(1.0), 2, fragments=2, aggregator=aggregator)
    params = jaxcomm.replicate({"a": jnp.zeros(400), "b": jnp.zeros(400)}, 1)
    step = jaxcomm.simulate(lambda x, g: jnp.sum((x["a"] + x["b"]) * g[0]), tx, 1, donate=False)
    state, gradient = jaxcomm.init(tx, params, 1), np.random.default_rng(0).normal(size=(1, 400))
    for _ in range(3):
        params, state, _ = step(params, state, gradient.astype(np.float32))
    kept = [np.asarray(*jax.tree.leaves(fragment.anchor)) != 0 for fragment in state[1].fragments]
    assert all(5 < chosen.sum() < 100 for chosen in kept)
    assert (kept[0] & kept[1]).sum() < kept[0].sum()


def test_leaves_are_split_evenly_in_order() -> None:
    tx = streaming_diloco(optax.sgd(0.1), optax.sgd(1.0), 4, fragments=2)
    params = jaxcomm.replicate([jnp.zeros(s) for s in (1, 1, 6, 2, 2, 8)], 2)
    state = jaxcomm.init(tx, params, 2)[1]
    sizes = [[x.size for x in jax.tree.leaves(fragment.anchor)] for fragment in state.fragments]
    assert sizes == [[1, 1, 6, 2], [2, 8]]
    params = jaxcomm.replicate([jnp.zeros(s) for s in (90, 1, 1)], 2)
    each = jaxcomm.init(streaming_diloco(optax.sgd(0.1), optax.sgd(1.0), 4, fragments=3), params, 2)
    assert [len(jax.tree.leaves(fragment.anchor)) for fragment in each[1].fragments] == [1, 1, 1]


def _make(**options: Any) -> Any:
    given = {"period": 4, "fragments": 2, **options}
    return streaming_diloco(optax.sgd(0.1), given.pop("outer", optax.sgd(1.0)), **given)


def _init(**options: Any) -> Any:
    return jaxcomm.init(_make(**options), jaxcomm.replicate([jnp.zeros(2)] * 2, 2), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _make(fragments=5), "`fragments` must be at most `period`=4"),
        (lambda: _make(aggregator=jaxcomm.mean("ici")), r"averages over \['ici'\].*'data'"),
        (lambda: _make(axis_name=("data", "data")), "several distinct axes"),
        (lambda: _make(aggregator=0.7), "`aggregator` must be an optax transformation, got 0.7"),
        (lambda: _make(outer=0.7), "`outer` must be an optax transformation"),
        (lambda: _init(fragments=3), "Each leaf needs a fragment of 3"),
        (lambda: _init(split=lambda params: [0, 0]), "Each leaf needs a fragment of 2"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
