"""Training over slow links: asynchronous on Ray, and one synchronous program, beside each other.

Each worker is in a network namespace of its own, as the owner is, with a limited link to a switch.
"""

import contextlib
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen

from experiments.lab.network import DEVICE, Link, Network, worker_address, worker_name
from experiments.lab.processes import WITH_HOSTS
from experiments.studies._asynchronous_runs import replayed_losses
from experiments.tasks.data import load
from jaxcomm import asynchronous, compression
from jaxcomm.asynchronous._messages import Job
from jaxcomm.synchronization import events

WORKERS, BATCH, PERIOD = 4, 32, 10
PACE = 0.05  # Seconds of a gradient.
SECONDS_TO_START = 30.0
PORT, COORDINATOR = 6379, 1234
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Wide(linen.Module):
    """600,000 parameters, whose gradient costs little."""

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        hidden = inputs.reshape(len(inputs), -1)
        for width in (1024, 512):
            hidden = linen.relu(linen.Dense(width)(hidden))
        return linen.Dense(10)(hidden)


@functools.cache
def data() -> Any:
    found = load("digits", None)
    return np.asarray(found.train_inputs), np.asarray(found.train_labels)


def first_weights(seed: int) -> Any:
    return Wide().init(jax.random.key(seed), data()[0][:1])["params"]


