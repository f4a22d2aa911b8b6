"""What the code of a law holds a method to: its tolerances, and its numbers of workers.

Both are read in the syntax trees of the test and of the functions that it names, without a run.
"""

import ast
import copy
import functools
import inspect
import pathlib
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

READ = ("tests.", "jaxcomm.testing.")  # Packages whose functions are read.
AT_MOST = {"rtol", "atol", "rel", "abs", "tolerance", "rounding", "alpha", "bound"}  # Arguments.
AT_LEAST = {"draws", "steps", "max_examples"}
WORKERS = ("WORKERS", "N", "REPLICAS")  # Constants of modules.
# Laws whose code does not say it in a way that is read here: written by hand.
WORKERS_OF = {
    "test_the_same_method_at_both_stages_is_unbiased": {6},
    "test_two_axes_are_as_good_as_one": {4, 8},
    "test_one_worker": {1},
    "test_every_method_takes_leaves_that_are_cut": {2},
    "test_a_huge_update_is_right_or_not_finite": {2},
    "test_a_worker_without_weight_does_not_count": {4},
    "test_wide_numbers_change_no_update": {4},
    "test_workers_that_agree_stay_as_they_are": {8},
}


@functools.cache
def _functions(file: str) -> dict[int, ast.FunctionDef]:
    """By their first lines, those of decorators where there are some."""
    tree = ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {min(x.lineno for x in (node, *node.decorator_list)): node for node in functions}


@functools.cache
def _nodes(function: FunctionType) -> list[ast.AST]:
    """Of decorators and body, not of parameters: the defaults of most are given another value."""
    code = function.__code__
    tree = _functions(code.co_filename)[code.co_firstlineno]
    return [node for part in (*tree.decorator_list, *tree.body) for node in ast.walk(part)]


def _named(node: ast.AST, names: dict[str, Any]) -> Any:
    """The function that a name, or an attribute of a module, stands for; None if it is another."""
    found = None
    if isinstance(node, ast.Name):
        found = names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
        found = getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return inspect.unwrap(found) if callable(found) else None


@functools.cache
def _read(law: FunctionType) -> list[FunctionType]:
    """The law, and the functions that it names, directly or not."""
    found = [law]
    for function in found:
        for node in _nodes(function):
            named = _named(node, function.__globals__)
            is_read = isinstance(named, FunctionType) and named.__module__.startswith(READ)
            if is_read and named.__name__ != "<lambda>" and named not in found:
                found.append(named)
    return found


def _value(node: ast.AST, names: dict[str, Any]) -> Any:
    """Of an expression of numbers and of constants of a module; None if it is another."""
    numbers = {k: v for k, v in names.items() if isinstance(v, int | float | tuple)}
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, numbers)
    except Exception:
        return None


def _arguments(function: FunctionType) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of the arguments that it passes, and defaults of numbers of workers."""
    for call in _nodes(function):
        if not isinstance(call, ast.Call):
            continue
        given = {word.arg: word.value for word in call.keywords if word.arg}
        callee = _named(call.func, function.__globals__)
        if isinstance(callee, FunctionType) or inspect.isclass(callee):
            try:
                parameters = [*inspect.signature(callee).parameters.values()]
            except ValueError:
                parameters = []
            by_place = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
            given |= dict(zip(by_place, call.args, strict=False))
            if callee.__module__ != "tests.mutants":  # It is for one law after the other.
                defaults = {x.name: x.default for x in parameters if x.name in ("workers", "where")}
                given = {k: ast.Constant(v) for k, v in defaults.items()} | given
        yield from given.items()


def workers_of(law: FunctionType) -> set[int]:
    """The numbers of workers that the law and the functions that it calls name."""
    if law.__name__ in WORKERS_OF:
        return WORKERS_OF[law.__name__]
    found = []
    for function in _read(law):
        names = function.__globals__
        found += [_value(x, names) for k, x in _arguments(function) if k in ("workers", "where")]
        for node in _nodes(function):
            if isinstance(node, ast.Name) and node.id in WORKERS:
                found.append(names.get(node.id))
            if isinstance(node, ast.Name) and node.id == "ONE_LEAF":
                found.append(names[node.id][0])
            is_loop = isinstance(node, ast.For | ast.comprehension)
            if is_loop and ast.unparse(node.target) == "workers":
                found += _value(node.iter, names) or ()
    given = {x for x in found if isinstance(x, int) and not isinstance(x, bool)}
    of_module = [law.__globals__.get(name) for name in WORKERS]
    return given or {x for x in of_module if isinstance(x, int)}


class _Folded(ast.NodeTransformer):
    """Numbers of some types become `#`."""

    def __init__(self, names: dict[str, Any], types: Any) -> None:
        self.names, self.types, self.numbers = names, types, set[float]()

    def visit(self, node: ast.AST) -> ast.AST:
        value = _value(node, self.names) if isinstance(node, ast.expr) else None
        if not isinstance(value, self.types):
            return self.generic_visit(node)
        self.numbers.add(value)
        return ast.Name("#")


def _folded(kind: str, node: ast.expr, names: dict[str, Any]) -> tuple[str, set[float]]:
    """The text of an expression and its floats; its integers only where they are all there is."""
    alone = isinstance(_value(node, names), int) or kind.split()[0] in AT_LEAST
    folder = _Folded(names, int | float if alone else float)
    return f"{kind} {ast.unparse(folder.visit(copy.deepcopy(node)))}", folder.numbers


def _compared(function: FunctionType) -> Iterator[tuple[str, ast.expr]]:
    """Both sides of what it asserts to be smaller than something else."""
    for node in _nodes(function):
        is_law = isinstance(node, ast.Call) and ast.unparse(node.func) == "require_law"
        if isinstance(node, ast.Assert) or is_law:
            test = node.test if isinstance(node, ast.Assert) else node.args[0]
            for each in [x for x in ast.walk(test) if isinstance(x, ast.Compare)]:
                sides = [each.left, *each.comparators]
                for left, op, right in zip(sides, each.ops, sides[1:], strict=False):
                    if isinstance(op, ast.Lt | ast.LtE):
                        yield from (("<", right), (">", left))
                    if isinstance(op, ast.Gt | ast.GtE):
                        yield from (("<", left), (">", right))


def _terms(node: ast.AST) -> set[str]:
    """The names in it that are not of the arguments of a function."""
    if isinstance(node, ast.Call):
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*(_terms(child) for child in ast.iter_child_nodes(node)))


def bounds_of(law: FunctionType) -> dict[str, set[float]]:
    """Tolerances and bounds as text, in which `#` is the place of a number, and the numbers."""
    found: dict[str, set[float]] = {}
    for function in _read(law):
        names = function.__globals__
        sides = [*_compared(function)]
        sides += [(k, x) for k, x in _arguments(function) if k in AT_MOST | AT_LEAST]
        assigned = [
            (node.targets[0].id, node.value)
            for node in _nodes(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        for kind, side in sides:
            for name, value in assigned:
                if kind != ">" and name in _terms(side) and (f"{name} =", value) not in sides:
                    sides.append((f"{name} =", value))
        for kind, side in sides:
            text, numbers = _folded(kind, side, names)
            if numbers:
                found.setdefault(text, set()).update(numbers)
        for node in _nodes(function):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.search(r"(assert|require)_\w*equal\w*$", called):
                found.setdefault(called.rpartition(".")[2], set())
    return found


def is_lower(bound: str) -> bool:
    """Whether a larger number in it is the tighter one."""
    return bound.startswith(">") or bound.split()[0] in AT_LEAST
