"""Steps of workers that share a slow link: one network namespace each, joined by a bridge.

    python tools/link_bench.py --rate 200mbit
    python tools/link_bench.py --rate none --only 'none;mean;int8'

On Linux, as root, with iproute2. Each worker is a process of one CPU device; `tc` shapes both
directions. All contenders run in turns in one session, so that other load of the machine is the
same for all. Bytes are those counted by the worker's interface, printed beside those of
`jaxcomm.wire.account`. Threads: JAX's default, or NPROC where that is set.
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import launch
from jaxcomm.aggregation import all_gather_mean, two_stage_mean
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k

LAYERS, SIDE, ROWS = 10, 1024, 8
NAME, NETWORK, PORT = "jaxcomm-link", "10.77.0", 1234
BURST = "96kb"  # More than one segment of 64 KB, which tbf would cut into packets.


def plain(mean_of: Callable[[Any], Any]) -> optax.GradientTransformation:
    """An aggregator as a user would write it."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda x, state, params=None: (mean_of(x), state)
    )


def psum_of_leaves(x: Any) -> Any:
    return jax.tree.map(lambda total: total / lax.axis_size("data"), lax.psum(x, "data"))


def psum_flat(x: Any) -> Any:
    vector, restore = jax.flatten_util.ravel_pytree(x)
    return restore(lax.psum(vector, "data") / lax.axis_size("data"))


def int8_flat(x: Any) -> Any:
    """One scale for all leaves, rounded to nearest, few enough levels that int8 holds the sum."""
    vector, restore = jax.flatten_util.ravel_pytree(x)
    workers = lax.axis_size("data")
    scale = lax.pmax(jnp.max(jnp.abs(vector)), "data") / (127 // workers)
    codes = jnp.round(vector / scale).astype(jnp.int8)
    return restore(lax.psum(codes, "data").astype(jnp.float32) * (scale / workers))


def int8_leaves(x: Any) -> Any:
    """As `int8_flat`, but leaves stay separate, and one `psum` of a tree adds them."""
    workers = lax.axis_size("data")
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(x)]))
    scale = lax.pmax(largest, "data") / (127 // workers)
    codes = jax.tree.map(lambda leaf: jnp.round(leaf / scale).astype(jnp.int8), x)
    totals = lax.psum(codes, "data")
    return jax.tree.map(lambda total: total.astype(jnp.float32) * (scale / workers), totals)


CONTENDERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "none": optax.identity,
    "float32": lambda: plain(psum_flat),
    "float32 by leaf": lambda: plain(psum_of_leaves),
    "int8": lambda: plain(int8_flat),
    "int8 by leaf": lambda: plain(int8_leaves),
    "mean": jaxcomm.mean,
    "mean, bfloat16": lambda: jaxcomm.mean(wire_dtype=jnp.bfloat16),
    "global_qsgd, 8 bits": lambda: jaxcomm.global_qsgd(bits=8),
    "two stages, 8 bits": lambda: two_stage_mean("data", dither(bits=8)),
    "gathered, 8 bits": lambda: all_gather_mean("data", dither(bits=8)),
    "two stages, blocks of 4 bits": lambda: two_stage_mean("data", blockwise(dither(bits=4), 256)),
    "ef_sign_sgd": jaxcomm.ef_sign_sgd,
    "signum": jaxcomm.signum,
    "top-k with feedback": lambda: all_gather_mean("data", error_feedback(top_k(ratio=0.01))),
}

# Numerator, divisor, factor of the divisor, and the target of the ratio.
RATIOS = (
    ("mean", "float32", 1.0, "<= 1.03"),
    ("mean", "float32 by leaf", 1.0, "<= 1.03"),
    ("global_qsgd, 8 bits", "int8", 1.0, "<= 1.10"),
    ("mean, bfloat16", "mean", 0.5, "<= 1.10"),
)


class Measured(NamedTuple):
    """One contender."""

    milliseconds: list[list[float]]  # of each step of each round
    sent: list[float]  # bytes a step of each round
    accounted: float


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for layer in range(LAYERS):
        x = jnp.tanh(x @ params[f"weight {layer}"] + params[f"bias {layer}"])
    return jnp.mean((x - batch) ** 2)


