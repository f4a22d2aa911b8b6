"""Cached programs are whole or absent, separate by machine, and limited in size."""

import os
import pathlib
import subprocess
import sys

import pytest
from jax._src.lru_cache import LRUCache

from tests import compiled

PROGRAM = """
import jax, jax.numpy as jnp
from tests import compiled
compiled.write_whole()
print(jax.jit(lambda x: jnp.sin(x) + 1)(jnp.zeros(3)).tolist())
"""


def test_an_entry_appears_when_it_is_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LRUCache(str(tmp_path), max_size=-1)

    def ended(*names: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", ended)
        cache.put("program", b"half")
    assert cache.get("program") is None
    for value in (b"whole", b"again"):  # The second where the first could not be read.
        cache.put("program", value)
        assert cache.get("program") == value


def test_the_oldest_entries_are_removed(tmp_path: pathlib.Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / name).write_bytes(b"1234")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    compiled.trim(tmp_path, max_bytes=9)
    assert {entry.name for entry in tmp_path.iterdir()} == {"new", "older"}
    compiled.trim(tmp_path / "not_there")


@pytest.mark.slow
def test_a_truncated_entry_is_compiled_and_written_again(tmp_path: pathlib.Path) -> None:
    def run() -> tuple[str, str]:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
        root = pathlib.Path(compiled.__file__).parents[1]
        process = subprocess.run(
            [sys.executable, "-W", "default", "-c", PROGRAM],
            **{"cwd": root, "env": environment | {"PYTHONWARNINGS": ""}},
            **{"capture_output": True, "text": True, "check": True},
        )
        return process.stdout, process.stderr

    expected, _ = run()
    for entry in tmp_path.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    again, warned = run()
    rewritten, silent = run()
    assert expected == again == rewritten == "[1.0, 1.0, 1.0]\n"
    assert "Error reading persistent compilation cache entry" in warned
    assert "Error reading" not in silent
