"""A checkpoint of format 1, kept in `data/format_1`, is read until 1.0."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.checkpoint import Checkpoints, _manifest
from tests.checkpoint.trees import assert_equal

KEPT = pathlib.Path(__file__).parent / "data" / "format_1"


def state() -> dict[str, Any]:
    """All kinds of leaves; `python -m tests.checkpoint.test_format` has written them."""
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
    }


def test_format_1_is_read(tmp_path: pathlib.Path) -> None:
    shutil.copytree(KEPT, tmp_path / "kept")
    start = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 0, state()
    )
    with Checkpoints(tmp_path / "kept") as checkpoints:
        step, restored, position = checkpoints.restore(start)
    assert (step, position) == (3, {"epoch": 1, "batch": 40})
    assert_equal(restored, state())


def test_migrations_run_in_turn(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a later release renames a leaf."""

    def rename(manifest: dict[str, Any]) -> dict[str, Any]:
        leaves = [
            {**leaf, "path": leaf["path"].replace("['key']", "['coins']")}
            for leaf in manifest["leaves"]
        ]
        return {**manifest, "leaves": leaves}

    monkeypatch.setattr(_manifest, "FORMAT", 2)
    monkeypatch.setattr(_manifest, "MIGRATIONS", {1: rename})
    shutil.copytree(KEPT, tmp_path / "kept")
    expected = {("coins" if name == "key" else name): x for name, x in state().items()}
    with Checkpoints(tmp_path / "kept") as checkpoints:
        assert_equal(checkpoints.restore(expected).state, expected)


if __name__ == "__main__":
    with Checkpoints(KEPT) as checkpoints:
        checkpoints.save(3, state(), position={"epoch": 1, "batch": 40})
