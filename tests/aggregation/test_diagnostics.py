"""Side information: what it says, what it costs, and that it is nothing where it is off."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import Context, Diagnostics, Memory, global_qsgd
from jaxcomm.compression.quantizers import dither
from tests.aggregation.runs import WHERE, compiled, last, prepared, sent, steps
from tests.aggregation.test_memory import remainders
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, flat, gradients, initial

NAMES = {"compression_error", "density", "residual_norm"}


@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("mean", [jaxcomm.all_reduce_mean, slow(jaxcomm.all_gather_mean)])
def test_against_numpy(mean: Any, mode: Mode) -> None:
    given, tx = gradients(4), mean(remainders(), diagnostics=True)
    assert initial(tx, given, mode).diagnostics == dict.fromkeys(NAMES, 0.0)
    x, residual = flat(given), np.zeros((4, 14))
    for _, state in steps(tx, [given] * 3, mode):
        whole = np.trunc(x + residual)
        residual = x + residual - whole
        expected = {
            "compression_error": np.mean(((whole - x) ** 2).sum(1) / (x**2).sum(1)),
            "density": np.mean(whole != 0),
            "residual_norm": np.sqrt(np.mean((residual**2).sum(1))),
        }
        assert set(state.diagnostics) == NAMES
        for name, value in state.diagnostics.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5)
            assert value.dtype == jnp.float32 and value.shape == ()


METHODS = {
    "sum": (lambda **o: global_qsgd(levels=4, **o), 4),
    "8 bits among 4 workers": (lambda **o: global_qsgd(bits=8, **o), 31),
    "tree": (lambda **o: global_qsgd(dithering="exponential", **o), None),
    "two_stage": (lambda **o: global_qsgd(bits=4, reduce="two_stage", **o), 7),
    "8 bits alone": (jaxcomm.qsgd, 127),
}


@pytest.mark.parametrize("name", ["sum", *(slow(name) for name in METHODS if name != "sum")])
def test_one_small_all_reduce_and_the_same_result(name: str) -> None:
    build, levels = METHODS[name]
    given, on, off = gradients(4), build(diagnostics=True), build()
    assert initial(off, given, "checked").diagnostics == ()
    (results, state), (expected, _) = last(on, [given], "checked"), last(off, [given], "checked")
    np.testing.assert_array_equal(flat(results), flat(expected))
    assert state.diagnostics.get("levels") == levels
    # Rounding to levels (or to powers of two) errs, but by less than the whole.
    assert 0 < state.diagnostics["compression_error"] < 0.5
    assert 0.2 < state.diagnostics["density"] <= 1 and state.diagnostics["residual_norm"] == 0
    reporting, silent = sent(on, given), sent(off, given)
    assert reporting.bytes_per_worker - silent.bytes_per_worker == 2 * 3 / 4 * 12
    assert len(reporting.collectives) == len(silent.collectives) + 1


@pytest.mark.slow
def test_levels_of_the_sparse_form() -> None:
    tx = jaxcomm.sparse_global_qsgd(capacity=16, levels=2, diagnostics=True)
    assert last(tx, [gradients(4)])[1].diagnostics["levels"] == 2


def test_the_compiled_program_names_it() -> None:
    found = compiled(METHODS["sum"][0](diagnostics=True), gradients(4)).collectives
    (named,) = [c for c in found if "diagnostics" in c.scope]
    assert named.kind == "all_reduce" and named.shape == (3,)


def test_own_error_of_each_worker() -> None:
    # One level of the largest magnitude: worker 0 is exact, worker 1 sends 0 or the norm.
    given = jnp.array([[4.0, -4.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    _, state = last(jaxcomm.all_reduce_mean(dither(levels=1), diagnostics=True), [given])
    ups = round((float(state.diagnostics["density"]) - 3 / 8) * 8)
    error = (9 * ups + (4 - ups)) / 4 / 2  # Of worker 1, each up errs by 9, the others by 1.
    np.testing.assert_allclose(state.diagnostics["compression_error"], error, rtol=1e-6)


def test_zeros_huge_updates_weights_and_nan() -> None:
    tx, drawn = METHODS["sum"][0](diagnostics=True), np.random.default_rng(1).normal(size=(2, 8))

    def diagnostics_of(x: Any, *weights: float) -> Any:
        return last(tx, [x], weights=[weights])[1].diagnostics

    assert diagnostics_of(np.zeros((2, 8)), 1, 1) == dict.fromkeys(NAMES, 0.0) | {"levels": 4}
    plain, huge = (diagnostics_of(x, 1, 1)["compression_error"] for x in (drawn, drawn * 2.0**125))
    np.testing.assert_allclose(huge, plain, rtol=1e-5)
    # A worker of weight 0 sends zeros of zeros.
    assert 0 < diagnostics_of(drawn, 1, 0)["density"] <= 0.5
    drawn[0, 0] = np.nan
    broken = diagnostics_of(drawn, 1, 1)
    assert all(np.isnan(broken[name]) for name in NAMES) and broken["levels"] == 4


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.slow
@WHERE
def test_metrics(where: Any) -> None:
    params = {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)

    def metrics(tx: Any) -> tuple[Any, Any]:
        step, state = prepared(loss, tx, params, where)
        return step(params, state, batch)[1:]

    coded = METHODS["sum"][0](diagnostics=True)
    (state, _), reported = metrics(optax.chain(coded, optax.sgd(0.1)))
    assert reported.keys() == {"loss", *(f"diagnostics/{name}" for name in NAMES | {"levels"})}
    assert all(reported[f"diagnostics/{name}"] == state.diagnostics[name] for name in NAMES)
    labels, fine = {"w": "coarse", "b": "fine"}, jaxcomm.qsgd(diagnostics=True)
    _, reported = metrics(optax.partition({"coarse": coded, "fine": fine}, labels))
    paths = {key.rpartition("/")[0] for key in reported} - {""}
    assert len(paths) == 2 and len(reported) == 9
    assert all(path.startswith("diagnostics/") for path in paths)
    assert {"coarse" in path for path in paths} == {"fine" in path for path in paths} == {0, 1}
    _, reported = metrics(jaxcomm.accumulate(coded, 2))
    assert reported["diagnostics/compression_error"] == 0  # Nothing has been sent yet.


def test_errors_of_two_stages_are_averaged() -> None:
    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(x, errors={"lost": jnp.float32(0.25)})

    codec = dither(bits=8).replace(diagnose=diagnose)
    _, state = last(jaxcomm.two_stage_mean(codec, diagnostics=True), [gradients(4)])
    np.testing.assert_allclose(state.diagnostics["lost"], 0.25, rtol=1e-6)
