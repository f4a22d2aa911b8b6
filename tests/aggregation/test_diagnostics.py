"""Side information: what it says, what it costs, and that it is nothing where it is off."""

import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import NamedSharding

import jaxcomm
from jaxcomm import Context, Diagnostics, Memory
from jaxcomm.compression.quantizers import dither
from tests.aggregation.test_memory import remainders
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregator, flat, gradients, initial, mesh_of

NAMES = {"compression_error", "density", "residual_norm"}
BUILD = {
    "summed": lambda **options: jaxcomm.all_reduce_mean(remainders(), **options),
    "gathered": lambda **options: jaxcomm.all_gather_mean(remainders(), **options),
}


@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("name", BUILD)
def test_against_numpy(name: str, mode: Mode) -> None:
    given = gradients(4)
    tx = BUILD[name](diagnostics=True)
    run, state = aggregator(tx, 4, mode), initial(tx, given, mode)
    assert {k: float(v) for k, v in state.diagnostics.items()} == dict.fromkeys(NAMES, 0.0)
    x, residual = flat(given), np.zeros((4, 14))
    for _ in range(3):
        _, state = run(given, state, jnp.ones(4))
        sent = np.trunc(x + residual)
        residual = x + residual - sent
        expected = {
            "compression_error": np.mean(((sent - x) ** 2).sum(1) / (x**2).sum(1)),
            "density": np.mean(sent != 0),
            "residual_norm": np.sqrt(np.mean((residual**2).sum(1))),
        }
        assert set(state.diagnostics) == NAMES
        for key, value in expected.items():
            np.testing.assert_allclose(state.diagnostics[key], value, rtol=1e-5)
            assert (
                state.diagnostics[key].dtype == jnp.float32 and state.diagnostics[key].shape == ()
            )


METHODS = {
    "sum": lambda **o: jaxcomm.global_qsgd(levels=4, **o),
    "leaf": lambda **o: jaxcomm.global_qsgd(levels=4, scope="leaf", **o),
    "tree": lambda **o: jaxcomm.global_qsgd(dithering="exponential", **o),
    "two_stage": lambda **o: jaxcomm.global_qsgd(levels=4, reduce="two_stage", **o),
    "qsgd": lambda **o: jaxcomm.qsgd(levels=4, **o),
}


@pytest.mark.parametrize("name", ["sum", *map(slow, ["two_stage", "leaf", "tree", "qsgd"])])
@pytest.mark.parametrize("mode", ["checked", slow("unchecked"), slow("vmap")])
def test_one_small_all_reduce_and_the_same_result(name: str, mode: Mode) -> None:
    given, on, off = gradients(4), METHODS[name](diagnostics=True), METHODS[name]()
    run, state = aggregator(on, 4, mode), initial(on, given, mode)
    plain, without = aggregator(off, 4, mode), initial(off, given, mode)
    assert without.diagnostics == () and off.init(jnp.zeros(3)).diagnostics == ()
    results, after = run(given, state, jnp.ones(4))
    expected, _ = plain(given, without, jnp.ones(4))
    np.testing.assert_array_equal(flat(results), flat(expected))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    cache = run._cache_size()
    run(given, after, jnp.ones(4))
    assert run._cache_size() == cache
    # Rounding to 4 levels (or to powers of two) errs, but by less than the whole.
    assert (
        0 < after.diagnostics["compression_error"] < 0.5 and 0.2 < after.diagnostics["density"] <= 1
    )
    assert after.diagnostics["residual_norm"] == 0
    if mode != "vmap":
        costs = [
            jaxcomm.wire.account(r, given, s, jnp.ones(4))
            for r, s in ((run, state), (plain, without))
        ]
        assert costs[0].bytes_per_worker - costs[1].bytes_per_worker == 2 * 3 / 4 * 12
        assert len(costs[0].collectives) == len(costs[1].collectives) + 1


def test_the_compiled_program_names_it() -> None:
    given, tx = gradients(4), METHODS["sum"](diagnostics=True)
    run = aggregator(tx, 4, "checked")
    text = run.lower(given, initial(tx, given, "checked"), jnp.ones(4)).compile().as_text()
    named = [
        line for line in text.splitlines() if " all-reduce(" in line and "/diagnostics/" in line
    ]
    assert len(named) == 1 and "f32[3]" in named[0]


