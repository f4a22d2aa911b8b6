"""The commands as a user runs them: output, records, errors and interrupts.

Most are called in this process, which spares an import of JAX each.
"""

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiments
import experiments.study.figures
from experiments.__main__ import main, set_up_jax
from experiments.study import store

# One process, for the weights, scores and steps that the commands have in common.
pytestmark = pytest.mark.xdist_group("command_line")

COUNT = "--xla_force_host_platform_device_count"
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tain", "invalid choice"),
        ("train --steps 0", "--steps: must be an integer of at least 1 and below 2**31, got '0'"),
        ("train --devices 99999999999", "--devices: must be an integer from 1 to 1024, got '99999"),
        ("train --bitz 8", "unrecognized arguments: --bitz 8"),
        (
            "train --method globel_qsgd",
            "no method 'globel_qsgd'; did you mean 'global_qsgd'? There",
        ),
        ("survey --tasks text:nowhere", "--data nowhere is not a file"),
        ("train --devices 2 --batch 31", "--batch 31 is not divisible by 2 workers"),
        ("digits --resume nowhere", "nowhere/config.json cannot be read"),
        ("report nowhere", "nowhere is not a folder"),
    ],
)
def test_user_errors_are_one_line(run_here: Run, arguments: str, message: str) -> None:
    code, stdout, stderr = run_here(*arguments.split())
    assert (code, stdout) == (2, "")
    assert stderr.startswith("experiments: error: ") and stderr.count("\n") == 1
    assert message in stderr


def test_errors_of_the_system_are_one_line(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "table.csv")

    monkeypatch.setattr(experiments.study.figures, "main", refuse)
    code, _, stderr = run_here("figures", "nowhere")
    assert code == 2 and "No space left on device: 'table.csv'" in stderr


@pytest.mark.slow
def test_the_process_ends_with_its_code_where_jax_does_not_start() -> None:
    process = start("figures", "nowhere", JAX_PLATFORMS="foo")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout, stderr.count("\n")) == (2, "", 1)
    assert "JAX does not start: Unable to initialize backend 'foo'" in stderr


def test_train_prints_its_progress_and_its_bytes(run_here: Run, tmp_path: Path) -> None:
    keep = ["--records", str(tmp_path), "--record", "tiny"]
    code, stdout, stderr = run_here("train", "--method", "mean", *SMALL, "--steps", "4", *keep)
    assert (code, stderr) == (0, "") and "2 workers" in stdout and "diverges" not in stdout
    assert "step 2: training loss" in stdout and "step 4: training loss" in stdout
    assert "bytes sent per worker: " in stdout
    assert "sgd with the learning rate 0.1 (the survey's choice for mean on digits)" in stdout
    (folder,) = tmp_path.glob("*_tiny")
    assert store.read_settings(folder)["finished"]
    assert [row["kind"] for row in store.read(folder)] == ["point", "point", "run"]
    command = "command: python -m experiments train --method mean --devices 2"
    assert command in store.environment(folder)
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


@pytest.mark.parametrize(
    ("environment", "devices", "flags", "threads"),
    [
        ({}, 32, f"{COUNT}=32", "64"),
        ({"XLA_FLAGS": "--other"}, None, f"--other {COUNT}=8", "16"),
        ({"XLA_FLAGS": f"{COUNT}=12"}, None, f"{COUNT}=12", "24"),
        ({"XLA_FLAGS": f"{COUNT}=12"}, 4, f"{COUNT}=12 {COUNT}=4", "16"),
        ({"NPROC": "5"}, None, f"{COUNT}=8", "5"),
    ],
)
def test_settings_of_the_user_are_kept(
    monkeypatch: pytest.MonkeyPatch, environment: Any, devices: Any, flags: str, threads: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    set_up_jax(devices)
    assert os.environ == {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": threads}


@pytest.mark.slow
def test_an_interrupt_leaves_a_valid_partial_record(tmp_path: Path) -> None:
    keep = ["--records", str(tmp_path), "--record", "stopped"]
    flags = f"{os.environ['XLA_FLAGS']} {COUNT}=3"
    endless = ["train", "--method", "mean", *SMALL, "--steps", "1000000", *keep]
    process = start(*endless, XLA_FLAGS=flags)
    said = list(itertools.takewhile(lambda line: not line.startswith("step 4:"), process.stdout))
    assert any("2 workers" in line for line in said)  # `--devices` wins over XLA_FLAGS.
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    (folder,) = tmp_path.glob("*_stopped")
    assert process.returncode == 130
    assert stderr == f"experiments: interrupted: {folder} is a partial record.\n"
    assert not store.read_settings(folder)["finished"]
    rows = store.read(folder)
    assert len(rows) >= 2 and all(row["kind"] == "point" for row in rows)
