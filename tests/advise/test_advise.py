"""The table, the recommendation and its line, and the command."""

import ast
import csv
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomm
from jaxcomm import advise, perf
from jaxcomm.advise.__main__ import main
from jaxcomm.advise._advise import Advice, shapes_of_count
from jaxcomm.perf._predict import size_of, traced
from jaxcomm.perf._recommended import error_of, recommended
from tests.slow import slow

pytestmark = pytest.mark.xdist_group("advise")  # Traced methods are kept in one process.

ROOT = str(Path(jaxcomm.__file__).parents[1])
PARAMS = {"w": jax.ShapeDtypeStruct((4000, 4000), jnp.float32)}
COMMAND = ["--params", "2M", "--workers", "8", "--link", "200mbit", "--step", "100ms"]
OPTIONS: Any = {"link": "1Gbit", "step_seconds": 0.3}


def test_the_name_is_the_function_and_the_package() -> None:
    import jaxcomm.advise

    assert advise is jaxcomm.advise
    assert isinstance(sys.modules["jaxcomm.advise"], ModuleType)
    assert isinstance(advise(PARAMS, 2, **OPTIONS), Advice)


@pytest.mark.parametrize("number", [0, *map(slow, range(1, 9))])
def test_the_line_of_a_method_is_what_was_predicted_and_runs(number: int) -> None:
    method = recommended("data", 4)[number]
    names: dict[str, Any] = {"jaxcomm": jaxcomm, "optax": optax, "optimizer": optax.sgd(0.1)}
    exec(f"later = {method.aggregator or method.code}", names)
    exec(method.line, names)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(3)}
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: params))
    pasted, built = (
        traced(tx, tuple(leaves), structure, (("data", 4),))[0]
        for tx in (names["later"], method.tx)
    )
    assert str(pasted) == str(built)
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"] ** 2)  # noqa: E731
    is_local = method.period > 1
    assert not is_local or f"aggregator={method.aggregator}" in method.code
    params = jaxcomm.replicate(params, 4) if is_local else params
    step = jaxcomm.simulate(loss, names["tx"], 4, metrics="own" if is_local else "mean")
    _, _, metrics = step(params, jaxcomm.init(names["tx"], params, 4), jnp.ones((4, 8)))
    assert jnp.isfinite(metrics["loss"]).all()


def test_the_line_of_power_sgd_begins_with_the_exact_steps_of_the_records() -> None:
    found = advise(PARAMS, 8, link="100Mbit", step_seconds=0.1)
    stages = 'jaxcomm.mean("data"), jaxcomm.power_sgd("data", rank=4)'
    assert found.line == f"tx = optax.chain(jaxcomm.warmup([{stages}], every=2), optimizer)"
    assert "after two exact steps" in found.recommended.risk
    others = [row for row in found.rows if "power_sgd" not in row.code]
    assert len(others) == 7 and all(row.paste == row.code for row in others)


def test_factors_on_the_steps_are_those_of_the_record() -> None:
    record = Path(ROOT) / "experiments/records/2026-11-29_loss/table.csv"
    with record.open(encoding="utf-8") as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["link"] == "unshaped"}
    labels = {"two_stage:4": 3, "local_sgd_4_bits_8": 4, "power_sgd_rank_4_start_2": 7}
    for label, number in labels.items():
        method, row = recommended("data", 4)[number], rows[label]
        center, low, high = (float(row[f"steps{end}"]) for end in ("", "_low", "_high"))
        assert f"{center:.2f} [{low:.2f}, {high:.2f}] x the steps" in method.risk
        assert method.steps is not None and center <= method.steps + 0.005 and method.steps <= high
    assert rows["power_sgd_rank_1_start_2"]["reached"] == "0/5"
    assert recommended("data", 4)[8].steps is None


def test_the_answer_states_the_levels_of_a_worker_and_the_error() -> None:
    for workers, levels in (
        (8, "15 in 8 bits for each of 8 workers; bits=8 allows 15."),
        (64, "15 in 16 bits for each of 64 workers; bits=8 allows 1."),
        (128, "15 in 16 bits for each of 128 workers; bits=8 allows none."),
    ):
        found = advise(PARAMS, workers, **OPTIONS)
        assert f"Levels: global_qsgd has {levels}\n" in str(found)
        assert not any("global_qsgd" in row.code and "bits=" in row.code for row in found.rows)
    assert "steps: unknown (no useful bound).\n" in str(advise("125M", 64, **OPTIONS))
    unbiased = str(error_of(jaxcomm.quantizers.natural().claims, 1000, 8))
    assert "unbiased, with a variance of at most 0.125 squared norms" in unbiased