def test_own_error_of_each_worker() -> None:
    # One level of the largest magnitude: worker 0 is exact, worker 1 sends 0 or the norm.
    given = jnp.array([[4.0, -4.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    tx = jaxcomm.all_reduce_mean(dither(levels=1), diagnostics=True)
    run = aggregator(tx, 2, "vmap")
    _, state = run(given, initial(tx, given, "vmap"), jnp.ones(2))
    density = float(state.diagnostics["density"])
    ups = round((density - 3 / 8) * 8)  # Of worker 1, each with an error of 9, the others of 1.
    np.testing.assert_allclose(
        state.diagnostics["compression_error"], (9 * ups + (4 - ups)) / 4 / 2, rtol=1e-6
    )


def test_zeros_huge_updates_weights_and_nan() -> None:
    tx = jaxcomm.global_qsgd(levels=4, diagnostics=True)
    run = aggregator(tx, 2, "vmap", weighted=True)
    told = lambda x, w: run(x, initial(tx, x, "vmap"), jnp.asarray(w))[1].diagnostics  # noqa: E731
    ones, draw = np.ones(2, np.float32), np.random.default_rng(1).normal(size=(2, 8))
    silent = {k: float(v) for k, v in told(jnp.zeros((2, 8)), ones).items()}
    assert silent == dict.fromkeys(NAMES, 0.0) | {"levels": 4}
    plain = told(jnp.asarray(draw, jnp.float32), ones)
    huge = told(jnp.asarray(draw, jnp.float32) * 2.0**125, ones)
    np.testing.assert_allclose(huge["compression_error"], plain["compression_error"], rtol=1e-5)
    # A worker of weight 0 sends zeros of zeros.
    lone = told(jnp.asarray(draw, jnp.float32), np.array([1, 0], np.float32))
    assert 0 < lone["density"] <= 0.5
    broken = told(jnp.asarray(draw, jnp.float32).at[0, 0].set(jnp.nan), ones)
    assert all(np.isnan(broken[name]) for name in NAMES) and broken["levels"] == 4


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mesh", slow("simulated")])
def test_metrics(kind: str) -> None:
    workers = mesh_of(4) if kind == "mesh" else 4
    make = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    params = {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)

    def metrics(tx: Any) -> tuple[Any, Any]:
        step = make(loss_fn, tx, workers, donate=False)
        _, state, metrics = step(params, jaxcomm.init(tx, params, workers), batch)
        return state, metrics

    coded = jaxcomm.global_qsgd(levels=4, diagnostics=True)
    state, told = metrics(optax.chain(coded, optax.sgd(0.1)))
    assert set(told) == {"loss", "diagnostics/levels", *(f"diagnostics/{name}" for name in NAMES)}
    for name in NAMES:
        assert told[f"diagnostics/{name}"] == state[0].diagnostics[name]
    assert told["diagnostics/compression_error"] > 0
    _, told = metrics(optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1, momentum=0.9)))
    assert set(told) == {"loss"}
    labels = {"w": "coarse", "b": "fine"}
    tx = optax.partition({"coarse": coded, "fine": jaxcomm.qsgd(diagnostics=True)}, labels)
    _, told = metrics(optax.chain(tx, optax.sgd(0.1)))
    paths = {key.rpartition("/")[0] for key in told} - {""}
    assert len(paths) == 2 and len(told) == 9
    assert {p.split("/")[0] for p in paths} == {"diagnostics"}
    assert {"coarse" in p for p in paths} == {"fine" in p for p in paths} == {True, False}
    _, told = metrics(jaxcomm.accumulate(optax.chain(coded, optax.sgd(0.1)), 2))
    assert told["diagnostics/compression_error"] == 0  # Nothing has been sent yet.


@pytest.mark.slow
def test_in_a_hierarchy_all_workers_count() -> None:
    inner = jaxcomm.global_qsgd("ici", levels=4, diagnostics=True)
    tx = jaxcomm.hierarchical(inner, jaxcomm.global_qsgd("dcn", diagnostics=True))
    sizes, axes = {"dcn": 2, "ici": 2}, ("dcn", "ici")
    step = jaxcomm.simulate(lambda w, x: jnp.sum(w * x[0]), tx, sizes, axis_name=axes)
    params, batch = jnp.zeros(6), jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)))
    _, state, told = step(
        params, jaxcomm.init(tx, params, sizes, axis_name=axes), batch.astype(jnp.float32)
    )
    assert {"diagnostics/0/density", "diagnostics/1/density"} <= set(told)
    assert 0 < state[0].diagnostics["compression_error"] < 1


LEVELS = {
    "15 by default": (lambda **o: jaxcomm.global_qsgd(**o), 15),
    "what 8 bits leave of 4 workers": (lambda **o: jaxcomm.global_qsgd(bits=8, **o), 31),
    "what 8 bits leave alone": (lambda **o: jaxcomm.qsgd(**o), 127),
    "of the sparse form": (lambda **o: jaxcomm.sparse_global_qsgd(capacity=16, levels=2, **o), 2),
    "between two stages": (lambda **o: jaxcomm.global_qsgd(bits=4, reduce="two_stage", **o), 7),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name",
    [
        slow(name) if name in ("15 by default", "what 8 bits leave alone") else name
        for name in LEVELS
    ],
)
def test_levels_in_use(name: str) -> None:
    build, levels = LEVELS[name]
    given, tx = gradients(4), build(diagnostics=True)
    _, state = aggregator(tx, 4, "checked")(given, initial(tx, given, "checked"), jnp.ones(4))
    assert state.diagnostics["levels"] == levels


def test_bad_switches() -> None:
    for diagnostics in (1, None, jnp.bool_(True)):
        with pytest.raises(ValueError, match="`diagnostics` must be a Python bool"):
            jaxcomm.global_qsgd(diagnostics=diagnostics)


def test_a_checkpoint_keeps_it(tmp_path: pathlib.Path) -> None:
    mesh, params = mesh_of(4), {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)
    tx = optax.chain(jaxcomm.global_qsgd(levels=4, diagnostics=True), optax.sgd(0.1))
    step = jaxcomm.make_step(loss_fn, tx, mesh, donate=False)
    _, state, _ = step(params, jaxcomm.init(tx, params, mesh), batch)
    template = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        jaxcomm.state_specs(state),
    )
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", template)
    assert state[0].diagnostics["compression_error"] > 0
    chex.assert_trees_all_equal(restored, state)


def test_errors_of_two_stages_are_averaged() -> None:
    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(x, errors={"lost": jnp.float32(0.25)})

    tx = jaxcomm.two_stage_mean(dither(bits=8).replace(diagnose=diagnose), diagnostics=True)
    given = gradients(4)
    _, state = aggregator(tx, 4, "vmap")(given, initial(tx, given, "vmap"), jnp.ones(4))
    np.testing.assert_allclose(state.diagnostics["lost"], 0.25, rtol=1e-6)
