"""Stricter settings than users have, and eight fake devices: set before JAX is imported."""

import gc
import os
import tempfile

from tests import compiled, skips, slow

_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):  # A count the user has set wins.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
os.environ.setdefault("NPROC", "16")  # Sizes XLA's thread pool; fewer may deadlock.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Compiling takes most of the time: programs are cached for all processes, and for later runs.
# Processes that tests start share a folder of this run: of theirs, all programs would be kept.
_KEPT = "JAXCOMM_KEPT_PROGRAMS"
_OF_CHILDREN: tempfile.TemporaryDirectory[str] | None = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OF_CHILDREN = tempfile.TemporaryDirectory(prefix="compiled")
    os.environ |= {_KEPT: str(compiled.folder()), "JAX_COMPILATION_CACHE_DIR": _OF_CHILDREN.name}
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Processes that tests start write entries in place, so another may meet half of one: JAX then
# compiles, as if there were none, and warns. Only that warning is ignored, there and here.
_HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry:UserWarning"
os.environ["PYTHONWARNINGS"] = ",".join(
    filter(None, [os.environ.get("PYTHONWARNINGS"), _HALF_WRITTEN])
)

# Tracing makes so many objects that looking for cycles among them takes a twentieth of the time.
gc.set_threshold(50_000, 20, 20)
gc.disable()  # Until tests are collected: none of them is garbage.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # Of trio, which then looks at all objects.

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
compiled.write_whole()
compiled.keep_what_is_of_one_device()
if _KEPT in os.environ:
    jax.config.update("jax_compilation_cache_dir", os.environ[_KEPT])

_ended = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--laws", metavar="K/N", help="slow laws of the K-th of N parts of methods")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", _HALF_WRITTEN)
    if not hasattr(config, "workerinput"):
        compiled.trim(compiled.folder())
    config.pluginmanager.register(skips)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long values are numbered: an id is for people, and a report repeats it."""
    return argname if isinstance(val, str | bytes | int) and len(repr(val)) > 150 else None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    global _ended
    _ended += 1
    if _ended % 10 == 0:
        compiled.unload_beyond()
    if _row(item) != _row(nextitem):
        compiled.forget()


def _row(item: pytest.Item | None) -> str:
    """The name of the row whose law the item is."""
    of_law = item and item.nodeid.startswith("tests/laws/") and hasattr(item, "callspec")
    return getattr(item.callspec.params.get("case"), "name", "") if of_law else ""


def _is_slow_law(item: pytest.Item) -> bool:
    return item.nodeid.startswith("tests/laws/") and item.get_closest_marker("slow") is not None


@pytest.fixture(scope="session", autouse=True)
def _enough_devices() -> None:
    if jax.device_count() < 8:
        pytest.exit(f"The tests need 8 devices, found {jax.device_count()}: {_COUNT}=8", 4)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The public names that a row is made of select its tests, too: `-k error_feedback`.

    The laws of a row run in one process, and share compiled programs: compiling takes the time.
    """
    from jaxcomm.catalogue import METHODS

    slow.mark(items)
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        for value in values.values():
            method = METHODS.get(getattr(value, "name", value if isinstance(value, str) else ""))
            item.extra_keyword_matches.update(method.words if method else ())
        if row := _row(item):
            item.add_marker(pytest.mark.xdist_group(row))
    if part := config.getoption("laws"):
        others = [item for item in items if _is_slow_law(item) and not slow.is_in(part, _row(item))]
        config.hook.pytest_deselected(items=others)
        left_out = {*others}
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends a parallel run that ignores groups: it would take twice as long."""
    gc.freeze()  # Modules and tests stay until the end: no later collection looks at them.
    gc.enable()
    if not getattr(session.config.option, "loadgroup", False):
        return
    of_groups = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if not all("@" in item.nodeid for item in of_groups):
        pytest.exit("pytest-xdist did not group the tests; pytest 9.1 and xdist 3.8 do.", 4)
