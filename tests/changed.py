"""Selects the slow tests of a change: of the rows that use it, and of its folder.

The files of a row are those that define the functions in its transformation. If these files import
a changed file, or if more than a few rows use it, one row of each family runs instead of all. Any
other file is tested by the file of its name in `tests`, or by that folder.
"""

import ast
import functools
import pathlib
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("jaxcomm", "pallas_kernels")
COMMON = (
    "jaxcomm/catalogue/",
    "tests/cases/",
    "tests/laws/",
    "tests/workers.py",
    "tests/codecs.py",
    "tests/conftest.py",
    "pyproject.toml",
)
FEW = 15  # Rows; a file that more rows use is shared.


def changed_since(revision: str) -> set[str]:
    """Files that differ from the revision, and untracked ones."""

    def listed(*command: str) -> list[str]:
        run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            raise pytest.UsageError(f"git {' '.join(command)}: {run.stderr.strip()}")
        return run.stdout.splitlines()

    return {
        *listed("diff", "--name-only", revision, "--"),
        *listed("ls-files", "--others", "--exclude-standard"),
    }


def _held(thing: Any) -> Iterator[Any]:
    """The objects that a function, a partial, or a container holds."""
    from jaxcomm import Codec  # Not above: `conftest.py` sets what JAX reads when it is imported.

    yield from getattr(thing, "__defaults__", None) or ()
    yield from (getattr(thing, "__kwdefaults__", None) or {}).values()
    yield getattr(thing, "__wrapped__", None)
    for cell in getattr(thing, "__closure__", None) or ():
        yield cell.cell_contents
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, dict):
        yield from thing.values()
    if isinstance(thing, tuple | list):
        yield from thing
    if isinstance(thing, Codec):
        yield from vars(thing).values()


def made_of(thing: Any) -> set[str]:
    """Files under the root that define the functions that it holds."""
    files, seen, left = set(), set(), [thing]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        left.extend(_held(each))
        if code := getattr(each, "__code__", None):
            file = pathlib.Path(code.co_filename)
            if file.is_relative_to(ROOT):
                files.add(str(file.relative_to(ROOT)))
    return files


def _modules(file: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@functools.cache
def imports() -> dict[str, set[str]]:
    """The files that each file of the packages imports, except files that only re-export names."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in files}
    return {
        str(file.relative_to(ROOT)): {
            str(names[module].relative_to(ROOT)) for module in _modules(file) if module in names
        }
        for file in files
    }


def users(file: str) -> set[str]:
    """The file, and all files that import it, directly or not."""
    found, left = {file}, [file]
    while left:
        last = left.pop()
        direct = {user for user, used in imports().items() if last in used} - found
        found |= direct
        left.extend(direct)
    return found


def built(case: Any) -> Any:
    """The transformation of a row of any table."""
    import optax

    from tests.cases._gossip import GossipCase
    from tests.cases._local import LocalCase

    if isinstance(case, GossipCase):
        return case.make(8)
    return case.make(optax.sgd(0.1)) if isinstance(case, LocalCase) else case.make()


def chosen_rows(families: Iterable[list[Any]], changed: set[str]) -> tuple[set[str], set[str]]:
    """Names of rows that use a changed file; one row per family if the file is shared."""
    families = [[(case.name, made_of(built(case))) for case in family] for family in families]
    own: set[str] = set()
    shared: set[str] = set()
    for file in changed:
        makers = {name for family in families for name, files in family if file in files}
        if len(makers) <= FEW:
            own |= makers
        # The tests themselves, and the helpers of rows, belong to all rows.
        everybody = file.startswith(COMMON)
        reached = users(file)
        for family in families:
            touched = [name for name, files in family if everybody or files & reached]
            shared |= {*touched[:1]}
    return own, shared - own


def mirrored(file: str) -> set[str]:
    """Tests of a file of the packages or of the experiments; or of a test itself."""
    path = pathlib.PurePath(file)
    if path.suffix != ".py" or path.parts[0] not in (*PACKAGES, "experiments", "tests"):
        return set()
    if path.parts[0] == "tests":
        return {file}
    top = () if path.parts[0] == "jaxcomm" else path.parts[:1]
    folder = pathlib.PurePath("tests", *top, *path.parts[1:-1])
    named = folder / f"test_{path.stem.strip('_')}.py"
    if (ROOT / named).exists():
        return {str(named)}
    there = [each for each in (folder, *folder.parents) if (ROOT / each).exists()]
    return {str(there[0])} - {"tests"}


def select(items: list[pytest.Item], revision: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that a change selects, rows that use it first; and the other tests."""
    from tests.cases import FAMILIES
    from tests.cases._gossip import GOSSIP
    from tests.cases._local import LOCAL

    changed = changed_since(revision)
    own, shared = chosen_rows([*FAMILIES, GOSSIP, LOCAL], changed)
    tests = set().union(*map(mirrored, changed))

    def rank(item: pytest.Item) -> int | None:
        case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        name, path = getattr(case, "name", None), item.path.relative_to(ROOT)
        if name in own:
            return 0
        if tests & {str(path), *map(str, path.parents)} and "laws" not in path.parts:
            return 1
        return 2 if name in shared else None

    ranked = [(rank(item), item) for item in items]
    wanted = sorted((pair for pair in ranked if pair[0] is not None), key=lambda pair: pair[0])
    return [item for _, item in wanted], [item for place, item in ranked if place is None]
