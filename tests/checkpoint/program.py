"""What each of several processes runs: every family trains, saves and goes on, or restores."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from jaxcomm import launch

STEPS = 6
SAVED = 3
FAMILIES = ["sharded_server", "power_sgd", "local", "gossip"]


def method(name: str, workers: int) -> tuple[Any, bool]:
    """The transformation, and whether parameters differ by worker."""
    import optax

    import jaxcomm
    from jaxcomm import gossip
    from jaxcomm.compression.feedback import error_feedback
    from jaxcomm.compression.sparsifiers import top_k
    from jaxcomm.synchronization import local_sgd

    codec = error_feedback(top_k(k=3))
    adam = optax.adam(0.1)
    return {
        "sharded_server": lambda: (jaxcomm.sharded_server(adam, codec, codec), False),
        "power_sgd": lambda: (optax.chain(jaxcomm.power_sgd(rank=1), adam), False),
        "local": lambda: (optax.chain(jaxcomm.per_worker(adam), local_sgd(2)), True),
        "gossip": lambda: (
            optax.chain(jaxcomm.per_worker(adam), gossip.dpsgd(gossip.ring(workers))),
            True,
        ),
    }[name]()


def digest(tree: Any) -> str:
    """Of what this process has of every leaf."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        for shard in x.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


def main(folder: Path, phase: str) -> None:
    launch.initialize(120)

    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxcomm
    from jaxcomm.checkpoint import CheckpointError, Checkpoints

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    workers = jax.device_count()
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def loss_fn(params: Any, batch: Any) -> Any:
        return jax.numpy.mean((batch @ params["w"] - 1) ** 2)

    def batch(number: int) -> Any:
        rows = np.random.default_rng([number, jax.process_index()]).normal(size=(2, 6))
        return jax.make_array_from_process_local_data(sharding, rows.astype(np.float32))

    found = {}
    for name in FAMILIES:
        tx, own = method(name, workers)
        params: Any = {"w": jax.numpy.ones((6, 4))}
        params = jaxcomm.replicate(params, mesh) if own else params
        state = {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}
        step = jaxcomm.make_step(loss_fn, tx, mesh)
        first = 0
        with Checkpoints(folder / name) as checkpoints:
            if phase != "begin":
                resize = {"tx": tx, "workers": mesh} if phase == "resize" else {}
                if phase == "resize":
                    try:
                        checkpoints.restore(state)
                    except CheckpointError as error:
                        found[f"{name}: error"] = str(error)
                first, state, position = checkpoints.restore(state, **resize)
                assert position == {"batch": first}
            for number in range(first, STEPS):
                params, opt_state, _ = step(state["params"], state["opt_state"], batch(number))
                state = {"params": params, "opt_state": opt_state}
                if phase == "begin" and number + 1 == SAVED:
                    checkpoints.save(SAVED, state, position={"batch": SAVED})
        local = [s.data for x in jax.tree.leaves(state["params"]) for s in x.addressable_shards]
        assert all(np.all(np.isfinite(x)) for x in local)
        found[name] = digest(state)
    path = folder / f"{phase}-{jax.process_index()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
