"""A checkpoint that is kept in `data` is read by every later release until 1.0."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

import jaxcomm
from jaxcomm.checkpoint import Checkpoints
from tests.checkpoint.trees import assert_equal, words

KEPT = pathlib.Path(__file__).parent / "data" / "kept"


def state() -> dict[str, Any]:
    """All kinds of leaves; `python -m tests.checkpoint.test_format` writes them."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "params": {
            "w": draw(4, 3),
            "half": draw(5).astype(jnp.bfloat16),
            "none": jnp.zeros((0, 2)),
        },
        "opt_state": [
            jaxcomm.PerWorker(
                {"data": {"residual": draw(4, 12), "codes": jnp.arange(4).astype("uint8")}}
            ),
            jnp.int32(11),
        ],
        "key": jax.random.key(5),
        "counts": np.arange(3, dtype=np.int64) + 2**40,
        "names": {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}},  # One name in a tree of orbax.
        "kinds": [draw(3).astype(t) for t in ("bool", "complex64", "float8_e5m2", "int4", "uint4")],
    }


def test_a_stored_checkpoint_is_read(tmp_path: pathlib.Path) -> None:
    shutil.copytree(KEPT, tmp_path / "kept")
    expected = state()
    start = jax.tree.map(
        lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else jnp.zeros_like(x), expected
    )
    with Checkpoints(tmp_path / "kept") as checkpoints:
        step, restored, position = checkpoints.restore(start)
    assert (step, position) == (3, {"epoch": 1, "batch": 40})
    assert_equal(restored, expected)


def test_orbax_alone_reads_it() -> None:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(KEPT / "3")
    for path, leaf in jax.tree_util.tree_leaves_with_path(words(state())):
        if leaf.size:
            np.testing.assert_array_equal(found.pop(jax.tree_util.keystr(path)), leaf)
    assert not found


if __name__ == "__main__":
    with Checkpoints(KEPT) as checkpoints:
        checkpoints.save(3, state(), position={"epoch": 1, "batch": 40})
