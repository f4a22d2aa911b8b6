"""Worker processes, one per namespace, and measurements of their steps between two of a control."""

import atexit
import contextlib
import functools
import json
import math
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.methods import CONTROL, FREED, find
from experiments.lab.network import DEVICE, LabError, Link, Network, worker_address, worker_name
from experiments.lab.peers import PEERS
from experiments.lab.worker import Answer
from jaxcomm.launch._environment import memory_environment

FIRST_PORT = 1234
CONTROL_STEPS = 16
DRIFT = 0.05  # The largest change of the control around a measurement that counts.
RECENT_SECONDS = 1.0
# Gloo listens at the address of the machine's host name.
WITH_HOSTS = 'mount --bind "$LAB_HOSTS" /etc/hosts && exec "$@"'


class Group:
    """All workers of one framework, which answer commands in lines of JSON.

    They end with this process: when their standard input is closed.
    """

    def __init__(
        self,
        framework: str,
        workers: int,
        arguments: Mapping[str, Any],
        *,
        threads: int = 1,
        keeps_memory: bool = True,
        port: int = FIRST_PORT,
    ):
        """Starts the processes.

        Args:
          framework: `jax_worker`, `torch_worker` or `overlap`, the module of the worker's class.
          workers: The number of workers, whose namespaces exist.
          arguments: Arguments of the worker's class.
          threads: The threads that compute in each process.
          keeps_memory: Whether the allocator keeps freed memory, as under `jaxcomm.launch`.
          port: The port of the first worker, where the workers find each other.
        """
        self.name = framework
        self._folder = tempfile.TemporaryDirectory()
        self.processes = []
        atexit.register(self.close)
        on_cpus = {**os.environ, "JAX_PLATFORMS": "cpu"}
        module = ("-m", "experiments.lab.worker", f"experiments.lab.{framework}")
        command = (sys.executable, *module, json.dumps(arguments))
        for rank in range(workers):
            hosts = Path(self._folder.name) / f"hosts{rank}"
            hosts.write_text(
                f"127.0.0.1 localhost\n{worker_address(rank)} {socket.gethostname()}\n"
            )
            environment = on_cpus | (memory_environment(on_cpus) if keeps_memory else {})
            environment |= {
                "LAB_HOSTS": str(hosts),
                "XLA_FLAGS": "",
                "NPROC": str(threads),  # The size of XLA's pool of threads.
                "OMP_NUM_THREADS": str(threads),
                "JAX_COORDINATOR_ADDRESS": f"{worker_address(0)}:{port}",
                "JAX_NUM_PROCESSES": str(workers),
                "JAX_PROCESS_ID": str(rank),
                "MASTER_ADDR": worker_address(0),
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(workers),
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": DEVICE,
            }
            inside = ("ip", "netns", "exec", worker_name(rank), "sh", "-c", WITH_HOSTS, "sh")
            with open(self._log(rank), "w") as log:
                process = subprocess.Popen(
                    (*inside, *command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                    start_new_session=True,  # Ctrl+C is for the process that starts them.
                )
            self.processes.append(process)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log{rank}"

    def _error(self, rank: int, problem: str) -> LabError:
        """The error of a worker, with the end of its log."""
        lines = self._log(rank).read_text(errors="replace").split("\n")
        end = " | ".join([line.strip() for line in lines if line.strip()][-3:])
        return LabError(f"worker {rank} ({self.name}) {problem}: {end or 'no output'}")

    def ask(self, command: str, seconds: float = 1800, **arguments: Any) -> list[Answer]:
        """Sends a command to all workers and returns their answers.

        Args:
          command: The name of a method of the worker.
          seconds: The time limit.
          **arguments: Its arguments.

        Raises:
          LabError: If a worker reports an error, has ended, or does not answer in time.
        """
        line = json.dumps({"command": command, "arguments": arguments})
        answers, waiting = {}, {}
        for rank, process in enumerate(self.processes):
            with contextlib.suppress(BrokenPipeError):  # Its answer is then the end of a file.
                print(line, file=process.stdin, flush=True)
            waiting[process.stdout] = rank
        deadline = time.monotonic() + seconds
        while waiting:
            ready, _, _ = select.select([*waiting], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                rank = min(waiting.values())
                raise self._error(rank, f"has not answered `{command}` in {seconds:g} s")
            for stream in ready:
                rank, answer = waiting.pop(stream), stream.readline()
                if not answer:
                    code = self.processes[rank].wait()
                    raise self._error(rank, f"has ended with exit code {code}")
                answers[rank] = json.loads(answer)
                if "error" in answers[rank]:
                    raise LabError(f"{self.name}: {answers[rank]['error']}")
        return [answers[rank] for rank in range(len(self.processes))]

    def close(self) -> None:
        """Ends all processes."""
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def milliseconds_of(answers: Sequence[Answer], period: int) -> float:
    """The median over periods of the milliseconds per step of the slowest worker."""
    times = np.array([answer["milliseconds"] for answer in answers])  # [workers, steps]
    periods = times.reshape(len(times), -1, period).mean(axis=2)
    return float(np.median(periods.max(axis=0)))


class Lab:
    """The network and the workers of both frameworks, which stay for all measurements."""

    def __init__(self, config: Any, model: str, optimizer: str = "sgd", latency: float = 0.0):
        """Builds the network; workers start when they are needed.

        Args:
          config: The number of `workers`, and of a measurement the most `seconds`, and the
            `attempts`, of which the last one counts.
          model: `mlp`, `transformer` or `words`.
          optimizer: `sgd` or `adam`.
          latency: Milliseconds that a message takes to another worker.
        """
        self._config = config
        self._arguments = {"model": model, "optimizer": optimizer}
        self.network = Network(config.workers, 2 * latency)
        self._groups = {}
        self.prepare = functools.cache(self._prepare)
        self._last_control = (-math.inf, math.nan)  # When it ended, and its milliseconds.

    def group(self, method: str) -> Group:
        """The workers that run a method."""
        framework = "torch_worker" if method in PEERS else "jax_worker"
        peer = PEERS.get(method)
        keeps_memory = peer.keeps_memory if peer else not method.endswith(FREED)
        kind = framework, keeps_memory
        if kind not in self._groups:
            self._groups[kind] = Group(
                framework,
                self._config.workers,
                self._arguments,
                keeps_memory=keeps_memory,
                port=FIRST_PORT + len(self._groups),
            )
        return self._groups[kind]

    def _prepare(self, method: str) -> float | None:
        """Compiles the step of a method, on an unshaped link; returns the bytes of its account."""
        before = self.network.link
        self.network.shape(Link())
        answer, *_ = self.group(method).ask("prepare", method=method)
        self.network.shape(before)
        return answer.get("accounted")

    def measure(self, method: str, steps: int, warm_up: int) -> list[Answer]:
        """Measures steps on the present link."""
        return self.group(method).ask("measure", method=method, steps=steps, warm_up=warm_up)

    def control(self) -> float:
        """Milliseconds of a step without communication."""
        self.prepare(CONTROL)
        milliseconds = milliseconds_of(self.measure(CONTROL, CONTROL_STEPS, 2), 1)
        self._last_control = time.monotonic(), milliseconds
        return milliseconds

    def time_steps(self, method: str, link: Link, steps: int) -> Answer:
        """Measures steps on a link between two measurements of the control, until it is steady.

        Args:
          method: The method.
          link: The link.
          steps: The largest number of timed steps; they are whole periods of the method, at least
            one.

        Returns:
          The values of a row: `milliseconds` per step, `control`, `is_steady`, `rejected`, `steps`,
          and bytes `sent` per step, the `loss` of the last step, and bytes `accounted` if known.
        """
        config, accounted = self._config, self.prepare(method)
        is_own = method not in PEERS and self._arguments["model"] != "words"
        period = find(method).period if is_own else 1
        self.network.shape(link)
        rejected, is_steady = 0, False
        while not is_steady and rejected < config.attempts:
            ended, before = self._last_control
            if time.monotonic() - ended > RECENT_SECONDS:
                before = self.control()
            took = milliseconds_of(self.measure(method, period, period), period)
            most = min(steps, math.floor(1e3 * config.seconds / took))
            count = period * max(1, most // period)
            answers = self.measure(method, count, 0)
            after = self.control()
            is_steady = abs(after / before - 1) <= DRIFT
            rejected += not is_steady
        return {
            "milliseconds": milliseconds_of(answers, period),
            "control": statistics.mean((before, after)),
            "is_steady": is_steady,
            "rejected": rejected,
            "steps": count,
            "sent": statistics.mean(answer["sent"] / count for answer in answers),
            "loss": statistics.mean(answer["losses"][-1] for answer in answers),
            **({} if accounted is None else {"accounted": accounted}),
        }


def describe_measurements(config: Any, steps: int, rows: Sequence[Answer]) -> str:
    """How `Lab.time_steps` has measured the rows, for a README."""
    unsteady = sum(not row["is_steady"] for row in rows)
    return (
        f"A measurement is the median of at most {steps} steps, in at most {config.seconds:g} s. "
        "It follows a measurement of the control, which does not communicate, and precedes another "
        f"one. If the two controls differ by more than {100 * DRIFT:.0f} %, the measurement is "
        f"rejected and repeated. After {config.attempts} rejections the last one counts: "
        f"{unsteady} of {len(rows)} measurements."
    )
