"""docs/methods.md is written from the catalogue, whose calls, builders and formulas agree."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.catalogue import LARGE, METHODS, TINY, Method
from jaxcomm.synchronization import events
from tests.cases import CASES, Case, page
from tests.cases._gossip import GOSSIP, GossipCase
from tests.mutants import remembers
from tests.slow import slow
from tests.synchronization.events.rows import ROWS as POLICIES
from tests.workers import abstract, gradients

PAGE = page.PAGE
SMALL, LARGE_TREE = 10**4, 10**6
WORKERS = 8
STEPS = 4
COLUMNS = 10  # Shape of the one large leaf, whose rows are sparse or not.
LINES = [method for method in METHODS.values() if not method.like]
LOCAL = ("gossip", "local")


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
    quick = updates["w"].size < WORKERS * LARGE_TREE
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


def check_mean(method: Method, size: int) -> None:
    tx = eval(method.call, page.names(size))
    of_rows = "density=" in method.call  # For updates of which most rows are zero.
    updates = updates_of(size, of_rows)
    if of_rows and "sparse=" not in method.call:
        del updates["b"]  # It is for another aggregator, as the page says.
    state, total = sums(tx, updates, axes_of(method.call))
    for name, update in updates.items():
        assert total[name].shape == update.shape
        assert bool(jnp.isfinite(total[name]).all())
        np.testing.assert_array_equal(total[name], total[name][:1].repeat(WORKERS, 0))
    mean = updates["w"].mean(0)
    assert correlation(total["w"][0], mean) > 0.05
    # An error that grows without end would have doubled a few times.
    kept = state._replace(diagnostics=()) if hasattr(state, "diagnostics") else state
    assert largest(kept) <= 2 * STEPS * largest(updates)


def check_parameters(method: Method, size: int) -> None:
    tx = eval(method.call, page.names(size))
    if method.kind == "gossip":
        tx = optax.chain(page.names(size)["inner"], tx)
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


@pytest.mark.parametrize("size", [SMALL, slow(LARGE_TREE)])
@pytest.mark.parametrize("method", LINES, ids=repr)
def test_a_line_runs_as_it_is_printed(method: Method, size: int) -> None:
    if size == LARGE_TREE and "directions" in method.letters.values():
        size //= 10  # d coordinates of each of d / 500 directions: d = 10⁶ takes eight minutes.
    check = check_parameters if method.kind in LOCAL else check_mean
    check(method, size)


def program(method: Method, tx: Any) -> str:
    """The traced program of a step, without what differs from one trace to the next."""
    update = {"w": jnp.ones((WORKERS, SMALL // COLUMNS, COLUMNS))}
    if method.kind in LOCAL:
        update["b"] = jnp.ones((WORKERS, 3))  # Fragments need leaves.
        tx = tx if method.kind == "local" else optax.chain(optax.sgd(0.1), tx)
        params = jaxcomm.replicate(of_one(update), WORKERS)
        state = jaxcomm.init(tx, params, WORKERS)
        step = jaxcomm.simulate(
            lambda p, x: sum(map(jnp.sum, jax.tree.leaves((p, x)))), tx, WORKERS, donate=False
        )
        traced = jax.make_jaxpr(step)(params, state, update)
    else:

        def one(x: Any) -> Any:
            return tx.update(x, tx.init(x), x)

        for name, size in reversed(axes_of(method.call)):
            update = jax.tree.map(lambda x, n=size: x.reshape(-1, n, *x.shape[1:]), update)
            one = jax.vmap(one, axis_name=name)
        traced = jax.make_jaxpr(one)(of_one(update))
    return re.sub(r"0x[0-9a-f]+", "", str(traced))


@pytest.mark.parametrize("method", METHODS.values(), ids=repr)
def test_the_call_is_what_the_catalogue_builds(method: Method) -> None:
    given = page.names(SMALL)
    ratio, γ = given["k"] / SMALL, given["γ"]
    size = LARGE._replace(
        ratio=ratio,
        drawn=ratio,
        first=10 * ratio,
        capacity=given["k"],
        threshold=given["t"],
        blocks=given["B"],
        rank=given["R"],
        directions=given["K"],
        density=given["ρ"],
        union_density=given["υ"],
        granularity="row",
        overflow="nan",
        sketch_ratio=γ,
        table_ratio=γ,
    )
    options = {"period": given["period"]} if method.kind == "local" else {}
    built = program(method, method.build(size, **options))
    assert built == program(method, eval(method.call, given))


def test_the_page_is_the_one_that_is_written_from_the_catalogue() -> None:
    assert PAGE.read_text(encoding="utf-8") == page.page(), "Run `make methods-page`."


def test_a_variant_shares_a_line() -> None:
    printed = {method.name for method in LINES}
    assert all(method.like in printed for method in METHODS.values() if method.like)


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


ROWS = {case.name: case for case in CASES}
# Their leaves are vectors, which are sent exactly: other rows have matrices.
IN_MATRICES = {"power_sgd": "power_iteration", "atomo": "spectral_sampling"}
MEANS = [
    (method, ROWS[IN_MATRICES.get(method.name, method.name)])
    for method in METHODS.values()
    if method.kind == "mean"
]
UNCHECKED = {
    "dion": "has leaves of one axis here, which are sent exactly: tests/methods/test_dion.py",
    "budgeted_mean": "differs by worker: tests/aggregation/test_budgeted.py",
    "sparcml": "has a density of 1 here, and n times that is more than all coordinates",
    "matcha_periodic": "here, the bytes are those of a step in which all edges are active",
    "noloco": "here, the bytes are those of all pairings, of which a step draws one",
    "ad_psgd": "here, the bytes are those of all matchings, of which a step draws one",
    "periodic_averaging": "has its exchange in a conditional",
}


def numbers_of(method: Method, d: int, n: int) -> dict[str, float | str]:
    """The letters of the formulas, at the size of the tests."""
    of_size = {k: v for k, v in TINY._asdict().items() if isinstance(v, int | float)}
    own = {k: v[0] if isinstance(v, tuple) else v for k, v in method.letters.items()}
    index = {"i": "(2 + log₂(d/k)) / 8"} if "k" in own else {}
    return {**of_size, "d": d, "n": n, "l": 1, **own, **({} if "i" in own else index)}


MEAN = pytest.mark.parametrize(("method", "case"), MEANS, ids=[method.name for method, _ in MEANS])


@MEAN
def test_bytes_are_those_of_the_row(method: Method, case: Case) -> None:
    d = 2**20
    if method.name not in UNCHECKED:
        printed = value(method.bytes.partition(";")[0], numbers_of(method, d, WORKERS))
        assert printed == pytest.approx(case.bytes([d], WORKERS), rel=2e-3)


@MEAN
def test_errors_are_those_of_the_row(method: Method, case: Case) -> None:
    formula = re.split("; | · ", method.error)[0]
    assert bool(formula) == bool(case.variance or case.contraction)
    for d in (8, 2**12) if formula else ():
        printed = value(formula, numbers_of(method, d, WORKERS))
        by_hand = case.variance(d, WORKERS) / WORKERS if case.variance else case.contraction(d)
        assert printed == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize("case", GOSSIP, ids=repr)
def test_bytes_of_gossip_are_those_of_the_row(case: GossipCase) -> None:
    method = METHODS[case.name]
    if method.name not in UNCHECKED:
        numbers = {"n": WORKERS, "P": 12 * 4, "p": case.message, **method.letters}
        assert value(method.bytes.partition(";")[0], numbers) == case.sends * case.message


def claims_of(case: Case) -> set[str]:
    """What the catalogue may say of a row."""
    if case.unbiased:
        exact = case.resolution and case.resolution(8, 1000) == 0
        return {"exact", "exact if all fits"} if exact else {"unbiased", "exact if all fits"}
    if case.result:
        return {"no mean"}
    if case.resolution:
        return {"biased"} if case.random else {"nearest"}
    return {"damped feedback"} if case.discount < 1 else {"feedback", "other"}


def test_claims_are_those_of_the_row() -> None:
    """That feedback makes up for what is biased is `tests.laws.test_every_worker`."""
    for case in CASES:
        method = METHODS[case.name]
        assert method.claim in claims_of(case), case.name
        if "feedback" in method.claim:
            assert remembers(abstract(case.make(), gradients(WORKERS), "vmap")), case.name
        grows = case.bytes([2**20], 64) / case.bytes([2**20], 2)  # Only gathers do with workers.
        assert (method.exchange == "all-gather") == (grows > 30), case.name


def test_policies_on_processes_are_those_that_bear_absence() -> None:
    """Each policy has one line, with "yes" if it can do without a worker."""
    section = PAGE.read_text(encoding="utf-8").partition("## Asynchronous policies")[2]
    lines = re.findall(
        r"^\| (`.*) \|.*\| (yes|no) \|$", section.partition("\n## ")[0], re.MULTILINE
    )
    listed = [(name, runs) for names, runs in lines for name in re.findall(r"`([a-z_]+)`", names)]
    built = {"asynchronous_pairs" if row.name == "ad_psgd" else row.name: row for row in POLICIES}
    for name, runs in listed:
        row = built.get(name) or built[f"{name}_2"]  # With its option.
        policy = row.policy(4)
        on_processes = policy.attend is not None or policy.pairs is not None
        assert (runs == "yes") == on_processes, name
    functions = {name for name in events.__all__ if returns_policy(getattr(events, name))}
    assert sorted(name for name, _ in listed) == sorted(functions)


def returns_policy(function: Any) -> bool:
    return getattr(function, "__annotations__", {}).get("return") in (events.Policy, "Policy")