def loss(params: Any, batch: Any) -> jax.Array:
    logits = Wide().apply({"params": params}, batch[0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


whole_loss = jax.jit(loss)


def batches(numbers: np.ndarray, worker: int) -> Any:
    time.sleep(PACE)
    return tuple(x[numbers] for x in data())


# The rate of an update that has the gradients of all workers.
POLICIES: dict[str, Callable[[float], events.Policy]] = {
    "server": lambda rate: events.parameter_server(optax.sgd(rate / WORKERS)),
    "decoupled_4_bits": lambda rate: events.decoupled_diloco(
        optax.sgd(rate), OUTER, PERIOD, quorum=2, grace=0.5,
        codec=compression.blockwise(compression.quantizers.dither(bits=4), 64),
    ),
}  # fmt: skip


def losses_of(method: str, rate: float, rows: list[asynchronous.Row]) -> list[tuple[float, float]]:
    """`(seconds, training loss)` of a run, by a replay."""
    quick = lambda numbers, worker: tuple(x[numbers] for x in data())  # noqa: E731
    given = loss, quick, POLICIES[method](rate), WORKERS, 0, BATCH, 1, False, None
    every = 1 if method.startswith("decoupled") else 8
    return replayed_losses(
        Job(*given, len(data()[1])), first_weights(0), rows, every,
        lambda params: whole_loss(params, data()),
    )  # fmt: skip


def asynchronously(method: str, output: pathlib.Path, /, rate: float, seconds: float) -> None:
    """The program of an asynchronous run, in the namespace of the owner."""
    try:
        result = asynchronous.train(
            loss, first_weights(0), batches, policy=POLICIES[method](rate), workers=WORKERS,
            examples=len(data()[1]), batch_size=BATCH, devices=1, progress=False,
            seconds=seconds + SECONDS_TO_START,
        )  # fmt: skip
    except FloatingPointError:  # The rate is too high.
        output.write_text(json.dumps({"losses": []}))
        return
    # As in the other program, the time begins when all have compiled.
    begun = max(
        row.seconds - (row.examples / BATCH - 1) * PACE
        for row in result.rows
        if row.kind == "arrived" and row.number == 0
    )
    losses = [(at - begun, loss) for at, loss in losses_of(method, rate, result.rows)]
    summary = result.summary
    output.write_text(json.dumps({
        "losses": losses, "upload_bytes": summary.upload_bytes, "examples": summary.examples,
        "download_bytes": summary.download_bytes,
    }))  # fmt: skip


def synchronously(output: pathlib.Path, /, rate: float, seconds: float) -> None:
    """A process of the synchronous program."""
    import jaxcomm
    from jaxcomm import launch

    launch.initialize()
    mesh = jax.make_mesh((WORKERS,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    tx = optax.chain(jaxcomm.mean(), optax.sgd(rate))
    params = first_weights(0)
    step, opt_state = jaxcomm.make_step(loss, tx, mesh), jaxcomm.init(tx, params, mesh)
    order, found, begun = np.random.default_rng(0), [], time.monotonic()
    for number in range(10**9):
        # All processes draw the same numbers, and see the same time.
        numbers = order.integers(len(data()[1]), size=WORKERS * BATCH)
        mine = batches(numbers[jax.process_index() * BATCH :][:BATCH], 0)
        batch = jax.make_array_from_process_local_data(sharding, mine)
        params, opt_state, metrics = step(params, opt_state, batch)
        metrics["loss"].block_until_ready()
        if number == 0:
            begun = time.monotonic()  # It has been compiled.
        if number % 4 == 3 and jax.process_index() == 0:
            now = time.monotonic() - begun
            mine = jax.tree.map(lambda x: x.addressable_data(0), params)
            found.append((now, float(whole_loss(mine, data()))))
            output.write_text(json.dumps({"losses": found, "steps": number + 1}))
            if now > seconds:
                os._exit(0)  # The others end with it.


# The machine.


def inside(worker: int, *command: str, **variables: str) -> subprocess.Popen[bytes]:
    """Starts a program in the namespace of a worker; the owner is number 0."""
    folder = pathlib.Path(tempfile.mkdtemp())
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{worker_address(worker)} {socket.gethostname()}\n")
    place = ("ip", "netns", "exec", worker_name(worker), "sh", "-c", WITH_HOSTS, "sh")
    environment = {
        **os.environ, "LAB_HOSTS": str(hosts), "JAX_PLATFORMS": "cpu", "NPROC": "1",
        "XLA_FLAGS": "",  # One device in a process.
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(folder),
        "GLOO_SOCKET_IFNAME": DEVICE, **variables,
    }  # fmt: skip
    path = pathlib.Path(variables.get("LOG", folder / "log"))
    with path.open("w") as log:
        return subprocess.Popen((*place, *command), env=environment, stdout=log, stderr=log)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Nodes of Ray in all namespaces; that of the owner has no worker."""
    ray, head = str(pathlib.Path(sys.executable).with_name("ray")), worker_address(0)
    first = ("--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0")
    nodes = []
    for worker in range(WORKERS + 1):
        which = first if worker == 0 else (f"--address={head}:{PORT}", "--num-cpus=1")
        address = f"--node-ip-address={worker_address(worker)}"
        log = pathlib.Path(tempfile.mkdtemp()) / "log"
        nodes.append(inside(worker, ray, "start", *which, address, "--block", LOG=str(log)))
        # Nodes that start at once time out on two cores.
        while "will now block" not in log.read_text():
            assert nodes[-1].poll() is None, log.read_text()
            time.sleep(0.2)
    try:
        yield
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait()


def run(network: Network, method: str, rate: float, seconds: float, output: pathlib.Path) -> Any:
    """One run over the links; returns what it has written."""
    # Functions of a module that is imported are sent by their names.
    module = (sys.executable, "-c", f"from {__name__} import program; program()")
    options = ("--rate", str(rate), "--seconds", str(seconds))
    if method == "synchronous":
        processes = [
            inside(
                worker + 1, *module, "synchronously", str(output), *options,
                JAX_COORDINATOR_ADDRESS=f"{worker_address(1)}:{COORDINATOR}",
                JAX_NUM_PROCESSES=str(WORKERS), JAX_PROCESS_ID=str(worker),
            )
            for worker in range(WORKERS)
        ]  # fmt: skip
        for process in processes:
            process.wait()
    else:
        with cluster():
            address = f"{worker_address(0)}:{PORT}"
            given = ("asynchronously", method, str(output), *options)
            inside(0, *module, *given, RAY_ADDRESS=address).wait()
    return json.loads(output.read_text())


def network_of(rate: str, milliseconds: float) -> Network:
    """The namespaces of the owner and the workers."""
    network = Network(WORKERS + 1, milliseconds)
    network.shape(Link(rate))
    return network


def program() -> None:
    """What runs in a namespace."""
    tyro.extras.subcommand_cli_from_dict(
        {"asynchronously": asynchronously, "synchronously": synchronously}
    )
