"""What each process of the tests runs: every family in turn, its results left in a folder."""

import json
import sys
import time
from pathlib import Path

from jaxcomm import launch
from tests.processes.counters import sent

START_SECONDS = 120.0


def main(folder: Path, names: list[str]) -> None:
    launch.initialize(START_SECONDS)

    import jax
    import numpy as np
    from jax.sharding import AxisType

    from tests.processes.families import FAMILIES, train

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    runs, refused = {}, ""
    try:  # A batch that every process has made for itself, not one array over all of them.
        train(FAMILIES["mean"], mesh, local_batch=True)
    except ValueError as error:
        refused = str(error)
    for name in names:
        family = FAMILIES[name]
        started = time.perf_counter()
        run = train(family, mesh, lambda: sent().payload)
        if launch.is_main_process():
            np.save(folder / f"{name}.npy", run.params)
        runs[name] = run._replace(params=None)._asdict()
        runs[name]["seconds"] = time.perf_counter() - started
    text = json.dumps({"devices": jax.local_device_count(), "runs": runs, "refused": refused})
    (folder / f"{jax.process_index()}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
