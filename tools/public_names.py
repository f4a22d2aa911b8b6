"""Print every public name of jaxcomm and pallas_kernels, with its parameters or fields.

    python tools/public_names.py

One line a name, sorted by module: the packages without an underscore, and the names in `__all__`.
Then one line for each key that steps and states report in `metrics` and `diagnostics`, with the
files that write it. `docs/from_pytorch.md` has names of other libraries beside ours.
"""

import ast
import importlib
import inspect
import pathlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("jaxcomm", "pallas_kernels")
# The arguments, variables and functions in the source that hold what is reported.

REPORTS = {"totals", "ratios", "errors", "constants", "diagnostics", "report", "values", "counts"}
REPORTS |= {"MEASURED", "metrics", "initial_diagnostics", "overflow_totals", "reduce_metrics"}


def public_modules() -> Iterator[ModuleType]:
    """The packages that state their names, parents first."""
    for top in PACKAGES:
        package = importlib.import_module(top)
        infos = pkgutil.walk_packages(package.__path__, f"{top}.")
        for name in [top, *sorted(info.name for info in infos if info.ispkg)]:
            if "._" not in name and hasattr(module := importlib.import_module(name), "__all__"):
                yield module


def contents(value: object) -> str:
    """The parameters of a function; the fields, properties and methods of a class."""
    if not inspect.isclass(value):
        return f"({', '.join(inspect.signature(value).parameters)})" if callable(value) else ""
    fields = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", ())
    names = dict.fromkeys([*fields, *(name for name in vars(value) if not name.startswith("_"))])
    return ": " + ", ".join(names) if names else ""


def _strings(node: ast.AST) -> Iterator[str]:
    """The keys of dicts and the members of tuples in a part of the source."""
    for part in ast.walk(node):
        for leaf in getattr(part, "keys" if isinstance(part, ast.Dict) else "elts", ()):
            if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                yield leaf.value


def reported_keys() -> dict[str, set[str]]:
    """The keys of metrics and diagnostics, and the files that write them."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "jaxcomm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = {getattr(node, "arg", getattr(node, "name", None))}
            if (names | {getattr(target, "id", None) for target in targets}) & REPORTS:
                for key in _strings(node) if isinstance(node, ast.AST) else ():
                    found.setdefault(key, set()).add(str(path.relative_to(ROOT)))
    return found


def main() -> None:
    """Prints the names, then the keys."""
    for module in public_modules():
        for name in sorted(module.__all__):
            if not isinstance(value := getattr(module, name), ModuleType):
                print(f"{module.__name__}.{name}{contents(value)}")
    for key, files in sorted(reported_keys().items()):
        print(f'"{key}": {", ".join(sorted(files))}')


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
