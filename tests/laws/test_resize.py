"""State for another number of workers: no residual is lost, and training goes on."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression import compressed_memory
from jaxcomm.compression.feedback import error_feedback, momentum
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import nonzero, top_k
from jaxcomm.synchronization import local_sgd
from tests.cases import CASES, Case
from tests.cases._local import LOCAL, LocalCase
from tests.laws.steps import given_gradients
from tests.slow import slow
from tests.workers import gradients

SHAPES = {"a": (6, 5), "b": (7,), "c": (10,), "d": (7,), "e": ()}
COUNTS = [(8, 4), (4, 3), slow(4, 8), slow(3, 1), slow(1, 5)]


@pytest.fixture(autouse=True)
def _promotion_that_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def start() -> Any:
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def batch_of(workers: int, seed: int = 0) -> Any:
    rng = np.random.default_rng([1, seed])
    return {k: jnp.asarray(rng.normal(size=(workers, *s)), jnp.float32) for k, s in SHAPES.items()}


def given(loss_fn: Any, params: Any, batch: Any) -> Any:
    """The gradients are the batch."""
    del loss_fn, params
    return jnp.zeros((), jnp.float32), jax.tree.map(lambda x: x[0], batch)


def after(tx: Any, where: Any, params: Any, state: Any, steps: int = 2) -> Any:
    make = jaxcomm.simulate if isinstance(where, int) else jaxcomm.make_step
    step = make(lambda p, b: jnp.zeros(()), tx, where, gradients=given, donate=False)
    workers = where if isinstance(where, int) else where.size
    for number in range(steps):
        params, state, _ = step(params, state, batch_of(workers, number))
    return params, state


def trained(tx: Any, where: Any, steps: int = 2) -> Any:
    return after(tx, where, start(), jaxcomm.init(tx, start(), where), steps)


def words(tree: Any) -> Any:
    """Keys as integers."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )


def types(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_aggregator_goes_on(case: Case) -> None:
    """The state is that of the new workers, finite, and equal where it was equal."""
    updates = gradients(8)
    params = jax.tree.map(lambda x: x[0], updates)
    whole, step = given_gradients(case, 8)
    params, state, _ = step(params, jaxcomm.init(whole, params, 8), updates)
    for workers in (3, 8):
        resized, same = jaxcomm.resize_workers(whole, state, params, workers)
        assert types(resized) == types(jaxcomm.init(whole, params, workers))
        jax.tree.map(np.testing.assert_array_equal, same, params)
        few = jax.tree.map(lambda x, n=workers: x[:n], updates)
        moved, _, _ = given_gradients(case, workers)[1](params, resized, few)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(moved))


def residual_of(state: Any, ownership: str = "block") -> np.ndarray:
    """What later updates make up for: the mean of residuals, plus those of owners, flat."""
    own = state.own.per_worker["data"]
    total = []
    for memory in own:
        if not hasattr(memory, "sent"):
            total.append(np.asarray(memory.kept, np.float64).mean(axis=0).ravel())
            continue
        sent = np.asarray(memory.sent.kept, np.float64).mean(axis=0)
        rows = sent + np.asarray(memory.mean.kept, np.float64)
        total.append(rows.T.ravel() if ownership == "cyclic" else rows.ravel())
    return total


def decoded(part: Any) -> np.ndarray:
    """What 8 bits of each worker stand for, in float64."""
    scale = np.asarray(part.statistics.max_abs, np.float64)[..., None]
    return np.asarray(part.payload.codes, np.float64) * scale / 127


EIGHT_BITS = compressed_memory(error_feedback(top_k(ratio=0.2)), dither(bits=8))


