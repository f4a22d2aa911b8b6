"""The slow-network lab: its network and its workers."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.errors import ExperimentError
from experiments.lab import serve
from experiments.lab.methods import LABELS, find
from experiments.lab.network import Link, bits_per_second
from experiments.lab.peers import METHODS as PEERS
from experiments.studies.lab import Lab, parse_bandwidth
from experiments.training.lab import (
    Limits,
    labels,
    links,
    milliseconds_of,
    settings,
    steps_of,
)

ROOT = Path(__file__).parents[3]


def test_measurements_are_whole_periods_of_the_slowest_worker() -> None:
    answers = [{"milliseconds": [1.0, 9.0, 2.0, 8.0]}, {"milliseconds": [2.0, 2.0, 20.0, 2.0]}]
    assert milliseconds_of(answers, 1) == (9 + 8) / 2
    assert milliseconds_of(answers, 2) == (5 + 11) / 2
    limits = Limits(steps=10, seconds=4.0, drift=0.05, attempts=4)
    assert steps_of(limits, 1, 0.1) == 10
    assert steps_of(limits, 1, 9.0) == 1
    assert steps_of(limits, 8, 0.1) == 8
    assert steps_of(limits, 8, 9.0) == 8


def test_presets_and_links() -> None:
    config = Lab(bandwidth=("1gbit",), between=("20mbit",), methods=("mean", "hierarchical"))
    assert links(config) == [Link(), Link("1gbit"), Link("20mbit", 2)]
    assert [tuple(each.values()) for each in settings(config) if each["method"] != "mean"] == [
        ("unshaped", "no_communication"),
        ("unshaped", "hierarchical"),
        ("1gbit", "no_communication"),
        ("2 clusters, 20mbit", "no_communication"),
        ("2 clusters, 20mbit", "hierarchical"),
    ]
    assert {*LABELS} <= {*labels(Lab(methods=("all",)))}
    for label in LABELS:
        assert find(label).period >= 1


def test_a_bandwidth_is_what_tc_reads() -> None:
    assert parse_bandwidth("1.5gbit") == "1.5gbit" and bits_per_second("1.5gbit") == 1.5e9
    for text in ("200mb", "0mbit", "-1gbit", ""):
        with pytest.raises(ValueError, match="a bandwidth is a number with kbit, mbit or gbit"):
            bits_per_second(text)


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match=r"jaxcomm\[peers\]"):
        settings(Lab(methods=("ddp",), rounds=1))
    assert not {*labels(Lab())} & {*PEERS}


def test_the_counter_of_the_interface_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "COUNTERS", tmp_path)
    assert serve.bytes_sent() is None
    (tmp_path / "tx_bytes").write_text("123\n")
    assert serve.bytes_sent() == 123


def in_the_lab(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process that may change its namespaces."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def is_permitted() -> bool:
    """Whether this machine permits the lab's namespaces."""
    done = in_the_lab("from experiments.lab.isolation import isolate; isolate()")
    assert not done.returncode or "LabError" in done.stderr
    return done.returncode == 0


NETWORK = """
import json
from experiments.lab.isolation import isolate, run
from experiments.lab.network import Link, Network

isolate()
network = Network(4)

def state():
    shaped = {device: "tbf" in run("tc", "-n", space, "qdisc", "show", "dev", device)
              for space, device in (("worker0", "eth0"), ("switch", "port3"), ("switch", "trunk0"))}
    rate = run("tc", "-n", "worker0", "qdisc", "show", "dev", "eth0")
    port = run("ip", "-n", "switch", "link", "show", "port3")
    return {"shaped": shaped, "rate": rate, "port": port}

states = [state()]
for link in (Link("200mbit"), Link("50mbit", 2), Link()):
    network.shape(link)
    states.append(state())
print(json.dumps({"states": states, "names": run("ip", "netns", "list")}))
"""


def test_links_are_shaped_and_nothing_remains() -> None:
    before = {path.name for path in Path("/run/netns").glob("*")}
    done = in_the_lab(NETWORK)
    assert {path.name for path in Path("/run/netns").glob("*")} == before
    if done.returncode:  # Without the rights, the error is one line with the remedy.
        assert not is_permitted(), done.stderr
        assert "network namespaces are not permitted here" in done.stderr
        return
    found = json.loads(done.stdout)
    plain, flat, clusters, again = found["states"]
    assert not any(plain["shaped"].values()) and plain["shaped"] == again["shaped"]
    assert flat["shaped"] == {"eth0": True, "port3": True, "trunk0": False}
    assert "rate 200Mbit" in flat["rate"]
    assert clusters["shaped"] == {"eth0": False, "port3": False, "trunk0": True}
    assert "bridge0" in flat["port"] and "bridge1" in clusters["port"]
    assert re.findall(r"worker\d", found["names"])


DEATH = """
import os, signal
from experiments.lab.isolation import isolate
from experiments.lab.network import Network
from experiments.lab.processes import Group

isolate()
Network(2)
group = Group("jax", 2, 1, {"model": "mlp", "seed": 0}, keeps_memory=True, port=1234)
pids = [process.pid for process in group._processes]
os.kill(pids[1], signal.SIGKILL)
try:
    group.ask("prepare", method="mean", learning_rate=0.1)
except Exception as error:
    print(type(error).__name__, error)
group.close()
print([process.poll() is None for process in group._processes])
"""


@pytest.mark.slow
def test_a_worker_that_dies_is_one_line() -> None:
    done = in_the_lab(DEATH)
    if done.returncode:
        assert not is_permitted(), done.stderr
        return
    error, running = done.stdout.splitlines()
    assert re.match(r"LabError worker 1 \(jax\) has ended with exit code -9", error)
    assert running == "[False, False]"


WORDS = """
import json
from experiments.lab.isolation import isolate
isolate()
from experiments.studies.lab import Lab as Config
from experiments.training.lab import Lab

lab = Lab(Config(workers=2), "words")
for name in ("mean", "s2_peel", "union"):
    lab.prepare(name)
    answers = lab.measure(name, 3, 1)
    print(json.dumps([answers[0]["losses"], answers[1]["losses"], answers[0]["sent"]]))
lab.close()
"""


@pytest.mark.slow
def test_methods_for_sparse_updates_take_the_same_steps() -> None:
    done = in_the_lab(WORDS)
    if done.returncode:
        assert not is_permitted(), done.stderr
        return
    mean, *others = map(json.loads, done.stdout.splitlines())
    for losses, others_losses, sent in others:
        assert losses == others_losses == pytest.approx(mean[0], rel=1e-4)
        assert sent < 0.7 * mean[2]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [each for child in map(int, text.split()) for each in (child, *children(child))]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, signal.SIGINT, signal.SIGKILL])
def test_a_whole_run_leaves_no_process(stop: signal.Signals | None, tmp_path: Path) -> None:
    if not is_permitted():
        return
    options = "--methods mean --bandwidth 1gbit --workers 2 --rounds 2 --steps 1 --attempts 1"
    command = [sys.executable, "-m", "experiments", "lab", *options.split()]
    with subprocess.Popen(
        [*command, "--records", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
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
        (folder,) = tmp_path.iterdir()
        assert "Outcome: holds in 2 of 2 settings" in (folder / "README.md").read_text()
