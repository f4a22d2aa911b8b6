"""The slow-network lab: its network, its workers and its measurements."""

import gzip
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from experiments.errors import ExperimentError
from experiments.lab.methods import LABELS, OWN, find
from experiments.lab.network import bits_per_second
from experiments.lab.peers import PEERS, TORCH
from experiments.lab.processes import milliseconds_of
from experiments.lab.worker import BaseWorker
from experiments.studies.lab import LabConfig, labels, operations, settings

ROOT = Path(__file__).parents[3]


def test_measurements_are_whole_periods_of_the_slowest_worker() -> None:
    answers = [{"milliseconds": [1.0, 9.0, 2.0, 8.0]}, {"milliseconds": [2.0, 2.0, 20.0, 2.0]}]
    assert milliseconds_of(answers, 1) == (9 + 8) / 2
    assert milliseconds_of(answers, 2) == (5 + 11) / 2


class FakeWorker(BaseWorker):
    """A worker that is its own replica, and whose evaluated losses are given."""

    rank, workers = 0, 1

    def __init__(self, *losses: float):
        self.losses, self.done = iter(losses), []
        self.inputs = self
        self.held_out = np.zeros(4)
        self.replica = lambda *_: self
        self.batch = lambda replica, seed, number: number
        self.total = lambda value: value

    def step(self, batch: int) -> float:
        self.done.append(batch)
        return float(batch)

    def loss(self, rows: np.ndarray) -> float:
        return next(self.losses)


def test_evaluations_precede_and_follow_training() -> None:
    worker = FakeWorker(3.0, 2.0, 1.0)
    curve = worker.train("mean", 0.1, steps=5, seed=0, evaluate_every=3)
    assert worker.done == [0, 1, 2, 3, 4] and curve["losses"] == [0, 1, 2, 3, 4]
    assert curve["steps"] == [0, 3, 5] and curve["evaluated"] == [3, 2, 1]
    assert 0 == curve["seconds"][0] < curve["seconds"][1] < curve["seconds"][2]
    for loss in (np.nan, np.inf):  # Training ends when it diverges.
        curve = FakeWorker(1.0, loss, 1.0).train("mean", 0.1, 50, 0, 10)
        assert curve["steps"] == [0, 10] and len(curve["losses"]) == 10


def test_operations_are_summed_over_threads_without_nested_ones(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"ph": "X", "pid": 1, "tid": thread, "ts": begin, "dur": took, "args": {"hlo_op": name}}
        for name, begin, took, thread in (("call", 0, 8, 0), ("dot", 1, 3, 0), ("dot", 2, 5, 1))
    ]
    events += [
        {"ph": "X", "pid": 1, "tid": 0, "ts": 20, "dur": 5, "name": "host"},
        {"ph": "M", "pid": 1, "name": "thread_name", "args": {"name": "main"}},
    ]
    file = tmp_path / "kept.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert operations(file) == {"dot": 8, "call": 5}


def test_methods_and_links() -> None:
    config = LabConfig(bandwidth=("1gbit",), between=("20mbit",), methods=("mean", "hierarchical"))
    assert [tuple(each.values()) for each in settings(config) if each["method"] != "mean"] == [
        ("unshaped", "no_communication"),
        ("unshaped", "hierarchical"),
        ("1gbit", "no_communication"),
        ("2 clusters, 20mbit", "no_communication"),
        ("2 clusters, 20mbit", "hierarchical"),
    ]
    assert {*LABELS} <= {*labels(LabConfig(methods=("all",)))}
    for label in LABELS:
        assert find(label).period >= 1


def test_a_bandwidth_is_what_tc_reads() -> None:
    assert bits_per_second("1.5gbit") == 1.5e9
    for text in ("200mb", "0mbit", "-1gbit", ""):
        with pytest.raises(ExperimentError, match="a bandwidth is a number with kbit, mbit or"):
            settings(LabConfig(methods=("mean",), bandwidth=(text,)))


def test_pytorch_is_missing_or_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    for version, found in ((absent, "none"), (lambda name: "2.9.1+cpu", "2.9.1")):
        monkeypatch.setattr("importlib.metadata.version", version)
        with pytest.raises(ExperimentError, match=rf"found {found}.* pip install 'jaxcomm\[peers"):
            settings(LabConfig(methods=("ddp",)))
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{TORCH}+cpu")
    assert settings(LabConfig(methods=("ddp",)))
    monkeypatch.setattr("importlib.metadata.version", absent)
    assert not {*labels(LabConfig())} & {*PEERS}


