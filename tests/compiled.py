"""Caches compiled programs between runs, so that processes can share them."""

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
import tempfile
from typing import Any

KEPT = pathlib.Path(__file__).parents[1] / ".jax_cache"
MAX_BYTES = 2 * 2**30

# For several processes, which cannot load programs of several devices: see below.
UNKEPT = {"JAX_ENABLE_COMPILATION_CACHE": "0"}

_of_several_devices: dict[str, Any] = {}  # By what JAX calls them in its cache.


def processor() -> str:
    """A name that differs between machines that cannot run each other's programs."""
    known = pathlib.Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else [platform.processor()]
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model"))})
    digest = hashlib.sha256("\n".join(features or lines).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"


def folder() -> pathlib.Path:
    """Of this JAX on this processor."""
    return KEPT / f"jax-{importlib.metadata.version('jax')}-{processor()}"


def trim(entries: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Removes the oldest entries until at most `max_bytes` bytes are left."""
    with contextlib.suppress(FileNotFoundError):  # Another run may be at work here.
        written = [(entry.stat(), entry) for entry in entries.glob("*")]
        for status, entry in sorted(written, key=lambda each: -each[0].st_mtime):
            max_bytes -= status.st_size
            if max_bytes < 0:
                entry.unlink()


def write_whole() -> None:
    """Lets JAX put entries where they belong only when they are complete.

    It writes them in place, and without a lock unless a maximum size is set: another process may
    read half of one, and a process that is killed may leave half of one. With a lock, each write
    looks at every entry.
    """
    try:
        from jax._src.lru_cache import LRUCache
    except ImportError:  # Then JAX's default; half an entry is compiled again, with a warning.
        return
    in_place = LRUCache.put

    def put(self: Any, key: str, value: bytes) -> None:
        if self.eviction_enabled:
            return in_place(self, key, value)
        # Even if there is an entry: JAX reads it first, so it was unusable.
        with tempfile.NamedTemporaryFile(dir=self.path, prefix="part-", delete=False) as part:
            part.write(value)
        with contextlib.suppress(FileNotFoundError):  # Where another process cleans up.
            os.replace(part.name, os.path.join(self.path, f"{key}-cache"))

    LRUCache.put = put


def keep_what_is_of_one_device() -> None:
    """Lets JAX keep no program of several devices, which may wait forever once it is loaded.

    Of a program that is loaded and not compiled, JAX 0.12.0.1 on CPU begins collectives that do not
    depend on one another in another order on each device: of the ring's permutations and the sum of
    the loss, each then waits for the other. The process that has compiled one uses it again.
    """
    try:
        from jax._src import compilation_cache
    except ImportError:
        return
    put_all = compilation_cache.put_executable_and_time
    get_kept = compilation_cache.get_executable_and_time

    def put(cache_key: str, module_name: str, executable: Any, *rest: Any) -> None:
        if len(executable.local_devices()) == 1:
            put_all(cache_key, module_name, executable, *rest)
        else:
            _of_several_devices[cache_key] = executable

    def get(cache_key: str, *rest: Any) -> tuple[Any, int | None]:
        if cache_key in _of_several_devices:
            return _of_several_devices[cache_key], 0
        return get_kept(cache_key, *rest)

    compilation_cache.put_executable_and_time = put
    compilation_cache.get_executable_and_time = get


def forget() -> None:
    """Frees the programs that caches of the laws hold: the next row has others."""
    _of_several_devices.clear()
    for name, module in [*sys.modules.items()]:
        if name.startswith(("jaxcomm.testing", "tests.laws")):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def unload_beyond(share: float = 0.7) -> None:
    """Forgets compiled programs where they have this share of the mappings a process may have.

    A slow test leaves 40 to 1,100 mappings of memory, and Linux allows a process 65,530. A process
    with none left ends with a segmentation fault.
    """
    mapped, most = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
    if not most.exists():
        return
    with mapped.open("rb") as lines:
        used = sum(1 for _ in lines)
    if used > share * int(most.read_text()):
        import jax

        _of_several_devices.clear()
        jax.clear_caches()
        gc.collect()
