"""Groups of worker processes, one per namespace, which answer commands in lines of JSON."""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from experiments.lab.isolation import LabError
from experiments.lab.network import DEVICE, worker_address, worker_name
from jaxcomm.launch._environment import memory_environment

FIRST_PORT = 1234
POLL_SECONDS = 0.2
# Gloo listens at the address of the machine's host name.
_WITH_HOSTS = 'mount --bind "$LAB_HOSTS" /etc/hosts && exec "$@"'


def last_lines(path: Path, count: int = 3) -> str:
    """The end of a log, in one line."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-count:]) or "no output"


class Group:
    """All workers of one framework. They end when their standard input is closed."""

    def __init__(
        self,
        framework: str,
        workers: int,
        threads: int,
        arguments: Mapping[str, Any],
        *,
        keeps_memory: bool,
        port: int,
    ):
        """Starts the processes.

        Args:
          framework: `jax`, `torch`, or `overlap`.
          workers: The number of workers, whose namespaces exist.
          threads: The threads that compute in each process.
          arguments: Arguments of the worker's class.
          keeps_memory: Whether the allocator keeps freed memory, as under `jaxcomm.launch`.
          port: The port of the first worker, where the workers find each other.
        """
        self.framework = framework
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._processes: list[subprocess.Popen[str]] = []
        self._stack.callback(self._kill)
        for worker in range(workers):
            hosts = self._folder / f"hosts{worker}"
            hosts.write_text(
                f"127.0.0.1 localhost\n{worker_address(worker)} {socket.gethostname()}\n"
            )
            on_cpus = {**os.environ, "JAX_PLATFORMS": "cpu"}
            environment = {
                **on_cpus,
                **(memory_environment(on_cpus) if keeps_memory else {}),
                "LAB_HOSTS": str(hosts),
                "XLA_FLAGS": "",
                "NPROC": str(threads),  # The size of XLA's pool of threads.
                "OMP_NUM_THREADS": str(threads),
                "JAX_COORDINATOR_ADDRESS": f"{worker_address(0)}:{port}",
                "JAX_NUM_PROCESSES": str(workers),
                "JAX_PROCESS_ID": str(worker),
                "MASTER_ADDR": worker_address(0),
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(workers),
                "RANK": str(worker),
                "GLOO_SOCKET_IFNAME": DEVICE,
            }
            module = ("-m", "experiments.lab.serve", framework, json.dumps(dict(arguments)))
            command = ("ip", "netns", "exec", worker_name(worker), "sh", "-c", _WITH_HOSTS, "sh")
            with open(self._log(worker), "w") as log:
                process = subprocess.Popen(
                    (*command, sys.executable, *module),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                    start_new_session=True,  # Ctrl+C is for the process that starts them.
                )
            self._processes.append(process)

    def _log(self, worker: int) -> Path:
        return self._folder / f"log{worker}"

    def _died(self, worker: int) -> LabError:
        code = self._processes[worker].wait()
        return LabError(
            f"worker {worker} ({self.framework}) has ended with exit code {code}: "
            f"{last_lines(self._log(worker))}"
        )

    def ask(self, command: str, seconds: float = 600, **arguments: Any) -> list[dict[str, Any]]:
        """Sends a command to all workers and returns their answers.

        Args:
          command: The name of a method of the worker.
          seconds: The time limit.
          **arguments: Its arguments.

        Raises:
          LabError: If a worker reports an error, has ended, or does not answer in time.
        """
        line = json.dumps({"command": command, "arguments": arguments})
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for worker, process in enumerate(self._processes):
                try:
                    print(line, file=process.stdin, flush=True)
                except BrokenPipeError as error:
                    raise self._died(worker) from error
                selector.register(process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            deadline = time.monotonic() + seconds
            while len(answers) < len(self._processes):
                if time.monotonic() > deadline:
                    waiting = [w for w in range(len(self._processes)) if w not in answers]
                    raise LabError(
                        f"worker {waiting[0]} ({self.framework}) has not answered `{command}` in "
                        f"{seconds:g} s: {last_lines(self._log(waiting[0]))}"
                    )
                for event, _ in selector.select(POLL_SECONDS):
                    worker = event.data
                    answer = self._processes[worker].stdout.readline()  # type: ignore[union-attr]
                    if not answer:
                        raise self._died(worker)
                    answers[worker] = json.loads(answer)
                    if "error" in answers[worker]:
                        raise LabError(f"{self.framework}: {answers[worker]['error']}")
        return [answers[worker] for worker in range(len(self._processes))]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """Ends all processes."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
