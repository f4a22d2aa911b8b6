"""docs/methods.md is written from the tables of cases, and every line runs as it is printed."""

import ast
import functools
import itertools
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, Case, _lines, page
from tests.cases._gossip import GOSSIP
from tests.cases._local import LOCAL as LOCAL_CASES
from tests.cases._local import RECIPES
from tests.mutants import remembers
from tests.slow import slow
from tests.test_complete import WITHOUT_ROW
from tests.workers import abstract, gradients

ROOT = pathlib.Path(__file__).parent.parent
PAGE = page.PAGE
SMALL, LARGE = 10**4, 10**6
WORKERS = 8
STEPS = 4
COLUMNS = 10  # Shape of the one large leaf, whose rows are sparse or not.


class Line(NamedTuple):
    """A line of a table: its text, and its heading."""

    printed: str
    heading: str

    def __repr__(self) -> str:
        return self.printed


def lines() -> list[Line]:
    found, heading = [], "Means"
    printed = PAGE.read_text(encoding="utf-8").splitlines()
    for text, following in itertools.pairwise(printed):
        if bold := re.match(r"\*\*([^*]+)\.\*\*", text):
            heading = bold[1]
        is_heading = following.startswith("|---")
        if not is_heading and (code := re.match(r"\| `([^`]+)`", text)):
            found.append(Line(code[1], heading))
    return found


LINES = lines()
WITH_NEIGHBOURS, LOCAL = "Gossip", "Local steps"


def block() -> str:
    """The code that the page puts before its lines."""
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return found


@functools.cache
def names(size: int) -> dict[str, Any]:
    """The names that the lines may use, at `size` coordinates."""
    namespace: dict[str, Any] = {}
    assert block().count("n, d = 8, 10_000 ") == 1
    exec(block().replace("n, d = 8, 10_000 ", f"n, d = {WORKERS}, {size} "), namespace)
    return namespace


def is_of_sparse_rows(printed: str) -> bool:
    """Whether a line is for updates of which most rows are zero."""
    return "density=" in printed


def updates_of(size: int, sparse: bool = False) -> dict[str, jax.Array]:
    """Each worker's update: a common part and an equally large local part, or some rows of it."""
    common, own, touched = jax.random.split(jax.random.key(1), 3)
    shape = (size // COLUMNS, COLUMNS)
    w = jax.random.normal(common, (1, *shape)) ** 3 + jax.random.normal(own, (WORKERS, *shape))
    if sparse:  # 2 % of the rows of a worker, and at most 16 % of all.
        w = jnp.where(jax.random.uniform(touched, (WORKERS, shape[0], 1)) < 0.02, w, 0)
    return {"w": w, "b": jnp.ones((WORKERS, 3))}


def axes_of(printed: str) -> tuple[tuple[str, int], ...]:
    return (("dcn", 2), ("ici", WORKERS // 2)) if '"dcn"' in printed else (("data", WORKERS),)


def sums(tx: Any, updates: Any, axes: tuple[tuple[str, int], ...]) -> tuple[Any, Any]:
    """For each worker, the sum of its results over steps of the same updates; and its state."""

    def one(update: Any) -> Any:
        zero = jax.tree.map(jnp.zeros_like, update)

        def step(carry: Any, _: None) -> Any:
            state, total = carry
            given, state = tx.update(update, state, zero)
            return (state, jax.tree.map(jnp.add, total, given)), None

        return jax.lax.scan(step, (tx.init(zero), zero), length=STEPS)[0]

    for name, _ in reversed(axes):
        one = jax.vmap(one, axis_name=name)
    sizes = [size for _, size in axes]
    split = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), updates)
    # A program that runs briefly is not worth optimizing, which at least doubles the time.
    quick = updates["w"].size < WORKERS * LARGE
    options = {"xla_backend_optimization_level": 0} if quick else None
    state, total = jax.jit(one, compiler_options=options)(split)
    return state, jax.tree.map(lambda x: x.reshape(WORKERS, *x.shape[len(sizes) :]), total)


def of_one(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def is_per_worker(x: Any) -> bool:
    return isinstance(x, jaxcomm.PerWorker)


def correlation(first: Any, second: Any) -> float:
    first, second = (np.asarray(x, np.float64).ravel() for x in (first, second))
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))


