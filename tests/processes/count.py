"""What each process runs to count bytes: every program some times, what it sent in a folder."""

import json
import sys
from pathlib import Path

from jaxcomm import launch
from tests.processes.counters import sent

START_SECONDS = 120.0
STEPS = 4


def main(folder: Path, names: list[str]) -> None:
    launch.initialize(START_SECONDS)

    import jax
    from jax.experimental.multihost_utils import sync_global_devices

    import jaxcomm
    from tests.processes.sending import PROGRAMS

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    counts = {}
    for name in names:
        fn, args = PROGRAMS[name]()
        run = jax.jit(fn).lower(*args).compile()
        account = jaxcomm.wire.account(run)
        jax.block_until_ready(run(*args))  # Connects, in the first message of a group.
        sync_global_devices(f"no process sends before {name}")
        before = sent()
        sync_global_devices(f"all processes begin {name}")
        for _ in range(STEPS):
            jax.block_until_ready(run(*args))
        sync_global_devices(f"all processes have ended {name}")
        counts[name] = {
            **sent().since(before)._asdict(),
            "expected": account.bytes_sent(jax.process_index()) + account.widened_bytes,
            "widened": account.widened_bytes,
            "bytes_per_worker": account.bytes_per_worker,
        }
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(counts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