@pytest.mark.parametrize(("old", "new"), [(3, 1), slow(4, 8), slow(8, 3)])
def test_a_memory_in_8_bits_keeps_its_mean(old: int, new: int) -> None:
    """Within one step of the codes, divided by the number of workers, of which one rounds last."""
    tx = jaxcomm.all_gather_mean(EIGHT_BITS, scope="bucket")
    params, state = trained(tx, old)
    resized, _ = jaxcomm.resize_workers(tx, state, params, new)
    again, _ = jaxcomm.resize_workers(tx, state, params, new)
    jax.tree.map(np.testing.assert_array_equal, words(resized), words(again))
    before, found = (s.own.per_worker["data"][0].kept for s in (state, resized))
    step = np.asarray(found.statistics.max_abs, np.float64).max() / 127
    error = np.abs(decoded(found).mean(axis=0) - decoded(before).mean(axis=0))
    assert 0 < error.max() <= (step + 1e-6) / new
    assert np.abs(decoded(before).mean(axis=0)).max() > 10 * step
    np.testing.assert_allclose(found.square_norm, (decoded(found) ** 2).sum(axis=1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ownership", ["block", slow("cyclic")])
def test_quantized_slices_are_resliced(ownership: str) -> None:
    """The owners' residuals, and the mean of the senders', within a step of the codes."""
    tx = jaxcomm.two_stage_mean(EIGHT_BITS, scope="bucket", ownership=ownership)
    params, state = trained(tx, 8)
    resized, _ = jaxcomm.resize_workers(tx, state, params, 3)
    size = sum(int(np.prod(s)) for s in SHAPES.values())

    def whole(state: Any) -> np.ndarray:
        (memory,) = state.own.per_worker["data"]
        rows = decoded(memory.sent.kept).mean(axis=0) + decoded(memory.mean.kept)
        return (rows.T if ownership == "cyclic" else rows).ravel()

    (memory,) = resized.own.per_worker["data"]
    scales = memory.sent.kept.statistics.max_abs / 3, memory.mean.kept.statistics.max_abs
    step = sum(float(jnp.max(x)) for x in scales) / 127
    np.testing.assert_allclose(whole(resized)[:size], whole(state)[:size], rtol=0, atol=step)
    assert np.abs(whole(state)).max() > 10 * step


@pytest.mark.parametrize(("old", "new"), COUNTS)
@pytest.mark.parametrize("method", ["gathered", slow("block"), slow("cyclic")])
def test_the_mean_of_residuals_is_kept(method: str, old: int, new: int) -> None:
    """One vector of all leaves, of which the last rows are padded."""
    codec = error_feedback(top_k(ratio=0.2))
    if method == "gathered":
        tx = jaxcomm.all_gather_mean(codec, scope="bucket")
    else:
        tx = jaxcomm.two_stage_mean(codec, scope="bucket", ownership=method)
    _, state = trained(tx, old)
    resized, _ = jaxcomm.resize_workers(tx, state, start(), new)
    size = sum(int(np.prod(s)) for s in SHAPES.values())
    (before,), (found,) = residual_of(state, method), residual_of(resized, method)
    assert np.abs(before).max() > 0.1
    np.testing.assert_allclose(found[:size], before[:size], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found[size:], 0)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["bucket", "leaf"])
@pytest.mark.parametrize(("old", "new"), COUNTS)
def test_slices_are_resliced(old: int, new: int, scope: str) -> None:
    """What is sent in the end: updates, and the residuals at both ends, add up to all gradients."""
    rate, codec = 0.25, error_feedback(top_k(ratio=0.25))
    tx = jaxcomm.sharded_server(optax.sgd(rate, momentum=0.5), codec, codec, scope=scope)
    params, state = trained(tx, old, steps=4)
    resized, _ = jaxcomm.resize_workers(tx, state, params, new)
    back, _ = jaxcomm.resize_workers(tx, resized, params, old)

    def moments(state: Any) -> Any:
        return {
            k: np.asarray(x.per_worker["data"]).ravel()[: int(np.prod(SHAPES[k]))]
            for k, x in state.inner[0].trace.items()
        }

    for name, x in moments(state).items():
        np.testing.assert_array_equal(moments(resized)[name], x)
        assert np.any(x)

    def mean_of_senders(state: Any) -> list[np.ndarray]:
        return [np.asarray(x, np.float64).mean(axis=0) for x in jax.tree.leaves(state.push)]

    for x, y in zip(mean_of_senders(back), mean_of_senders(state), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    assert any(np.any(x) for x in mean_of_senders(state))
    for x, y in zip(jax.tree.leaves(back.pull), jax.tree.leaves(state.pull), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    # With gradients of zero, residuals are sent in the end, whatever the number of workers.
    flushed = []
    for count, of_count in ((old, state), (new, resized)):
        quiet = jax.tree.map(lambda x: x * 0, batch_of(count))
        step = jaxcomm.simulate(
            lambda p, b: jnp.zeros(()), tx, count, gradients=given, donate=False
        )
        moved = params
        for _ in range(60):
            moved, of_count, _ = step(moved, of_count, quiet)
        flushed.append(moved)
    for x, y in zip(*map(jax.tree.leaves, flushed), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def workers_on(workers: int, kind: AxisType) -> Mesh:
    devices = jax.devices()[:workers]
    return jax.make_mesh((workers,), ("data",), axis_types=(kind,), devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (8, 1)], ids=str)
def test_from_mesh_to_mesh(sizes: tuple[int, int], kind: AxisType) -> None:
    """Memory of senders and of owners, and state that is equal on all; parameters move too."""
    tx = optax.chain(
        jaxcomm.skip_nonfinite(jaxcomm.two_stage_mean(error_feedback(top_k(k=3)))),
        optax.adam(0.1),
    )
    old, new = (workers_on(n, kind) for n in sizes)
    params, state = trained(tx, old)
    resized, placed = jaxcomm.resize_workers(tx, state, params, new)
    for x in jax.tree.leaves((resized, placed)):
        assert x.sharding.mesh == new
    moved, _ = after(tx, new, placed, resized)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(moved))
    np.testing.assert_array_equal(resized[1][0].mu["a"], state[1][0].mu["a"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_slices_and_own_parameters_from_mesh_to_mesh(kind: AxisType) -> None:
    old, new = (workers_on(n, kind) for n in (8, 3))
    codec = error_feedback(top_k(k=3))
    tx = jaxcomm.sharded_server(optax.sgd(0.1, momentum=0.5), codec, codec)
    params, state = trained(tx, old)
    resized, placed = jaxcomm.resize_workers(tx, state, params, new)
    simulated, _ = jaxcomm.resize_workers(tx, state, params, 3)
    for x, y in zip(*map(jax.tree.leaves, (words(resized), words(simulated))), strict=True):
        np.testing.assert_array_equal(x, y)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after(tx, new, placed, resized)[0]))

    local = optax.chain(jaxcomm.per_worker(optax.sgd(0.1, momentum=0.5)), local_sgd(3))
    own = jaxcomm.replicate(start(), old)
    own, state = after(local, old, own, jaxcomm.init(local, own, old))
    resized, placed = jaxcomm.resize_workers(local, state, own, new)
    np.testing.assert_array_equal(
        placed.per_worker["data"]["a"],
        jaxcomm.replicate(jaxcomm.consensus(own), 3).per_worker["data"]["a"],
    )
    assert all(
        np.all(np.isfinite(x)) for x in jax.tree.leaves(after(local, new, placed, resized)[0])
    )


def test_a_window_keeps_its_mean() -> None:
    """Four mini-batches, of which two come after the change, have equal weights."""
    tx = jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), 4)
    params, state = trained(tx, 8, steps=2)
    resized, params = jaxcomm.resize_workers(tx, state, params, 3)
    found, _ = after(tx, 3, params, resized)
    for name, x in start().items():
        means = [np.asarray(batch_of(n, i)[name]).mean(0) for n in (8, 3) for i in range(2)]
        np.testing.assert_allclose(found[name], x - np.mean(means, axis=0), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_momenta_of_workers_take_their_mean() -> None:
    tx = optax.chain(jaxcomm.per_worker(optax.adam(0.1)), gossip.dpsgd(gossip.ring(8)))
    params = jaxcomm.replicate(start(), 8)
    params, state = after(tx, 8, params, jaxcomm.init(tx, params, 8))
    other = optax.chain(jaxcomm.per_worker(optax.adam(0.1)), gossip.dpsgd(gossip.ring(5)))
    resized, new = jaxcomm.resize_workers(other, state, params, 5)
    before, found = (s[0].per_worker["data"][0].mu["a"] for s in (state, resized))
    for moment in found:
        np.testing.assert_allclose(moment, np.asarray(before).mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(resized[0].per_worker["data"][0].count, [2] * 5)
    for x in new.per_worker["data"]["a"]:
        np.testing.assert_array_equal(x, jaxcomm.consensus(params)["a"])
    moved, _ = after(other, 5, new, resized)
    assert np.all(np.isfinite(moved.per_worker["data"]["a"]))


@pytest.mark.parametrize("case", LOCAL, ids=lambda case: case.name)
def test_local_methods_keep_their_anchor(case: LocalCase) -> None:
    """In the middle of a period."""
    tx = case.make(optax.sgd(0.1, momentum=0.5))
    params = jaxcomm.replicate(start(), 8)
    params, state = after(tx, 8, params, jaxcomm.init(tx, params, 8), steps=4)
    resized, new = jaxcomm.resize_workers(tx, state, params, 3)
    specs = jaxcomm.state_specs(state)
    for spec, x, y in zip(*map(jax.tree.leaves, (specs, state, resized)), strict=True):
        if not tuple(spec):
            assert bool(jnp.all(x == y))
    moved, _ = after(tx, 3, new, resized)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(moved))


def test_state_without_a_resize_rule_is_named() -> None:
    tx = optax.GradientTransformation(
        lambda params: jaxcomm.PerWorker({"data": jnp.zeros((1,), jnp.uint32)}),
        lambda updates, state, params=None: (updates, state),
    )
    equal = jaxcomm.PerWorker({"data": jnp.full(4, 7, jnp.uint32)})
    resized: Any = jaxcomm.resize_workers(tx, equal, start(), 2)[0]
    np.testing.assert_array_equal(resized.per_worker["data"], [7, 7])
    state = jaxcomm.PerWorker({"data": jnp.arange(4, dtype=jnp.uint32)})
    with pytest.raises(ValueError, match="is uint32 and differs by worker, so it has no mean"):
        jaxcomm.resize_workers(tx, state, start(), 2)
    other = optax.chain(jaxcomm.mean(), optax.adam(0.1))
    with pytest.raises(ValueError, match="PerWorker"):
        jaxcomm.resize_workers(other, state, start(), 2)
    with pytest.raises(ValueError, match=r"it was made for other parameters or another `tx`"):
        jaxcomm.resize_workers(
            jaxcomm.all_gather_mean(error_feedback(top_k(k=1))),
            trained(jaxcomm.all_gather_mean(error_feedback(top_k(k=1))), 4)[1],
            {"a": jnp.zeros(3), "b": jnp.zeros(2), "c": jnp.zeros(1), "d": jnp.ones(2)},
            2,
        )


def test_state_of_shards_is_refused() -> None:
    """Shards are parts of an array, so a mean over them would be wrong."""
    state = jaxcomm.PerWorker({"data,model": jnp.arange(8.0)})
    with pytest.raises(ValueError, match=r"differs over \('data', 'model'\)"):
        jaxcomm.resize_workers(optax.identity(), state, start(), 4)


@pytest.mark.slow
def test_several_arrays_of_memory() -> None:
    codec = momentum(
        error_feedback(nonzero(density=0.5, granularity=1))
    )  # Its overflow is of the last step.
    tx = jaxcomm.sharded_server(optax.sgd(0.1), codec)
    params, state = trained(tx, 4)
    resized, _ = jaxcomm.resize_workers(tx, state, params, 3)
    assert len(jax.tree.leaves(resized.push)) == len(jax.tree.leaves(state.push))
    moved, _ = after(tx, 3, params, resized)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(moved))