def test_compression_is_recommended_for_slow_links_only() -> None:
    slow = advise(PARAMS, 8, link="100Mbit", step_seconds=0.1)
    fast = advise(PARAMS, 8, link="nvlink-a100", step_seconds=0.1)
    assert slow.compress and "Compress: " in str(slow)
    assert not fast.compress and not advise(PARAMS, 1, **OPTIONS).compress
    line = 'tx = optax.chain(jaxcomm.mean("data"), optimizer)'
    assert fast.line == line and str(fast).endswith(f"Do not compress.\n{line}")


def test_the_16_bit_baseline_can_be_enough() -> None:
    found = advise({"w": jax.ShapeDtypeStruct((100, 2**20), jnp.float32)}, 8, link="10Gbit",
                   step_seconds=0.5)  # fmt: skip
    assert not found.compress and "bfloat16" in found.line
    assert "Do not compress further than to 16 bits." in str(found)


def test_rows_are_ranked_with_missed_losses_last() -> None:
    found = advise(PARAMS, 8, **OPTIONS)
    costs = [row.cost for row in found.rows]
    assert costs == sorted(costs) and len(found.rows) == 9
    missed = {row.code.partition("(")[0].removeprefix("jaxcomm.") for row in found.rows[-3:]}
    assert missed == {"top_k_sgd", "ef_sign_sgd", "power_sgd"}
    assert [row.steps is None for row in found.rows] == 6 * [False] + 3 * [True]
    assert found.recommended.cost <= 1.05 * costs[0]
    # The residual of PowerSGD has the size of the gradients.
    memory = {row.code: row.prediction.state_bytes for row in found.rows}
    assert memory['jaxcomm.power_sgd("data", rank=4)'] > 64e6 > memory['jaxcomm.mean("data")']


def test_a_calibration_has_the_times_of_codecs() -> None:
    names = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
    links = {"data": {name: perf.Link(1e9, 0.0) for name in names}}
    rank_4, mean = 'jaxcomm.power_sgd("data", rank=4)', 'jaxcomm.mean("data")'

    def found(codecs: dict[str, float]) -> Advice:
        return advise(PARAMS, 8, link=perf.Calibration(links, codecs), step_seconds=0.1)

    both = found({rank_4: 1e-9, mean: 2e-9, "mine": 0.0})
    seconds = {row.code: row.prediction.codec_seconds for row in both.rows}
    assert seconds.keys() == {rank_4, mean}  # Others would be of another device.
    assert seconds[rank_4] == pytest.approx(16e-3)
    assert "2 of 9 methods were timed" in both.assumptions[3]
    assert len(found({}).rows) == 9
    # A method that is timed alone is compared with the exact mean.
    alone = found({'jaxcomm.power_sgd("data", rank=1)': 1e-9})
    assert {row.code for row in alone.rows} == {'jaxcomm.power_sgd("data", rank=1)', mean}
    assert alone.line == f"tx = optax.chain({mean}, optimizer)"


def test_codecs_of_one_device_have_the_link_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codecs = {'jaxcomm.power_sgd("data", rank=4)': 1e-12, 'jaxcomm.mean("data")': 0.0}
    measured = perf.Calibration({}, codecs, "NVIDIA H100")
    found = advise(PARAMS, 8, link=measured.with_link("1Gbit"), step_seconds=0.1)
    plain = advise(PARAMS, 8, link="1Gbit", step_seconds=0.1)
    network = {row.code: row.prediction.network_seconds for row in plain.rows}
    assert {row.code: row.prediction.network_seconds for row in found.rows} == {
        code: network[code] for code in codecs
    }
    assert found.assumptions[1] == plain.assumptions[1] != found.assumptions[2]
    measured.save(tmp_path / "codecs.json")
    main([*COMMAND, "--calibration", str(tmp_path / "codecs.json")])
    said = capsys.readouterr()
    assert said.err == "" and "calibrated; 2 of 9 methods were timed" in said.out
    assert said.out.splitlines()[-1].startswith("tx = optax.chain(")
    with pytest.raises(ValueError, match="no all_reduce over the axis 'data'"):
        advise(PARAMS, 8, link=measured, step_seconds=0.1)


def test_workers_that_differ_or_fail_need_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    plain = advise(PARAMS, 8, **OPTIONS)

    def waiting(workers: int, **given: float) -> str:
        found = advise(PARAMS, workers, **OPTIONS, **given)
        assert workers != 8 or found.rows == plain.rows
        return found.assumptions[-1]

    times = [3.0] + [1.0] * 7
    gain = max(times) / 8 * sum(1 / time for time in times)
    assert f"use {gain:.2f} x the examples per second" in waiting(8, slowest=3.0)
    for workers, least in ((8, 1.46), (2, 1.8)):  # As the docstring says.
        assert "Wait for the slowest." in waiting(workers, slowest=least - 0.01)
        assert "Do not wait: `jaxcomm.asynchronous`." in waiting(workers, slowest=least + 0.01)
    line = waiting(8, failures_per_hour=12.0)
    found = re.search(r"them all for more than (\d+) s, do not: `jaxcomm.asynchronous`", line)
    assert found
    stopped = 12 * int(found[1]) / 3600
    assert 1 - stopped / 8 == pytest.approx(1.4 * (1 - stopped), rel=1e-2)
    assert advise(PARAMS, 1, **OPTIONS, slowest=3.0).assumptions[-1].startswith("Codecs: ")
    main([*COMMAND, "--slowest", "3", "--failures", "6"])
    assert f"\nWaiting: workers that do not wait use {gain:.2f} x" in capsys.readouterr().out