def bytes_sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def work(names: list[str], rounds: int, steps: int) -> dict[str, Measured]:
    """Measures all contenders, as one of the workers."""
    launch.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    draw = np.random.default_rng(0).standard_normal
    params = {f"weight {i}": draw((SIDE, SIDE), np.float32) / 32 for i in range(LAYERS)}
    params |= {f"bias {i}": np.zeros(SIDE, np.float32) for i in range(LAYERS)}
    rows = np.random.default_rng(jax.process_index()).standard_normal((ROWS, SIDE), np.float32)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.make_array_from_process_local_data(sharding, rows)
    measured, run = {}, {}
    for name in names:
        began = time.perf_counter()
        tx = optax.chain(CONTENDERS[name](), optax.sgd(1e-3))
        alone = name == "none"
        own = jaxcomm.replicate(params, mesh) if alone else jax.tree.map(jnp.asarray, params)
        state = jaxcomm.init(tx, own, mesh)
        step = jaxcomm.make_step(loss_fn, tx, mesh, metrics="own" if alone else "mean")
        account = jaxcomm.wire.account(step, own, state, batch).bytes_per_worker
        measured[name] = Measured([], [], account)

        def again(step: Any = step, now: Any = [own, state]) -> None:  # noqa: B006
            *now[:], told = step(*now, batch)
            jax.block_until_ready((now, told))

        run[name] = again
        again()
        if launch.is_main_process():
            print(f"{name}: ready in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    for number in range(rounds):
        for name in names:
            run[name]()  # Once untimed: another contender's memory has been freed in between.
            multihost_utils.sync_global_devices(f"{name} {number}")
            before, taken = bytes_sent(), []
            for _ in range(steps):
                began = time.perf_counter()
                run[name]()
                taken.append(1e3 * (time.perf_counter() - began))
            multihost_utils.sync_global_devices(f"{name} {number} done")
            measured[name].milliseconds.append(taken)
            measured[name].sent.append((bytes_sent() - before) / steps)
    return measured


def report(measured: Mapping[str, Measured], rate: str) -> None:
    """Prints medians, and the spread of the medians of the rounds."""
    middle = {
        name: [statistics.median(taken) for taken in each.milliseconds]
        for name, each in measured.items()
    }
    print(f"| {rate} | ms a step | rounds, % | MB counted | MB accounted |\n|---|---|---|---|---|")
    for name, each in measured.items():
        taken = statistics.median(step for steps in each.milliseconds for step in steps)
        apart = 100 * (max(middle[name]) - min(middle[name])) / taken
        sent = statistics.median(each.sent) / 1e6
        print(f"| {name} | {taken:.1f} | {apart:.1f} | {sent:.2f} | {each.accounted / 1e6:.2f} |")
    for name, reference, share, goal in RATIOS:
        if name in measured and reference in measured:
            paired = zip(middle[name], middle[reference], strict=True)
            ratio = statistics.median(a / (share * b) for a, b in paired)
            print(f"{name} / ({share:g} {reference}): {ratio:.3f}, goal {goal}")
    if rate != "none" and "none" in measured:
        for name, each in measured.items():
            seconds = each.accounted * 8 / bits_per_second(rate)
            least = [1e3 * seconds + none for none in middle["none"]]
            ratio = statistics.median(a / b for a, b in zip(middle[name], least, strict=True))
            print(f"{name} / (its bytes at {rate} + no communication): {ratio:.3f}")


def bits_per_second(rate: str) -> float:
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]]


@contextlib.contextmanager
def network(workers: int, rate: str) -> Iterator[list[str]]:
    """The namespaces of the workers, removed afterwards."""
    switch, names = f"{NAME}-switch", [f"{NAME}-{worker}" for worker in range(workers)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    def clear() -> None:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)

    clear()  # Left by a run that was killed.
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for worker, name in enumerate(names):
            ip("netns", "add", name)
            peer = ("peer", "name", f"port{worker}", "netns", switch)
            ip("link", "add", "eth0", "netns", name, "type", "veth", *peer)
            ip("-n", name, "address", "add", f"{NETWORK}.{worker + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", switch, "link", "set", f"port{worker}", "master", "bridge", "up")
            for where, device in ((name, "eth0"), (switch, f"port{worker}")):
                if rate != "none":
                    shape = f"tc -n {where} qdisc add dev {device} root tbf"
                    limits = f"rate {rate} burst {BURST} latency 50ms"
                    subprocess.run(f"{shape} {limits}".split(), check=True)
        yield names
    finally:
        clear()


def start(names: list[str]) -> int:
    """Runs this program again in all namespaces; the exit code of the first that fails."""
    token = secrets.token_hex(16)
    # Gloo listens at the address of the machine's host name.
    prepare = 'mount --bind "$LINK_HOSTS" /etc/hosts && exec "$@"'
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        processes = []
        for worker, name in enumerate(names):
            hosts = Path(folder, name)
            hosts.write_text(
                f"127.0.0.1 localhost\n{NETWORK}.{worker + 1} {socket.gethostname()}\n"
            )
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": f"{NETWORK}.1:{PORT}",
                "JAX_NUM_PROCESSES": str(len(names)),
                "JAX_PROCESS_ID": str(worker),
                "JAXCOMM_TOKEN": token,
                "LINK_HOSTS": str(hosts),
            }
            command = ["ip", "netns", "exec", name, "sh", "-c", prepare, "sh", sys.executable]
            process = subprocess.Popen([*command, *sys.argv], env=environment)
            started.callback(process.wait)
            started.callback(process.kill)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            if failed := [process.returncode for process in processes if process.returncode]:
                return failed[0]
            time.sleep(0.1)
        return max(abs(process.returncode) for process in processes)


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit", help="of tc, such as 1gbit, or none")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument(
        "--only", help="contenders, as the table names them, with semicolons between"
    )
    options = parser.parse_args()
    names = options.only.split(";") if options.only else [*CONTENDERS]
    if unknown := [name for name in names if name not in CONTENDERS]:
        return f"link_bench: error: no contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}."
    if "LINK_HOSTS" in os.environ:
        measured = work(names, options.rounds, options.steps)
        if launch.is_main_process():
            report(measured, options.rate)
        return 0
    if os.geteuid() != 0:
        return "link_bench: error: network namespaces need root."
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"link_bench: error: {missing[0]} is missing; install iproute2."
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open(Path(tempfile.gettempdir(), NAME), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return "link_bench: error: another run of it holds the network."
        try:
            with network(options.workers, options.rate) as namespaces:
                return start(namespaces)
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
