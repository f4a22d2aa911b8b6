"""Every public method is in the catalogue, has a row and a line, and says what it does."""

import ast
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import optax

import jaxcomm
from jaxcomm import compression, gossip, methods, scheduling, synchronization, testing
from jaxcomm.catalogue import METHODS as CATALOGUE
from tests.cases import CASES
from tests.cases._gossip import GOSSIP
from tests.cases._local import LOCAL, RECIPES
from tests.slow import is_in

ROOT = pathlib.Path(__file__).parent.parent
METHODS_PAGE = ROOT / "docs" / "methods.md"
PACKAGES: list[ModuleType] = [
    jaxcomm.aggregation,
    compression,
    compression.codes,
    compression.feedback,
    compression.low_rank,
    compression.quantizers,
    compression.regularizers,
    compression.sketches,
    compression.sparsifiers,
    methods,
    gossip,
    synchronization,
]
OTHERS: list[ModuleType] = [
    jaxcomm,
    jaxcomm.collectives,
    jaxcomm.wire,
    jaxcomm.perf,
    scheduling,
    synchronization.events,
    testing,
]
TRANSFORMATIONS = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)


def functions(packages: list[ModuleType]) -> dict[str, Callable[..., Any]]:
    """The public constructors, each under its first name."""
    found: dict[Callable[..., Any], str] = {}
    for package in packages:
        for name in package.__all__:
            if inspect.isfunction(value := getattr(package, name)):
                found.setdefault(value, f"{package.__name__}.{name}")
    return {name: value for value, name in found.items()}


def is_method(function: Callable[..., Any]) -> bool:
    """Whether it returns a codec or a transformation, as all methods do."""
    returned = inspect.signature(function).return_annotation
    return returned is jaxcomm.Codec or returned in TRANSFORMATIONS


FUNCTIONS = functions([*PACKAGES, *OTHERS])
BUILDERS = {"gossiped", "average_every"}  # Of methods.
METHODS = {
    name: value
    for name, value in FUNCTIONS.items()
    if is_method(value) and value.__name__ not in BUILDERS
}


def test_parts_of_the_laws_have_every_row_once() -> None:
    parts = [[case.name for case in CASES if is_in(f"{k}/7", case.name)] for k in range(1, 8)]
    assert sorted(itertools.chain(*parts)) == sorted(case.name for case in CASES)
    assert min(map(len, parts)) >= len(CASES) / 14


WITHOUT_ROW = {
    "adaptive_budgets": "takes measured speeds: tests/aggregation/test_adaptive_budgets.py",
    "backup": "drops workers, which no mean may: tests/aggregation/test_backup.py",
    "accumulate": "goes around any row: tests/aggregation/test_accumulate.py",
    "gradient_norms": "goes around any row: tests/aggregation/test_gradient_norms.py",
    "hierarchical": "goes around any two rows: tests/aggregation/test_hierarchical.py",
    "sliced": "is the last stage of `hierarchical`: tests/aggregation/test_sliced.py",
    "shard_local": "goes around any row, on a mesh of two axes: tests/aggregation",
    "skip_nonfinite": "goes around any row: tests/aggregation/test_skip_nonfinite.py",
    "wait_free": "goes around any row: tests/scheduling/test_wait_free.py",
    "per_worker": "keeps an optimizer's state and sends nothing: tests/test_workers.py",
    "proximal": "goes around an optimizer, and sends nothing: tests/compression/regularizers",
    "local_sgd_post_local": "is `local_sgd` with another schedule: tests/synchronization",
    "proximal_point": "sends nothing: tests/synchronization/test_growing_batch.py",
    "scale_by_finished": "sends a count: tests/synchronization/test_non_blocking.py",
}
"""Why a method has no row; whatever has one needs no reason."""


def test_a_method_is_in_the_catalogue_or_has_a_reason() -> None:
    known = {*WITHOUT_ROW}.union(*(method.words for method in CATALOGUE.values()))
    assert {method.__name__ for method in METHODS.values()} - known == set()


