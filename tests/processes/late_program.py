"""What each process runs of which one is slowed: the seconds of a step, and the bytes it sends."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxcomm import launch
from tests.processes.program import bytes_sent

LATE, STEPS, UNMEASURED, SIZE = 0.15, 12, 4, 100_000


def measure(tx: Any, is_late: Callable[[int], bool]) -> dict[str, float]:
    """Seconds per step, and the bytes per step that this process sends."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxcomm

    workers, own = jax.process_count(), jax.process_index()
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))

    def compute(step: Any) -> np.ndarray:
        time.sleep(LATE if is_late(int(step)) else 0)
        return np.zeros((), np.float32)

    def loss(params: jax.Array, batch: Any) -> jax.Array:
        nothing = jax.ShapeDtypeStruct((), jnp.float32)
        late = jax.pure_callback(compute, nothing, batch["step"][0])  # A slow forward pass.
        return jnp.sum((params * (1 + late) - batch["target"][0]) ** 2) / 2

    chain = optax.chain(tx, optax.sgd(0.1))
    step = jaxcomm.make_step(loss, chain, mesh, metrics="own")
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def batch(number: int) -> Any:
        values = {"step": np.full(1, number, np.int32), "target": np.full(1, own, np.float32)}
        return {
            name: jax.make_array_from_process_local_data(rows, x, (workers,))
            for name, x in values.items()
        }

    params = jnp.zeros(SIZE)
    carry = params, jaxcomm.init(chain, params, mesh)
    began, before = 0.0, 0
    for number in range(UNMEASURED + STEPS):
        if number == UNMEASURED:
            jax.block_until_ready(carry)
            before, began = bytes_sent(), time.perf_counter()
        *carry, _ = step(*carry, batch(number))
    jax.block_until_ready(carry)
    seconds = (time.perf_counter() - began) / STEPS
    return {"seconds": seconds, "bytes": (bytes_sent() - before) / STEPS}


def main(folder: Path) -> None:
    launch.initialize(120.0)

    import jax
    import jax.numpy as jnp

    import jaxcomm

    workers, own = jax.process_count(), jax.process_index()

    def in_order(key: Any, step: Any, shape: tuple[int, int]) -> jax.Array:
        """The last worker is always the last to finish."""
        return jnp.broadcast_to(jnp.arange(float(shape[0]))[:, None], shape)

    methods = {
        "mean": jaxcomm.mean(),
        "delayed": jaxcomm.delayed(jaxcomm.mean()),
        "backup": jaxcomm.backup(jaxcomm.mean(), 1, times=in_order),
        "lazy": jaxcomm.lazy(threshold=1e9, memory=1),  # All skip after the first step.
    }
    slowed: dict[str, Callable[[int], bool]] = {
        "none": lambda step: False,
        "the last": lambda step: own == workers - 1,
        "each in turn": lambda step: own == step % workers,
    }
    found = {
        who: {name: measure(tx, is_late) for name, tx in methods.items()}
        for who, is_late in slowed.items()
    }
    (folder / f"{own}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
