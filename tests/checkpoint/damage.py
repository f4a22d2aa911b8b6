"""Damages each file of a checkpoint in turn: what was saved comes back, or an error."""

import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import optax

import jaxcomm
from jaxcomm.checkpoint import CheckpointError, Checkpoints
from tests.checkpoint.trees import assert_equal

TX = optax.chain(jaxcomm.top_k_sgd(ratio=0.5), optax.sgd(0.1))


def start(tx: Any = TX, workers: int = 4, size: int = 6) -> dict[str, Any]:
    """A state with memory of each worker."""
    params = {"w": jnp.arange(size, dtype=jnp.float32)}
    return {"params": params, "opt_state": jaxcomm.init(tx, params, workers)}


def damaged(whole: bytes, how: str) -> bytes:
    """The bytes with one bit changed in the middle, or their first half."""
    middle = len(whole) // 2
    if how == "half":
        return whole[:middle]
    return whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]


def main(saved: pathlib.Path, how: str) -> None:
    """Prints which damaged files were an error; each time the older checkpoint is read."""
    state = start(size=2000)  # Smaller arrays lie in files of which orbax has checksums.
    with Checkpoints(saved) as checkpoints:
        for step in (3, 5):
            checkpoints.save(step, state)
    files = [p for p in (saved / "5").rglob("*") if p.is_file() and p.stat().st_size]
    errors = []
    for path in files:
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(damaged(whole, how))
        with Checkpoints(saved) as checkpoints:
            try:
                restored = checkpoints.restore(state, 5).state
            except (CheckpointError, FileNotFoundError) as error:
                errors.append(str(path.relative_to(saved / "5")))
                assert "\n" not in str(error)
            else:
                assert_equal(restored, state)
            assert checkpoints.restore(state, 3).step == 3
        path.write_bytes(whole)
    print(*errors)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
