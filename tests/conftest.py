"""Stricter than users, and on eight fake devices: set before JAX is imported."""

import gc
import os
import pathlib
import tempfile

_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):  # A count the user has set wins.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
os.environ.setdefault("NPROC", "16")  # Sizes XLA's thread pool; fewer may deadlock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Compiling is what takes the time: all processes of a run share what any of them has compiled, and
# all runs do in a folder that the user has set.
_CACHE: tempfile.TemporaryDirectory[str] | None = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="compiled")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# JAX writes an entry in place, so another process may meet half of it: JAX then compiles, as if
# there were none, and warns. Only that warning is let pass, here and in processes started by tests.
_HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry:UserWarning"
os.environ["PYTHONWARNINGS"] = ",".join(
    filter(None, [os.environ.get("PYTHONWARNINGS"), _HALF_WRITTEN])
)

# Tracing makes so many objects that looking for cycles among them takes a twentieth of the time.
gc.set_threshold(50_000, 20, 20)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_LAWS = pathlib.Path(__file__).parent / "laws"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", _HALF_WRITTEN)


@pytest.fixture(scope="session", autouse=True)
def _enough_devices() -> None:
    if jax.device_count() < 8:
        pytest.exit(f"The tests need 8 devices, found {jax.device_count()}: {_COUNT}=8", 4)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test under tests/laws carries the marker `law`; those of a row run in one process.

    They share compiled programs there, and compiling is what takes the time.
    """
    for item in items:
        if _LAWS in item.path.parents:
            item.add_marker(pytest.mark.law)
            case = getattr(item, "callspec", None) and item.callspec.params.get("case")
            if case:
                item.add_marker(pytest.mark.xdist_group(case.name))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends a parallel run in which groups are passed over: it would take twice as long."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    of_groups = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if not all("@" in item.nodeid for item in of_groups):
        pytest.exit("pytest-xdist did not group the tests; pytest 9.1 and xdist 3.8 do.", 4)
