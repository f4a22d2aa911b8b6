"""A checkpoint that is kept in `data` is read by every later release until 1.0."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm.checkpoint import Checkpoints, _manifest
from jaxcomm.checkpoint._handler import MANIFEST, verified
from tests.checkpoint.trees import assert_equal

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
        "large": jnp.arange(2**18 + 1, dtype=jnp.float32) % 5,  # Small leaves are in one file.
    }


def test_the_kept_one_is_read(tmp_path: pathlib.Path) -> None:
    shutil.copytree(KEPT, tmp_path / "kept")
    expected = state()
    start = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 0, expected
    )
    with Checkpoints(tmp_path / "kept") as checkpoints:
        step, restored, position = checkpoints.restore(start)
    assert (step, position) == (3, {"epoch": 1, "batch": 40})
    assert_equal(restored, expected)


def test_the_kept_one_has_both_kinds_of_leaves() -> None:
    manifest = verified((KEPT / "3" / MANIFEST).read_bytes())
    assert manifest["format"] == _manifest.FORMAT
    assert {leaf["path"] for leaf in manifest["leaves"] if leaf["offset"] is None} == {
        "['large']",
        "['params']['none']",
    }


if __name__ == "__main__":
    with Checkpoints(KEPT) as checkpoints:
        checkpoints.save(3, state(), position={"epoch": 1, "batch": 40})