def test_a_step_is_timed() -> None:
    taken: list[int] = []

    def step() -> jax.Array:
        taken.append(len(taken))
        time.sleep(0.02)
        return jnp.zeros(3)

    found = advise(PARAMS, 8, link="1Gbit", step_seconds=step)
    milliseconds = re.search(r"workers, (\S+) ms of computation \(measured\)", found.assumptions[0])
    assert len(taken) == 6 and milliseconds and 20 <= float(milliseconds[1]) < 2000


@pytest.mark.slow
def test_methods_that_exceed_memory_are_omitted() -> None:
    found = advise(shapes_of_count(3 * 10**9), 8, link="100Gbit", step_seconds=1.0)
    assert len(found.rows) == 8
    assert found.assumptions[-1].startswith(
        'Omitted: jaxcomm.top_k_sgd("data", ratio=0.01): A unit'
    )


@pytest.mark.slow
@pytest.mark.parametrize(("gigabits", "count", "local"), [(10, 11, 1), (25, 0, 0)])
def test_how_often_compression_is_recommended(gigabits: int, count: int, local: int) -> None:
    """Of 35 models, batches and workers; the forward pass takes half of the backward pass.

    Gradients are compressed where no steps are local, or local steps are recommended.
    """
    # Of ResNet-50 and ResNet-101, by the batch, and of BERT: coordinates, backward pass on a V100.
    models = [(25.6e6, 0.122 * batch / 64) for batch in (16, 32, 64)]
    models += [(44.5e6, 0.232 * batch / 64) for batch in (16, 32, 64)]
    models += [(110e6, 0.25)]
    found = [
        advise(
            shapes_of_count(round(coordinates)),
            workers,
            link=f"{gigabits}Gbit, 25us",
            step_seconds=1.5 * backward,
            device="v100",
        )
        for coordinates, backward in models
        for workers in (8, 16, 32, 64, 96)
    ]
    gradients = [Advice(tuple(x for x in each.rows if x.period == 1), ()) for each in found]
    assert len(found) == 35 and sum(each.compress for each in gradients) == count
    assert sum(each.recommended.period > 1 for each in found) == local


def test_a_line_has_any_axis() -> None:
    for axis in ("dcn", 'a"b', "a'b", "{axis}"):
        for method in recommended(axis, 4):
            call = ast.parse(method.code, mode="eval").body
            assert isinstance(call, ast.Call)
            named = [each.value for each in call.keywords if each.arg == "axis_name"] or call.args
            assert ast.literal_eval(named[0]) == axis
            line = ast.parse(method.line)
            names = {x.value for x in ast.walk(line) if isinstance(x, ast.Constant)}
            assert axis in names and "data" not in names


def test_parameter_counts_are_read_and_matrices_fit_the_codecs() -> None:
    for given, count in (("125M", 125_000_000), ("1.3b", 1_300_000_000), ("7", 7), (2e6, 2_000_000),
                         ("35e3", 35_000), (25 * 10**9, 25 * 10**9), (10**12, 10**12)):  # fmt: skip
        shapes = shapes_of_count(given)
        assert size_of(shapes)[0] == count
        assert all(math.prod(x.shape) < 2**31 for x in shapes.values())


def test_a_mesh_has_the_workers_and_durations_are_read() -> None:
    whole = advise(PARAMS, 2, link="1Gbit", step_seconds=0.3)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    assert advise(PARAMS, mesh, **OPTIONS).rows == whole.rows
    for step in ("0.3", "300 ms", "0.3s", "300000us"):
        assert advise(PARAMS, 2, link="1Gbit", step_seconds=step) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--params", "many"], "`params` must be a number such as 125M or 1.3B, got 'many'"),
        (["--link", "soon"], "Presets: "),
        (["--step", "nan"], "`step_seconds` must be a duration above 0"),
        (["--slowest", "0.5"], "`slowest` must be a number of at least 1, got 0.5"),
        (["--failures", "nan"], "`failures_per_hour` must be at least 0"),
        (["--calibration", "/nowhere"], "No such file or directory: '/nowhere'"),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*COMMAND, *change])
    said = capsys.readouterr().err
    assert message in said and "advise: error: " in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_module_runs_without_a_warning() -> None:
    environment = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "jaxcomm.advise", *COMMAND]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert ran.stdout.count("jaxcomm.") >= 9
    assert "tx = optax.chain(" in ran.stdout