def in_the_lab(program: str) -> str:
    """What a program prints in a private network; skips where the machine does not permit one."""
    done = subprocess.run(
        [sys.executable, "-c", f"from experiments.lab.network import *\nisolate()\n{program}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path[1:]))},
        capture_output=True,
        text=True,
    )
    if "network namespaces are not permitted here" in done.stderr:
        pytest.skip("no network namespaces")
    assert not done.returncode, done.stderr
    return done.stdout


NETWORK = r"""
ends = (("worker0", "eth0"), ("switch", "port3"), ("switch", "trunk0"))
network = Network(4)
for link in (Link(), Link("200mbit"), Link("50mbit", 2), Link()):
    network.shape(link)
    shown = (run("tc", "-n", space, "qdisc", "show", "dev", device) for space, device in ends)
    rates = [found[1] if (found := re.search(r"rate (\S+)", each)) else "-" for each in shown]
    bridge, = re.findall("bridge.", run("ip", "-n", "switch", "link", "show", "port3"))
    print(*rates, bridge)
"""


def test_links_are_shaped_and_nothing_remains() -> None:
    before = {path.name for path in Path("/run/netns").glob("*")}
    assert in_the_lab(NETWORK).splitlines() == [
        "- - - bridge0",
        "200Mbit 200Mbit - bridge0",
        "- - 50Mbit bridge1",
        "- - - bridge0",
    ]
    assert {path.name for path in Path("/run/netns").glob("*")} == before


DEATH = """
import signal
from experiments.lab.processes import Group

Network(2)
group = Group("jax_worker", 2, {"model": "mlp"})
os.kill(group.processes[1].pid, signal.SIGKILL)
try:
    group.ask("prepare", method="mean")
except LabError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_worker_that_dies_is_one_line() -> None:
    assert in_the_lab(DEATH).startswith("worker 1 (jax_worker) has ended with exit code -9")


WORDS = """
import json
from experiments.lab.processes import Lab
from experiments.studies.lab import LabConfig

lab = Lab(LabConfig(workers=2), "words")
for name in ("mean", "s2_peel", "union"):
    lab.prepare(name)
    answers = lab.measure(name, 3, 1)
    print(json.dumps([answers[0]["losses"], answers[1]["losses"], answers[0]["sent"]]))
"""


@pytest.mark.slow
def test_methods_for_sparse_updates_take_the_same_steps() -> None:
    mean, *others = map(json.loads, in_the_lab(WORDS).splitlines())
    for losses, others_losses, sent in others:
        assert losses == others_losses == pytest.approx(mean[0], rel=1e-4)
        assert sent < 0.7 * mean[2]


@pytest.mark.slow
def test_exchanges_beside_steps_take_less_time() -> None:
    """On a link on which an exchange takes several steps, and both are the same bytes."""
    in_the_lab("")
    command = [sys.executable, "-m", "experiments.lab.overlap", "--rounds", "1", "--periods", "1"]
    command += ["--rate", "50mbit"]  # Waiting for exchanges doubles the mean time of a step.
    done = subprocess.run([*command, "--model", "transformer"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[1]: line.split()[2:] for line in done.stdout.splitlines()[1:]}
    whole, beside = ([float(x) for x in rows[form]] for form in ("one_program", "overlapped"))
    assert beside[0] < whole[0]
    assert beside[2] < whole[2] / 2  # The step that begins an exchange does not wait for it.
    assert beside[4] == pytest.approx(whole[4], rel=0.05)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [each for child in map(int, text.split()) for each in (child, *children(child))]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, signal.SIGINT, signal.SIGKILL])
def test_a_whole_run_leaves_no_process(stop: signal.Signals | None, tmp_path: Path) -> None:
    in_the_lab("")
    options = "--methods mean --bandwidth 1gbit --workers 2 --rounds 2 --steps 1 --attempts 1"
    command = [sys.executable, "-m", "experiments", "lab", *options.split()]
    folders = ["--records", str(tmp_path / "records"), "--traces", str(tmp_path / "traces")]
    with subprocess.Popen([*command, *folders], cwd=ROOT, stdout=-1, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if stop and "seed 0" in line:
                break
        workers = children(process.pid) if stop else []
        if stop:
            process.send_signal(stop)
        code = process.wait(60)
    assert code == {None: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[stop]
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if stop is None:
        (folder,) = (tmp_path / "records").iterdir()
        assert "Outcome: holds in 2 of 2 settings" in (folder / "README.md").read_text()
        assert "| total |" in (tmp_path / "traces" / "mean_1gbit.md").read_text()


@pytest.mark.parametrize("label", [*OWN, "mean_freed_memory"])
def test_methods_of_the_lab_are_built(label: str) -> None:
    find(label).build(4, optax.sgd(0.1))
