"""The commands as a user runs them: output, records, errors and interrupts.

Most are called in this process, which spares an import of JAX each.
"""

import csv
import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import experiments
import experiments.study.figures
from experiments.__main__ import main, set_up_jax
from experiments.cli.errors import ExperimentError
from tests.slow import slow

# One process, for the weights, scores and steps that the commands have in common.
pytestmark = pytest.mark.xdist_group("command_line")

MANY_DIGITS = "9" * 5000  # More than Python parses.
SMALL = ["--devices", "2", "--batch", "32", "--log-every", "2"]


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "experiments", *arguments],
        cwd=Path(experiments.__file__).parents[1],
        env={
            **os.environ,
            "JAX_NUMPY_DTYPE_PROMOTION": "strict",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
            "PYTHONWARNINGS": "error:::jaxcomm,error:::experiments",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, **environment)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Like `run`, in this process: JAX is there already, and has its devices."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
        try:
            code = main(arguments)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_here


def read_rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "arguments are required"),
        ("tain", "invalid choice"),
        ("train --steps 0", "--steps: must be an integer of at least 1 and below 2**31, got '0'"),
        ("train --learning-rate nan", "--learning-rate: must be a number above 0"),
        ("train --devices 99999999999", "--devices: must be an integer from 1 to 1024, got '99999"),
        (f"train --steps {MANY_DIGITS}", "--steps: must be an integer of at least 1 and below"),
        (f"estimate --methods qsgd:{MANY_DIGITS}", "is not a method: write METHOD or METHOD:BITS"),
        ("train --seed -1", "--seed: must be an integer from 0"),
        ("train --record a/b", "--record: must be of letters"),
        ("train --bitz 8", "unrecognized arguments: --bitz 8"),
        ("digits --optimizers rmsprop", "invalid choice: 'rmsprop'"),
        ("train --method foo", "no method 'foo'"),
        ("survey --learning-rates 0.1 0", "--learning-rates: must be a number above 0, got '0'"),
        ("survey --tuning-seeds 0", "--tuning-seeds: must be an integer of at least 1"),
        ("survey --batch 1200", "--batch 1200 exceeds the 1150 training examples that remain"),
        ("survey --methods mean foo", "no method 'foo'"),
        ("survey --tasks imagenet", "--dataset must be one of digits, glyphs, "),
        ("survey --tasks text:nowhere", "--data nowhere is not a file"),
        ("digits --methods mean foo", "no method 'foo'"),
        ("digits --devices 2 --batch 31", "not divisible by 2 workers"),
        ("digits --resume nowhere", "nowhere/config.json cannot be read"),
        ("compare", "invalid choice: 'compare'"),
        ("train --dataset glyphs --data x", "--dataset glyphs is drawn from installed fonts"),
        ("sparse --methods mean foo", "--methods must be of mean, mean_bfloat16, all_gather, "),
        ("sparse --dataset movielens", "--dataset movielens needs --data FILE"),
        (
            "estimate --draws 0",
            "--draws: must be an integer of at least 1 and below 2**31, got '0'",
        ),
        ("estimate --methods mean foo", "no method 'foo'"),
        ("estimate --devices 1", "at least 2 workers"),
        slow("estimate --methods global_qsgd:4 --steps 1", "`bits`=4"),
        ("train --dataset mnist --data nowhere", "nowhere is not a folder"),
        ("report nowhere", "nowhere is not a folder"),
        ("figures nowhere", "nowhere/config.json cannot be read"),
        ("train --steps 1 --records /dev/null/x --record x", "cannot be made: Not a directory"),
    ],
    ids=lambda text: text[:60],
)
def test_user_errors_are_one_line(run_here: Run, arguments: str, message: str) -> None:
    code, stdout, stderr = run_here(*arguments.split())
    assert (code, stdout) == (2, "")
    assert stderr.startswith("experiments: error: ") and stderr.count("\n") == 1
    assert message in stderr


def single_error_line(code: int, stdout: str, stderr: str) -> str:
    """Returns the single line of a user error."""
    assert (code, stdout) == (2, "") and stderr.count("\n") == 1
    assert stderr.startswith("experiments: error: ")
    return stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_PLATFORMS": "foo"}, "JAX does not start: Unable to initialize backend 'foo'"),
        slow({"JAX_ENABLE_X64": "maybe"}, "JAX does not start: invalid truth value 'maybe'"),
    ],
)
def test_an_environment_in_which_jax_does_not_start_is_one_line(
    environment: dict[str, str], message: str
) -> None:
    assert message in single_error_line(*run("figures", "nowhere", **environment))


