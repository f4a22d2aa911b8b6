"""The pages of the API reference, one a package: what each `__all__` states, from the syntax trees.

Nothing is imported, so the pages can be checked without JAX and Sphinx. A name that several
packages export is documented once, in the first of them; the others link to it.
"""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("jaxcomm", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Definition:
    """Where an object is defined, what it is, and its docstring."""

    module: str
    name: str
    kind: str
    docstring: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name in the `__all__` of a package, and the comment there under which it stands."""

    package: str
    name: str
    group: str
    definition: Definition


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _path(module: str, root: pathlib.Path) -> pathlib.Path:
    """The file of a module, or that of a package."""
    folder = root / module.replace(".", "/")
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def packages(root: pathlib.Path = ROOT) -> list[str]:
    """The packages that state their names, parents first."""
    found = []
    for top in PACKAGES:
        for path in sorted((root / top).rglob("__init__.py"), key=lambda path: path.parent):
            module = ".".join(path.parent.relative_to(root).parts)
            if "._" not in module and _listed(path):
                found.append(module)
    return found


def _listed(path: pathlib.Path) -> list[tuple[str, str]]:
    """The names in `__all__` of a file, each with the last comment before it."""
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List) and node.end_lineno is not None
            lines = path.read_text(encoding="utf-8").splitlines()
            comments = {
                number: found[1]
                for number in range(node.lineno, node.end_lineno)
                if (found := re.fullmatch(r"\s+# (.*)", lines[number - 1]))
            }
            return [
                (
                    ast.literal_eval(name),
                    next((comments[n] for n in sorted(comments)[::-1] if n < name.lineno), ""),
                )
                for name in node.value.elts
            ]
    return []


def definition(module: str, name: str, root: pathlib.Path = ROOT) -> Definition | None:
    """Follows imports to the statement that defines a name; `None` if it is a package.

    Raises:
      ValueError: If no statement defines it.
    """
    path = _path(module, root)
    body = _tree(path).body if path.exists() else []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(node.module, alias.name, root)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            return Definition(module, name, kind, ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in [ast.unparse(target) for target in targets]:
                return Definition(module, name, "data", _text(following))
    if _path(f"{module}.{name}", root).exists():
        return None
    raise ValueError(f"{module}: nothing defines the public name {name!r}.")


def _text(node: ast.stmt | None) -> str:
    """The string that a statement is, as it follows a constant; or an empty one."""
    value = node.value if isinstance(node, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def entries(root: pathlib.Path = ROOT) -> Iterator[Entry]:
    """Every public name of every package, but those of packages themselves."""
    for package in packages(root):
        for name, group in _listed(_path(package, root)):
            if found := definition(package, name, root):
                yield Entry(package, name, group, found)


def page_of(entry: Entry) -> str:
    """The page of a name: that of its package, or that of its group where there are groups."""
    group = re.sub(r"\W+", "-", entry.group.lower())
    return f"{entry.package}-{group}" if group else entry.package


def _titled(title: str, mark: str = "=") -> str:
    return f"{title}\n{mark * len(title)}\n\n"


def _docstring(package: str, root: pathlib.Path) -> str:
    """What a package says of itself, its indented code as RST knows it."""
    text = ast.get_docstring(_tree(_path(package, root))) or ""
    return re.sub(r":\n\n(?=    )", "::\n\n", text) + "\n\n"


def _line(entry: Entry, home: Entry) -> str:
    """A line of the list at the head of a page."""
    role = {"function": "func", "class": "class", "data": "data"}[entry.definition.kind]
    link = f":py:{role}:`{entry.name} <{home.package}.{home.name}>`"
    moved = f" (as ``{home.package}.{home.name}``)" if home.package != entry.package else ""
    summary = entry.definition.docstring.split("\n")[0]
    return f"- {link}{moved}: {summary}\n"


def pages(root: pathlib.Path = ROOT) -> dict[str, str]:
    """The text of each page of the reference, by its name; `index` has the list of them."""
    homes: dict[Definition, Entry] = {}
    by_page: dict[str, list[Entry]] = {}
    for entry in entries(root):
        homes.setdefault(entry.definition, entry)
        by_page.setdefault(page_of(entry), []).append(entry)
    # `jaxcomm.advise` is a function, too, and Sphinx knows one object of a name.
    functions = {f"{home.package}.{home.name}" for home in homes.values()}
    texts: dict[str, str] = {}
    for package in packages(root):
        own = [name for name, listed in by_page.items() if listed[0].package == package]
        directive = "currentmodule" if package in functions else "module"
        texts[package] = _titled(package) + f".. py:{directive}:: {package}\n\n"
        texts[package] += _docstring(package, root)
        for name in own:
            if name != package:
                group = by_page[name][0].group
                texts[name] = _titled(f"{package}: {group[0].lower()}{group[1:]}")
                texts[name] += f".. py:currentmodule:: {package}\n\n"
            texts[name] += _body(by_page[name], homes)
        if own != [package]:
            texts[package] += _toctree([name for name in own if name != package], 1)
    tops = packages(root)
    return {"index": _titled("API reference") + INTRODUCTION + _toctree(tops, 1), **texts}


INTRODUCTION = textwrap.dedent("""\
    Every public name, by package. A name that several packages export is described once, and the
    others link to it. The names of :doc:`jaxcomm <jaxcomm>` are stable; others may change in any
    release. :doc:`From PyTorch </from_pytorch>` has the names of other libraries.

    """)


def _body(listed: list[Entry], homes: dict[Definition, Entry]) -> str:
    """The list of a page, then the description of each name that is at home there."""
    text = "".join(_line(entry, homes[entry.definition]) for entry in listed) + "\n"
    for entry in listed:
        if homes[entry.definition] is not entry:
            continue
        if entry.definition.kind == "data":  # Sphinx has the docstring of its type.
            text += f".. py:data:: {entry.name}\n\n"
            text += textwrap.indent(entry.definition.docstring, "   ") + "\n\n"
        else:
            text += f".. auto{entry.definition.kind}:: {entry.package}::{entry.name}\n"
            text += "   :members:\n\n" if entry.definition.kind == "class" else "\n"
    return text


def _toctree(names: list[str], depth: int) -> str:
    rows = "".join(f"   {name}\n" for name in names)
    return f".. toctree::\n   :maxdepth: {depth}\n\n{rows}\n"
