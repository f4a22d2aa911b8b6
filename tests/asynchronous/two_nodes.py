"""Trains on two nodes of Ray on this machine, and counts the bytes on its loopback interface.

Run in a network namespace of its own, where nothing else sends.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SIZE, UPDATES = 2_000_000, 40


def received() -> int:
    """The bytes that the loopback interface has received so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.vdot(params, params) / 2 + 0 * jnp.mean(batch)


def batches(numbers: np.ndarray, worker: int) -> Any:
    return np.zeros(len(numbers), np.float32)


def policies() -> dict[str, Any]:
    """What is trained; in lazy rounds, each worker uploads in every fourth."""
    from jaxcomm import gossip
    from jaxcomm.compression.quantizers import dither
    from jaxcomm.synchronization import events

    tx = optax.sgd(0.01)
    return {
        "server": events.parameter_server(tx),
        "server_8_bits": events.parameter_server(tx, codec=dither(bits=8)),
        "lag_wk": events.lag_wk(0.01, max_skip=3),
        "laq": events.laq(0.01, 8, max_skip=3),
        "pairs": events.asynchronous_pairs(tx, gossip.ring(2)),
    }


def main(method: str) -> None:
    import ray
    from ray.cluster_utils import Cluster

    from jaxcomm import asynchronous

    # Two that meet are on both nodes; workers of an owner are on the other.
    meets = method == "pairs"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1 if meets else 2, resources={"other": 2})
    ray.init(address=cluster.address, logging_level="ERROR")
    counts = [received()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given: Any = (loss, np.ones(SIZE, np.float32), batches)
        options: dict[str, Any] = {
            "policy": policies()[method], "workers": 2, "devices": 1, "examples": 64,
            "batch_size": 1, "total": UPDATES, "progress": False,
        }  # fmt: skip
        result = asynchronous.train(
            *given, **options, worker_options={} if meets else {"resources": {"other": 1}},
            on_row=lambda row: counts.append(received()),
        )  # fmt: skip
    ray.shutdown()
    cluster.shutdown()
    again = asynchronous.train(*given, **options, replay=result.rows)
    print(json.dumps({
        "on_loopback": counts[-1] - counts[0],
        "up": result.summary.upload_bytes,
        "down": result.summary.download_bytes,
        "is_replayed": bool(np.array_equal(result.params, again.params)),
        "uploads": [row.number for row in result.rows if row.upload_bytes > 100],
        "warnings": [str(each.message) for each in caught if each.category is UserWarning],
    }))  # fmt: skip


if __name__ == "__main__":
    if os.environ.get("JAXCOMM_INSIDE") is None:
        command = 'ip link set lo up && exec "$0" "$@"'
        os.environ["JAXCOMM_INSIDE"] = "1"
        sys.exit(subprocess.call(["unshare", "-n", "sh", "-c", command, sys.executable, *sys.argv]))
    main(sys.argv[1])
