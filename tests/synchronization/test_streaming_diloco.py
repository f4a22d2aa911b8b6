"""Streaming DiLoCo against NumPy, its fragments, and what a step sends."""

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
from jaxcomm.synchronization import streaming_diloco
from tests.slow import slow
from tests.synchronization.towards import account, run

N = 4
RNG = np.random.default_rng(0)
SIZES = {"a": 3, "b": 5, "c": 2}
TARGETS = {name: RNG.normal(size=(N, size)).astype(np.float32) for name, size in SIZES.items()}
OUTER = {"learning_rate": 0.7, "momentum": 0.5}


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
    ("fragments", "overlap", "mixing"), [(2, 1, 0.25), slow(3, 3, 0.5), slow(1, 2, 0.0)]
)
def test_against_numpy(fragments: int, overlap: int, mixing: float) -> None:
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
    found, _ = run(tx, TARGETS, 14)
    for name, rows in found.items():
        expected = [x[name] for x in by_hand(14, 4, overlap, mixing, parts)]
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_step_sends_at_most_one_fragment_optionally_compressed() -> None:
    def make(aggregator: Any = None) -> Any:
        both = optax.sgd(0.1), optax.sgd(**OUTER)
        return streaming_diloco(*both, 6, fragments=2, aggregator=aggregator)

    counts = 4 * 2  # Steps that were taken, and skipped.
    own, sent = [4 * 3 + counts, 4 * 7 + counts], account(make(), TARGETS)
    assert {c.path for c in sent.collectives} == {("cond 1/3",), ("cond 2/3",)}
    assert sent.bytes_of_branches == 2 * 3 / 4 * sum(own)
    assert sent.bytes_per_worker == 2 * 3 / 4 * max(own)
    assert sent.amortized_bytes_per_worker(1 / 3) == 2 * 3 / 4 * max(own) / 3
    compressed = make(jaxcomm.all_gather_mean(error_feedback(top_k(k=1))))
    inside = account(compressed, TARGETS).collectives
    assert {c.kind for c in inside if c.shape != (2,)} == {"all_gather"}
    for fragment in run(compressed, TARGETS, 10)[1][1].fragments:
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(fragment.aggregator.own))


@pytest.mark.slow
def test_equal_leaves_of_two_fragments_are_rounded_independently() -> None:
    # Before its first meeting, a fragment moves by so many equal steps: signs and norms agree.
    aggregator = jaxcomm.all_gather_mean(dither(levels=1, norm="l2"))
    tx = streaming_diloco(optax.sgd(0.1), optax.sgd(1.0), 2, fragments=2, aggregator=aggregator)
    target = np.random.default_rng(0).normal(size=(1, 400)).astype(np.float32)
    _, state = run(tx, {"a": target, "b": target}, 3)
    kept = [np.asarray(*jax.tree.leaves(fragment.anchor)) != 0 for fragment in state[1].fragments]
    assert all(5 < chosen.sum() < 100 for chosen in kept)
    assert (kept[0] & kept[1]).sum() < kept[0].sum()


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [((1, 1, 6, 2, 2, 8), [[1, 1, 6, 2], [2, 8]]), ((90, 1, 1), [[90], [1], [1]])],
)
def test_leaves_are_split_evenly_in_order(leaves: tuple, expected: list[list[int]]) -> None:
    tx = streaming_diloco(optax.sgd(0.1), optax.sgd(1.0), 4, fragments=len(expected))
    params = jaxcomm.replicate([jnp.zeros(size) for size in leaves], 2)
    fragments = jaxcomm.init(tx, params, 2)[1].fragments
    assert [[x.size for x in jax.tree.leaves(each.anchor)] for each in fragments] == expected
