"""Checkpoints of each format, kept in `data`, are read until 1.0."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.checkpoint import Checkpoints, _manifest
from jaxcomm.checkpoint._handler import MANIFEST, verified
from tests.checkpoint.trees import assert_equal

KEPT = pathlib.Path(__file__).parent / "data"
FORMATS = [1, 2, 3]


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
    }


def state_of(number: int) -> dict[str, Any]:
    """Newer formats store small leaves together, so they are kept with a large one too."""
    large = jnp.arange(2**18 + 1, dtype=jnp.float32) % 5
    return state() if number == 1 else {**state(), "large": large}


@pytest.mark.parametrize("number", FORMATS)
def test_each_format_is_read(number: int, tmp_path: pathlib.Path) -> None:
    shutil.copytree(KEPT / f"format_{number}", tmp_path / "kept")
    expected = state_of(number)
    start = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 0, expected
    )
    with Checkpoints(tmp_path / "kept") as checkpoints:
        step, restored, position = checkpoints.restore(start)
    assert (step, position) == (3, {"epoch": 1, "batch": 40})
    assert_equal(restored, expected)


def test_the_newest_format_is_kept() -> None:
    assert max(FORMATS) == _manifest.FORMAT
    saved = KEPT / f"format_{max(FORMATS)}" / "3" / MANIFEST
    leaves = verified(saved.read_bytes())["leaves"]
    assert {leaf["path"] for leaf in leaves if leaf["offset"] is None} == {
        "['large']",
        "['params']['none']",
    }


def test_migrations_run_in_turn(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a later release renames a leaf."""

    def rename(manifest: dict[str, Any]) -> dict[str, Any]:
        leaves = [
            {**leaf, "path": leaf["path"].replace("['key']", "['coins']")}
            for leaf in manifest["leaves"]
        ]
        return {**manifest, "leaves": leaves}

    migrations = {**_manifest.MIGRATIONS, _manifest.FORMAT: rename}
    monkeypatch.setattr(_manifest, "FORMAT", _manifest.FORMAT + 1)
    monkeypatch.setattr(_manifest, "MIGRATIONS", migrations)
    shutil.copytree(KEPT / "format_1", tmp_path / "kept")
    expected = {("coins" if name == "key" else name): x for name, x in state().items()}
    with Checkpoints(tmp_path / "kept") as checkpoints:
        assert_equal(checkpoints.restore(expected).state, expected)


if __name__ == "__main__":
    newest = KEPT / f"format_{_manifest.FORMAT}"
    with Checkpoints(newest) as checkpoints:
        checkpoints.save(3, state_of(_manifest.FORMAT), position={"epoch": 1, "batch": 40})
