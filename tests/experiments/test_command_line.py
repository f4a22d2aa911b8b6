"""`python -m experiments` as a user meets it: help, errors, devices, training and interrupts."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.__main__ import main, set_up_jax
from experiments.studies import MODULES
from experiments.study.record import read, read_environment, read_settings

# One process, for the weights, scores and steps that the commands have in common.
pytestmark = pytest.mark.xdist_group("command_line")

COUNT = "--xla_force_host_platform_device_count"
SMALL = ["--method", "mean", "--devices", "2", "--batch", "32", "--log-every", "2"]
Run = Callable[..., tuple[int, str, str]]


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    strict = {"PYTHONWARNINGS": "error:::jaxcomm,error:::experiments"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    command = [sys.executable, "-u", *arguments]
    return subprocess.Popen(command, env={**os.environ, **strict, **environment}, **pipes)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The code and what is printed, in this process: JAX is there already, and has its devices."""

    def run_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.setattr(sys, "argv", ["experiments", *arguments])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_here


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_command_explains_its_options(run_here: Run, name: str) -> None:
    code, stdout, stderr = run_here(name, "--help")
    assert (code, stderr) == (0, "") and f"usage: python -m experiments {name}" in stdout


@pytest.mark.slow
def test_all_commands_are_listed_with_their_questions(run_here: Run) -> None:
    code, stdout, stderr = run_here()
    listed = dict(line.split(maxsplit=1) for line in stdout.splitlines() if line[:2] == "  ")
    assert (code, stderr, [*listed]) == (0, "", [*MODULES])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tain", "there is no command 'tain'; there are "),
        ("train --steps 0", "--steps must be above 0, got 0."),
        ("survey --seeds -1", "--seeds must be above 0, got -1."),
        ("survey --learning-rates 0.1 nan", "--learning-rates must be above 0, got nan."),
        ("survey --trials -1", "--trials must be above 0, got -1."),
        ("train --devices 9 --batch 9", "--devices 9 exceeds the 8 devices of cpu; set JAX_PLATF"),
        ("train --devices 99999999999", "--devices must be at most 1024, got 99999999999"),
        ("train --devices 2 --batch 31", "--batch 31 is not divisible by 2 workers"),
        ("train --devices 2 --distributed", "--devices cannot be combined with --distributed"),
        ("train --method globel_qsgd", "no method 'globel_qsgd'; did you mean 'global_qsgd'?"),
        ("survey --tasks text:nowhere", "--data nowhere"),
        ("digits --resume nowhere", "nowhere is not a record: "),
        ("redraw nowhere", "nowhere is not a record: "),
    ],
)
def test_user_errors_are_one_line(run_here: Run, arguments: str, message: str) -> None:
    code, stdout, stderr = run_here(*arguments.split())
    assert (code, stdout) == (2, "")
    assert stderr.startswith("experiments: error: ") and stderr.count("\n") == 1
    assert message in stderr


@pytest.mark.parametrize("arguments", ["train --bitz 8", "train --steps x", "train --optimizer x"])
def test_wrong_options_are_named_without_a_traceback(run_here: Run, arguments: str) -> None:
    code, stdout, stderr = run_here(*arguments.split())
    assert (code, stdout) == (2, "") and arguments.split()[1] in stderr
    assert "Traceback" not in stderr and "train --help" in stderr


@pytest.mark.parametrize(
    ("environment", "devices", "flags", "threads"),
    [
        ({}, 32, f"{COUNT}=32", "64"),
        ({"XLA_FLAGS": f"--other {COUNT}=12"}, None, f"--other {COUNT}=12", "24"),
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
def test_the_demo_imports_few_modules_and_ends_where_jax_does_not_start() -> None:
    """`make demo` is a first impression, so it must not load the other studies."""
    count = "sum(name.partition('.')[0] == 'experiments' for name in sys.modules)"
    program = f"import sys, experiments.__main__ as m\nprint(m.main(['digits']), {count})"
    stdout, stderr = start("-c", program, JAX_PLATFORMS="foo").communicate(timeout=120)
    code, modules = map(int, stdout.split())
    assert code == 2 and stderr.count("\n") == 1 and modules <= 30
    assert "JAX does not start: Unable to initialize backend 'foo'" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["0.1", "50"])
def test_train_keeps_a_record_and_warns_of_divergence(
    run_here: Run, tmp_path: Path, rate: str
) -> None:
    options = ["--learning-rate", rate, "--steps", "4", "--records", str(tmp_path)]
    code, stdout, stderr = run_here("train", *SMALL, *options, "--record", "tiny")
    assert (code, stderr) == (0, "") and "step 2: training loss" in stdout
    assert f"with the learning rate {rate} (--learning-rate), 2 workers" in stdout
    assert "Traffic of one step:" in stdout and stdout.count("diverges") == int(rate == "50")
    (folder,) = tmp_path.glob("*_tiny")
    assert read_settings(folder)["finished"]
    assert [row["kind"] for row in read(folder)] == ["point", "point", "run"]
    assert "command: python -m experiments train --method mean" in read_environment(folder)
    assert (folder / "loss_against_bytes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_interrupt_leaves_a_valid_partial_record(tmp_path: Path) -> None:
    endless = ["train", *SMALL, "--steps", "1000000", "--records", str(tmp_path)]
    flags = f"{os.environ['XLA_FLAGS']} {COUNT}=3"
    process = start("-m", "experiments", *endless, "--record", "stopped", XLA_FLAGS=flags)
    said = list(itertools.takewhile(lambda line: not line.startswith("step 4:"), process.stdout))
    assert any("2 workers" in line for line in said)  # `--devices` wins over XLA_FLAGS.
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    (folder,) = tmp_path.glob("*_stopped")
    assert process.returncode == 130 and not read_settings(folder)["finished"]
    assert stderr == f"experiments: interrupted: {folder} is a partial record.\n"
    assert len(rows := read(folder)) >= 2 and {row["kind"] for row in rows} == {"point"}