@pytest.mark.parametrize("count", ["0", "-1", "x", "99999999999"])
def test_an_invalid_device_count_is_one_line(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": f"--other {COUNT}=8 {COUNT}={count}"})
    with pytest.raises(ExperimentError, match=rf"XLA_FLAGS: {COUNT} must be .* got '{count}'"):
        set_up_jax(None)


def test_system_errors_are_one_line(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "table.csv")

    monkeypatch.setattr(experiments.study.figures, "main", refuse)
    assert "No space left on device: 'table.csv'" in single_error_line(
        *run_here("figures", "nowhere")
    )


@pytest.mark.slow
def test_wrong_input_is_the_exit_code_of_the_process() -> None:
    code, stdout, stderr = run("train", "--method", "globel_qsgd")
    assert (code, stdout) == (2, "")
    begin = (
        "experiments: error: there is no method 'globel_qsgd'; did you mean 'global_qsgd'? There"
    )
    assert stderr.startswith(begin)


def test_train_prints_its_progress_and_its_bytes(run_here: Run, tmp_path: Path) -> None:
    keep = ["--records", str(tmp_path), "--record", "tiny"]
    code, stdout, stderr = run_here("train", "--method", "mean", *SMALL, "--steps", "4", *keep)
    assert (code, stderr) == (0, "")
    assert "2 workers" in stdout and "diverges" not in stdout
    assert "step 2: training loss" in stdout and "step 4: training loss" in stdout
    assert "bytes sent per worker: " in stdout
    assert "sgd with the learning rate 0.1 (the survey's choice for mean on digits)" in stdout
    (folder,) = tmp_path.glob("*_tiny")
    config = read_config(folder)
    assert (config["study"], config["learning_rate"], config["finished"]) == ("train", 0.1, True)
    assert [row["kind"] for row in read_rows(folder)] == ["point", "point", "run"]
    assert "`mean` on digits with sgd, learning rate 0.1" in (folder / "README.md").read_text()
    figure = folder / "loss_against_bytes.png"
    figure.unlink()
    assert run_here("figures", str(folder)) == (0, f"{figure}\n", "")
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_train_warns_once_of_divergence_and_votes_have_no_error(
    run_here: Run, tmp_path: Path
) -> None:
    options = ["--learning-rate", "50", "--steps", "6", "--records", str(tmp_path), "--record", "x"]
    code, stdout, stderr = run_here("train", "--method", "signum", *SMALL, *options)
    assert (code, stderr) == (0, "")
    (warning,) = [line for line in stdout.splitlines() if "diverges" in line]
    assert warning.startswith("Warning: the run diverges. The training loss is ")
    assert warning.endswith("before the first. Use a --learning-rate below 50.")
    assert "sgd with the learning rate 50 (--learning-rate)" in stdout
    (readme,) = tmp_path.glob("*_x/README.md")
    heading, _, cells = (
        line.split(" | ") for line in readme.read_text().splitlines() if line.startswith("|")
    )
    assert cells[heading.index("compression error")] == "-"


@pytest.mark.slow
def test_train_ends_in_one_line_at_a_step_that_is_not_finite(run_here: Run, tmp_path: Path) -> None:
    options = ["--learning-rate", "1e38", "--steps", "6", "--records", str(tmp_path)]
    code, _, stderr = run_here("train", "--method", "mean", *SMALL, *options, "--record", "x")
    assert code == 2 and stderr.count("\n") == 1
    assert re.match(
        r"experiments: error: the (loss|update) of step \d is not finite: workers 0, 1 of 2: ",
        stderr,
    )
    (folder,) = tmp_path.glob("*_x")
    assert not read_config(folder)["finished"]


COUNT = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("environment", "devices", "flags", "threads"),
    [
        ({}, None, f"{COUNT}=8", "16"),
        ({}, 32, f"{COUNT}=32", "64"),
        ({"XLA_FLAGS": "--other"}, None, f"--other {COUNT}=8", "16"),
        ({"XLA_FLAGS": f"{COUNT}=12"}, None, f"{COUNT}=12", "24"),
        ({"XLA_FLAGS": f"{COUNT}=12"}, 4, f"{COUNT}=12 {COUNT}=4", "16"),
        ({"NPROC": "5"}, None, f"{COUNT}=8", "5"),
    ],
)
def test_settings_of_the_user_are_kept(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    devices: int | None,
    flags: str,
    threads: str,
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    set_up_jax(devices)
    assert os.environ == {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": threads}


@pytest.mark.slow
def test_digits_leaves_a_record_that_parses(run_here: Run, tmp_path: Path) -> None:
    methods = ["--methods", "mean", "global_qsgd:8", "--optimizers", "sgd"]
    lengths = ["--seeds", "2", "--steps", "4", "--records", str(tmp_path), "--record", "tiny"]
    code, stdout, stderr = run_here("digits", *SMALL, *methods, *lengths)
    assert (code, stderr) == (0, "")
    assert "digits: 2 settings, 2 seeds each" in stdout and "Claim: `global_qsgd:8`" in stdout
    (folder,) = tmp_path.glob("*_tiny")
    assert read_config(folder)["finished"]
    rows = read_rows(folder)
    assert sum(row["kind"] == "run" for row in rows) == 4
    assert sum(row["kind"] == "point" for row in rows) == 8
    assert {(row["method"], row["seed"]) for row in rows} == {
        (method, seed) for method in methods[1:3] for seed in (0, 1)
    }
    with (folder / "table.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["method"] for row in table] == methods[1:3]
    assert float(table[0]["bytes_ratio"]) == 1 and float(table[1]["bytes_ratio"]) < 0.26
    assert "command: python -m experiments digits --devices 2" in (
        (folder / "environment.txt").read_text(encoding="utf-8")
    )
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# Does 8-bit")
    figure = folder / "loss_against_bytes.png"
    figure.unlink()
    assert run_here("figures", str(folder))[0] == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_estimate_leaves_a_record_that_parses(run_here: Run, tmp_path: Path) -> None:
    methods = ["--methods", "mean", "global_qsgd:6", "global_qsgd:8", "two_stage:8"]
    lengths = ["--steps", "3", "1", "--draws", "2", "--batch", "32", "--devices", "4"]
    keep = ["--records", str(tmp_path), "--record", "tiny"]
    code, stdout, stderr = run_here("estimate", *methods, *lengths, *keep)
    assert (code, stderr) == (0, "")
    assert "bits/coordinate" in stdout
    (folder,) = tmp_path.glob("*_tiny")
    assert read_config(folder)["finished"] and read_config(folder)["steps"] == [3, 1]
    rows = read_rows(folder)
    assert [(row["method"], row["step"]) for row in rows] == [
        (method, step) for method in methods[1:] for step in (1, 3)
    ]
    with (folder / "table.csv").open(encoding="utf-8") as file:
        table = {row["method"]: row for row in csv.DictReader(file)}
    assert list(table) == methods[1:]
    assert float(table["mean"]["error"]) < 1e-12 < float(table["global_qsgd:8"]["error"])
    assert float(table["mean"]["bits_per_coordinate"]) == 64 * 3 / 4
    with np.load(folder / "gradients.npz") as saved:
        assert saved["step"] == 3 and saved["gradients"].dtype == np.float32
        assert len(saved["gradients"]) == 4
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# How far")
    figure = folder / "error_against_bits.png"
    figure.unlink()
    assert run_here("figures", str(folder))[0] == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_interrupt_leaves_a_valid_partial_record(tmp_path: Path) -> None:
    keep = ["--records", str(tmp_path), "--record", "stopped"]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=3"
    endless = ["train", "--method", "mean", *SMALL, "--steps", "1000000", *keep]
    process = start(*endless, XLA_FLAGS=flags)
    said = list(itertools.takewhile(lambda line: not line.startswith("step 4:"), process.stdout))
    assert any("2 workers" in line for line in said)  # `--devices` wins over XLA_FLAGS.
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    (folder,) = tmp_path.glob("*_stopped")
    assert process.returncode == 130
    assert stderr == f"experiments: interrupted: {folder} is a partial record.\n"
    assert not read_config(folder)["finished"]
    rows = read_rows(folder)
    assert len(rows) >= 2 and all(row["kind"] == "point" for row in rows)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "environment.txt",
        "metrics.jsonl",
    ]