def test_every_method_has_a_row_or_a_reason() -> None:
    rows = {case.name for case in [*CASES, *GOSSIP, *LOCAL, *RECIPES]}
    assert {*CATALOGUE} - rows == {*WITHOUT_ROW} & {*CATALOGUE} and rows <= {*CATALOGUE}


def test_a_method_has_a_line_in_the_docs() -> None:
    page = re.sub(r"```.*?```", "", METHODS_PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = {word for text in re.findall(r"`([^`]+)`", page) for word in re.findall(r"\w+", text)}
    assert [name for name, method in METHODS.items() if method.__name__ not in words] == []


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The parts of a docstring; the text before them is the part without a name."""
    parts: dict[str, str] = {"": ""}
    title = ""
    for line in (inspect.getdoc(function) or "").splitlines():
        if heading := re.fullmatch(r"([A-Z][a-z]+):", line):
            title = heading[1]
            parts[title] = ""
        elif line and not line.startswith(" "):
            title = "" if title else title
            parts[title] += line + "\n"
        else:
            parts[title] += line + "\n"
    return parts


def explained(arguments: str) -> set[str]:
    """The parameters of a part `Args`; one line may explain several."""
    entries = re.findall(r"^  (\*{0,2}\w+(?:, \*{0,2}\w+)*):", arguments, re.MULTILINE)
    return {name.lstrip("*") for entry in entries for name in entry.split(", ")}


def raises(function: Callable[..., Any]) -> bool:
    """Whether its lines raise, or call a function that checks arguments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    nodes = list(ast.walk(tree))
    names = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = [getattr(name, "id", getattr(name, "attr", "")) for name in names]
    return any(isinstance(node, ast.Raise) for node in nodes) or any(
        name.lstrip("_").startswith("require") for name in called
    )


def lacking(function: Callable[..., Any]) -> list[str]:
    """The required parts that its docstring lacks."""
    parts, signature = sections(function), inspect.signature(function)
    first, *rest = parts[""].splitlines()
    documented = parts[""] + parts.get("Returns", "")
    wanted = {
        "one line": first.endswith(".") and not (rest and rest[0]),
        "Returns": signature.return_annotation in (None, "None")
        or {"Returns", "Yields"} & parts.keys(),
        "Raises": not raises(function) or "Raises" in parts,
        "an example": ">>> " in parts.get("Example", ""),
        "what is sent": not is_method(function)
        or re.search(r"[Ss]end|[Ss]ent\b|[Bb]ytes?\b|\bbits?\b|travel|payload", documented),
        **{
            f"`{name}` in Args": name in explained(parts.get("Args", ""))
            for name in signature.parameters
        },
    }
    return [part for part, is_there in wanted.items() if not is_there]


def test_a_docstring_has_its_parts() -> None:
    of_functions = {name: lacking(function) for name, function in FUNCTIONS.items()}
    assert {name: parts for name, parts in of_functions.items() if parts} == {}


def test_missing_docstring_parts_are_found() -> None:
    def documented(first: int, second: int) -> int:  # noqa: D417
        """One line.

        Args:
          first: A number.

        Example:
          >>> 1
          1
        """
        if first > second:
            raise ValueError
        return first

    assert lacking(documented) == ["Returns", "Raises", "`second` in Args"]


def cited() -> list[tuple[str, str, str]]:
    """The lines of the methods' tables that name a paper: the line, an author and the year."""
    page = METHODS_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`.*\| ([A-Z]\S+) [^|]*?(\d{4}) \|$", page, re.MULTILINE)
    assert len(rows) > 40
    return rows


def test_the_paper_of_a_line_is_cited_in_a_docstring() -> None:
    references = [(f.__name__, sections(f).get("References", "")) for f in FUNCTIONS.values()]
    for line, author, year in cited():
        words = set(re.findall(r"\w+", line))
        documents = [text for name, text in references if name in words]
        assert any(author in document and year in document for document in documents), line
