"""A clear error before training, and nothing overwritten."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from jaxcomm.checkpoint import CheckpointError, Checkpoints, _arrays
from tests.checkpoint.damage import start
from tests.checkpoint.running import run


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 5):
            checkpoints.save(step, start())
    return tmp_path


def contents(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_oldest_checkpoints_are_deleted(saved: pathlib.Path) -> None:
    for keep, steps, kept in ((2, (8,), (5, 8)), (None, (9, 10, 11, 12), (5, 8, 9, 10, 11, 12))):
        with Checkpoints(saved, keep=keep) as checkpoints:
            for step in steps:
                checkpoints.save(step, start())
            checkpoints.wait()
            assert checkpoints.steps == kept
            assert checkpoints.restore(start(), 8).step == 8


OTHERS = {
    "model": (
        lambda: start(size=7),
        r"\.kept` as float32\[4, 6\], and this program has float32\[4, 7\]",
    ),
    "dtype": (
        lambda: jax.tree.map(
            lambda x: x.astype(jnp.float16) if x.dtype == jnp.float32 else x, start()
        ),
        "this program has float16",
    ),
    "leaf": (lambda: {**start(), "clock": jnp.zeros(3)}, r"lacks the leaf `\['clock'\]`"),
    "workers": (lambda: start(workers=3), r"is of 4 workers, and `start` is for 3: pass `tx`"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_program(saved: pathlib.Path, name: str) -> None:
    make, message = OTHERS[name]
    before = contents(saved)
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(make())
        if name != "workers":
            with pytest.raises(CheckpointError, match=message):
                checkpoints.save(9, make())
    assert contents(saved) == before


def test_arguments(saved: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Checkpoints(saved) as checkpoints:
        for step in (5, 4, -1):
            with pytest.raises(ValueError, match=r"`step` must be above 5, the newest checkpoint"):
                checkpoints.save(step, start())
        with pytest.raises(ValueError, match=r"`state\['rate'\]` is of type float, but a checkpo"):
            checkpoints.save(9, {**start(), "rate": 0.1})
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4 .* of \(3, 5\)"):
            checkpoints.restore(start(), 4)
        checkpoints.save(9, start())  # Nothing of an error is left.
        assert checkpoints.restore(start()).step == 9
    empty = Checkpoints(tmp_path_factory.mktemp("empty"))
    with empty, pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        empty.restore(start())
    (saved / "file").touch()
    with pytest.raises(CheckpointError, match=r"`directory`=.*file cannot be used: .* File exists"):
        Checkpoints(saved / "file")


def test_a_checkpoint_of_another_format(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_arrays, "FORMAT", 99)
    with Checkpoints(saved) as checkpoints:
        with pytest.raises(CheckpointError, match="has format 4, and this release reads format 99"):
            checkpoints.restore(start())
        with pytest.raises(CheckpointError, match="has format 4, and this release reads format 99"):
            checkpoints.save(6, start())


def test_a_directory_with_other_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "weights.bin").write_bytes(b"123")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"The checkpoint of step 7 in .* cannot be read"):
            checkpoints.restore(start())
        with pytest.raises(CheckpointError, match=r"The checkpoint of step 7 in .* cannot be read"):
            checkpoints.save(8, start())
    assert (tmp_path / "7" / "weights.bin").read_bytes() == b"123"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one bit", "half", "missing"])
def test_damaged_files(tmp_path: pathlib.Path, how: str) -> None:
    """In a process of its own: after an error, orbax leaves coroutines that warn at any time."""
    ran = run("-m", "tests.checkpoint.damage", str(tmp_path), how)
    assert ran.returncode == 0, ran.stderr[-3000:]
    damaged = [pathlib.Path(path) for path in ran.stdout.split()]
    assert {path.parent.name or path.name for path in damaged} >= {"manifest.json", "d"}
    # Others are not read, except for orbax's description, of which it notices when half is missing.
    assert len(damaged) == (5 if how == "half" else 4)