def largest(tree: Any) -> float:
    """The largest magnitude of the floats of a state."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return max((float(jnp.abs(x).max()) for x in floats if x.size), default=0.0)


def check_mean(line: Line, size: int) -> None:
    tx = eval(line.printed, names(size))
    updates = updates_of(size, is_of_sparse_rows(line.printed))
    if is_of_sparse_rows(line.printed) and "sparse=" not in line.printed:
        del updates["b"]  # It is for another aggregator, as the page says.
    state, total = sums(tx, updates, axes_of(line.printed))
    for name, update in updates.items():
        assert total[name].shape == update.shape
        assert bool(jnp.isfinite(total[name]).all())
        np.testing.assert_array_equal(total[name], total[name][:1].repeat(WORKERS, 0))
    mean = updates["w"].mean(0)
    assert correlation(total["w"][0], mean) > 0.05
    # An error that grows without end would have doubled a few times.
    kept = state._replace(diagnostics=()) if hasattr(state, "diagnostics") else state
    assert largest(kept) <= 2 * STEPS * largest(updates)


def check_parameters(line: Line, size: int) -> None:
    tx = eval(line.printed, names(size))
    if line.heading == WITH_NEIGHBOURS:
        tx = optax.chain(names(size)["inner"], tx)
    batch = updates_of(size)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), batch)
    params = jaxcomm.replicate(zeros, WORKERS)

    def loss(params: Any, batch: Any) -> jax.Array:
        return optax.tree.norm(optax.tree.sub(params, of_one(batch)), squared=True) / 2

    state = jaxcomm.init(tx, params, WORKERS)
    step = jaxcomm.simulate(loss, tx, WORKERS, donate=False)
    for _ in range(2 * STEPS):
        params, state, _ = step(params, state, batch)
    after = jax.tree.map(lambda x: x.per_worker["data"], params, is_leaf=is_per_worker)
    for name, target in batch.items():
        assert after[name].shape == target.shape and bool(jnp.isfinite(after[name]).all())
    assert correlation(after["w"].mean(0), batch["w"].mean(0)) > 0.9
    assert largest(after) <= 2 * largest(batch)


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [SMALL, slow(LARGE)])
@pytest.mark.parametrize("line", LINES, ids=repr)
def test_a_line_runs_as_it_is_printed(line: Line, size: int) -> None:
    check = check_parameters if line.heading in (WITH_NEIGHBOURS, LOCAL) else check_mean
    check(line, size)


def test_the_page_is_read() -> None:
    assert len(LINES) > 60 and {WITH_NEIGHBOURS, LOCAL} < {line.heading for line in LINES}
    for line in LINES:
        assert isinstance(ast.parse(line.printed, mode="eval").body, ast.Call)


def test_the_page_is_the_one_that_is_written_from_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page.page(), "Run `make methods-page`."


def test_every_row_has_a_line_or_shares_one() -> None:
    rows = {case.name for case in [*CASES, *GOSSIP, *LOCAL_CASES, *RECIPES]}
    printed = {line.row for line in [*_lines.MEANS, *_lines.GOSSIP, *_lines.LOCAL]}
    around = {line.row for line in _lines.AROUND}
    assert printed | around | {*_lines.VARIANTS} == rows | (around & {*WITHOUT_ROW})
    assert not (printed | around) & {*_lines.VARIANTS}
    for line, reason in _lines.VARIANTS.values():
        assert line in printed and reason


def value(formula: str, letters: dict[str, float | str]) -> float:
    """A formula of the page; two factors stand beside each other, with a space between them."""
    for printed, python in {"√(": "sqrt(", "⌈": "ceil(", "⌉": ")", "²": "**2", "^": "**"}.items():
        formula = formula.replace(printed, python)
    formula = re.sub(r"√(\w+)", r"sqrt(\1)", re.sub(r"log₂ (\w)", r"log2(\1)", formula))
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula.replace("log₂(", "log2("))
    functions = {"sqrt": math.sqrt, "ceil": math.ceil, "log2": math.log2, "min": min, "max": max}
    numbers: dict[str, Any] = {}
    for letter, given in letters.items():
        numbers[letter] = value(given, numbers) if isinstance(given, str) else given
    return float(eval(formula, {**functions, **numbers}))


def letters_of(line: _lines.Line, d: int, n: int) -> dict[str, float | str]:
    index = {} if "i" in line.at else {"i": "(2 + log₂(d/k)) / 8"}
    return {"d": d, "n": n, "l": 1, **line.at, **(index if "k" in line.at else {})}


PRINTED = [(line, page.ROWS[line.row]) for line in _lines.MEANS]


@pytest.mark.parametrize(("line", "case"), PRINTED, ids=[case.name for _, case in PRINTED])
def test_bytes_are_those_of_the_row(line: _lines.Line, case: Case) -> None:
    if line.unchecked:
        return
    d = 2**20
    printed = value(line.bytes.partition(";")[0], letters_of(line, d, WORKERS))
    assert printed == pytest.approx(case.bytes([d], WORKERS), rel=2e-3)


@pytest.mark.parametrize(("line", "case"), PRINTED, ids=[case.name for _, case in PRINTED])
def test_errors_are_those_of_the_row(line: _lines.Line, case: Case) -> None:
    formula = re.split("; | · ", line.error)[0]
    contraction = None if page.exact_with_room(line) else case.contraction
    claims = page.exact_with_room(line) or case.variance or contraction
    assert bool(formula) == bool(claims and not line.claim)
    for d in (8, 2**12) if formula else ():
        printed = value(formula, letters_of(line, d, WORKERS))
        if case.variance:
            assert printed == pytest.approx(case.variance(d, WORKERS) / WORKERS, rel=1e-3)
        elif contraction:
            assert printed == pytest.approx(contraction(d), rel=1e-3)
        else:
            assert printed == 0


@pytest.mark.parametrize("line", _lines.GOSSIP, ids=lambda line: line.row)
def test_bytes_of_gossip_are_those_of_the_row(line: _lines.Line) -> None:
    if not line.unchecked:
        case = page.GOSSIP_ROWS[line.row]
        letters = {"P": 12 * 4, "p": case.message, **line.at}
        assert value(line.bytes.partition(";")[0], letters) == case.sends * case.message


def test_feedback_has_a_memory() -> None:
    """That it makes up for what is biased is `tests.laws.test_every_worker`."""
    for line, case in PRINTED:
        if "feedback" in page.unbiased(line):
            assert remembers(abstract(case.make(), gradients(WORKERS), "vmap")), line.row


def test_a_claim_that_no_row_makes_has_a_test() -> None:
    for line in [line for line in _lines.MEANS if line.claim]:
        path, _, name = line.tested.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
