"""Resolves references that name an object by another path than the one it is described under."""

import functools
import pathlib
import re
import sys
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
import site_api

OTHERS = ("jax", "jaxlib", "optax", "numpy", "np", "chex", "networkx", "orbax", "collections")
STANDARD = ("typing", "pathlib", "datetime", "dataclasses", "types", "nx")


@functools.cache
def _homes() -> dict[site_api.Definition, str]:
    homes: dict[site_api.Definition, str] = {}
    for entry in site_api.entries():
        homes.setdefault(entry.definition, f"{entry.package}.{entry.name}")
    return homes


def described(target: str, package: str) -> str | None:
    """The path under which an object is described: `target` may be private or unqualified."""
    homes = _homes()
    module, _, name = target.rpartition(".")
    if module:
        try:
            found = site_api.definition(module, name)
        except ValueError:
            return None
        return homes.get(found) if found else None
    named = [home for definition, home in homes.items() if definition.name == name]
    near = [home for home in named if home.startswith(f"{package}.")]
    return near[0] if len(near) == 1 else named[0] if len(named) == 1 else None


def resolve(
    app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.Element
) -> nodes.Node | None:
    """A link to where the object is described; plain text for objects of other libraries."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target.split(".")[0] in OTHERS + STANDARD:
        return content
    if node.get("reftype") == "attr":  # Fields are described with their class.
        target = target.rpartition(".")[0]
    home = described(target, node.get("py:module") or "")
    objects = env.get_domain("py").objects
    if home is None or home not in objects:
        private = any(part.startswith("_") for part in target.split("."))
        annotation = private or ("refexplicit" not in node and re.fullmatch(r"[\w.]+", target))
        return content if annotation else None  # A private alias, such as `AxisName`.
    entry = objects[home]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, home)


def skip(app: Sphinx, what: str, name: str, value: object, skipped: bool, options: Any) -> Any:
    """Passes over the fields of named tuples: signature and docstring have them."""
    return True if type(value).__name__ == "_tuplegetter" else None


def keep_sentences(
    app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    """Keeps Napoleon from reading the text before a colon as a type."""
    if what in ("property", "attribute") and lines:
        lines[0] = f": {lines[0]}"
    for number, line in enumerate(lines[:-1]):
        if re.fullmatch(r"(Returns|Yields):", line):
            lines[number + 1] = re.sub(r"^( +)", r"\1: ", lines[number + 1])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", keep_sentences, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
