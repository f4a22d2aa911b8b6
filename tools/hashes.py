"""Runs every row of `tests/cases` on two commits, and prints what the methods do differently.

    python tools/hashes.py BEFORE AFTER [--rows NAME,...] [--jobs 2]    # AFTER may be `.`

It is temporary: it checks large refactorings of the core, and goes when they are done. This file
runs on both commits, each in a folder of its own, with the rows and the library of that commit.
So it uses little of them: `make` of rows, `init` and `update` of transformations, `hierarchical`,
`mean`, `local_params` and `wire.account`. Of each row, some steps of changing updates are compared,
the last with a NaN of one worker:

- updates, parameters and the whole state: simulated, in bfloat16, with weights, with absent
  workers, on a mesh of one axis, over two axes, and in two stages;
- what each worker passes to collectives, as a multiset per function, dtype and shape;
- bytes by `wire.account`, and the collectives of compiled programs;
- the type of an error, where a row refuses to run so.

Floats may differ by 2 units in the last place, anything else by nothing. Other messages of errors
and other paths of leaves are notes. Results are kept in `.hashes`, by commit and by this file.
"""

import argparse
import collections
import concurrent.futures
import faulthandler
import functools
import hashlib
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

SCRIPT = pathlib.Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
STEPS, ULPS = 6, 2
SHAPES = {"bias": (3,), "kernel": (12, 10), "scale": ()}
STUCK = 900  # Seconds of one row.
# Compiling is most of the time, and results need not be quick. Eight devices on few cores need
# more threads than cores. Kept programs of several devices may wait forever: see tests/compiled.py.
SETTINGS = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
    "NPROC": "16",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "0",
}
SENDERS = "psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "psum_scatter"
COLLECTIVE = re.compile(
    r" = (.+?) (all-\w+|reduce-scatter|collective-\w+|ragged-all-to-all)(?:-start)?\(.*?"
    r"(?:replica_groups|source_target_pairs)=(.*?)(?:, \w+=|$)",
    re.MULTILINE,
)
TYPE = re.compile(r"\w+\[[\d,]*\]")

# In a process of one commit.


class Mode(NamedTuple):
    make: Callable[[], Any]
    axes: dict[str, int]
    workers: tuple[str, ...]  # The axes over which updates differ,
    replicas: bool  # and parameters.
    on: str = "one device"
    dtype: Any = np.float32
    extra: str = ""


def modes_of(case: Any) -> dict[str, Mode]:
    from jaxcomm import hierarchical, mean

    make = case.make
    one = Mode(make, {"data": 8}, ("data",), replicas=type(case).__name__ != "Case")
    if one.replicas:
        local = type(case).__name__ == "LocalCase"
        of = (lambda workers: make(optax.sgd(0.1, momentum=0.5))) if local else make
        one, two = one._replace(make=lambda: of(8)), one._replace(axes={"data": 4, "ici": 2})
        several = {"two axes": lambda: of(4)}
    else:
        two = one._replace(axes={"dcn": 2, "ici": 4}, workers=("dcn", "ici"))
        several = {
            "two axes": lambda: make(("dcn", "ici")),
            "two stages": lambda: hierarchical(make("ici"), make("dcn")),
            "last stage": lambda: hierarchical(mean("ici"), make("dcn")),
        }
    bfloat16, weights = one._replace(dtype=jnp.bfloat16), one._replace(extra="weight")
    found = {"simulated": one, "bfloat16": bfloat16, "weights": weights}
    if one.replicas:
        found["absent"] = one._replace(extra="present")
    meshes = {"mesh": one} | {name: two._replace(make=of_two) for name, of_two in several.items()}
    for name, mode in meshes.items():
        found[name] = mode._replace(on="mesh")
        found[f"{name}, sent"] = mode._replace(on="untyped mesh")
    return found


def given(workers: int, dtype: Any) -> tuple[Any, Any]:
    """Parameters, and each worker's updates and weights of all steps, [workers, steps, ...]."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    updates = {n: rng.normal(size=(workers, STEPS, *shape)) for n, shape in SHAPES.items()}
    updates["kernel"][1, -1, 2, 3] = np.nan
    params, updates = jax.tree.map(lambda x: np.asarray(x).astype(dtype), (params, updates))
    weights = np.linspace(0, 2, workers * STEPS, dtype=np.float32).reshape(workers, STEPS)
    return params, (updates, weights)


def program(mode: Mode) -> Callable[..., Any]:
    """`(params, (updates, weights)) -> (first state, (updates, params, states) of all steps)`."""
    from jaxcomm import local_params

    tx = mode.make()
    present = np.arange(8) % STEPS != np.arange(STEPS)[:, None]

    def train(params: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            (params, state), ((updates, weight), here) = carry, batch
            extras = {"weight": weight, "present": here}
            extra = {mode.extra: extras[mode.extra]} if mode.extra else {}
            updates, state = tx.update(updates, state, params, **extra)
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, params, state)

        params = local_params(params, axis_name=mode.workers) if mode.replicas else params
        first = tx.init(params)
        return first, jax.lax.scan(body, (params, first), (batches, present))[1]

    def local(params: Any, batches: Any) -> Any:
        own = train(params, jax.tree.map(lambda x: x[0], batches))
        return jax.tree.map(lambda x: x[None], own)

    if mode.on == "one device":
        return jax.vmap(train, in_axes=(None, 0), axis_name="data")
    names, sizes = zip(*mode.axes.items(), strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    specs, typed = (P(), P(mode.workers)), mode.on == "mesh"
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(names), check_vma=typed)


_sent: dict[str, list[np.ndarray]] = collections.defaultdict(list)
_axes: list[tuple[str, ...]] = []  # Of the program that is traced, if it reports what it sends.


def report_operands() -> None:
    """Wraps the collectives of `jax.lax`, before the library is imported, which may copy names."""

    def report(name: str, worker: jax.Array, x: jax.Array) -> None:
        # A copy, as the program uses the memory again.
        _sent[f"{name} of {x.dtype}{[*x.shape]} by worker {worker}"].append(np.array(x))

    def wrapped(name: str, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def reporting(*args: Any, **options: Any) -> Any:
            for x in jax.tree.leaves(args[0]) if _axes else ():
                if isinstance(x, jax.Array) and x.size:
                    worker = jax.lax.axis_index(_axes[0])
                    jax.debug.callback(functools.partial(report, name), worker, x)
            return send(*args, **options)

        return reporting

    for name in SENDERS:
        setattr(jax.lax, name, wrapped(name, getattr(jax.lax, name)))


def numbers(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the values, for floats: neighbors 1 apart, NaN far from others."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    magnitude = bits & (2 ** (8 * x.dtype.itemsize - 1) - 1)
    return np.where(np.isnan(x), 2**40, np.where(bits < 0, -magnitude, magnitude))


def in_order(messages: list[np.ndarray]) -> np.ndarray:
    """Sorted by value: devices send in any order."""
    stacked = np.stack(messages)
    return stacked[np.lexsort(numbers(stacked).reshape(len(stacked), -1).T[::-1])]


def measured(mode: Mode) -> tuple[dict[str, Any], dict[str, str]]:
    """What is compared, and notes, both by name."""
    from jaxcomm import wire

    jax.clear_caches()  # Else parts that were traced for another mode would report, or would not.
    _axes[:] = [(*mode.axes,)] if mode.on == "untyped mesh" else []
    _sent.clear()
    workers = int(np.prod([mode.axes[name] for name in mode.workers]))
    run, arguments = program(mode), given(workers, mode.dtype)
    compiled = jax.jit(run).lower(*arguments).compile()
    leaves = jax.tree_util.tree_leaves_with_path(compiled(*arguments))
    jax.effects_barrier()
    found: dict[str, Any] = {}
    paths = {}
    for number, (path, x) in enumerate(leaves):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        found[f"leaf {number}"] = np.asarray(jax.random.key_data(x) if is_key else x)
        paths[f"leaf {number}"] = jax.tree_util.keystr(path)
    for result, kind, over in COLLECTIVE.findall(compiled.as_text() or ""):
        name = f"compiled {kind} of {', '.join(sorted(TYPE.findall(result)))} over {over}"
        found[name] = found.get(name, 0) + 1
    found |= {f"sent: {key}": in_order(messages) for key, messages in _sent.items()}
    if mode.on == "mesh":
        account = wire.account(run, *arguments)
        found |= {f"bytes over {axes}": size for axes, size in account.bytes_by_axis.items()}
    return {name: np.asarray(x) for name, x in found.items()}, paths


def attempted(mode: Mode) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        return measured(mode)
    except Exception as error:
        text = re.sub("0x[0-9a-f]+", "0x", str(error).partition("\n")[0])
        return {"error": np.asarray(type(error).__name__, object)}, {"error": text}


def serve(folder: pathlib.Path, names: list[str]) -> None:
    """Records the rows; without names, prints those of all."""
    report_operands()
    import jaxcomm
    from tests.cases import CASES
    from tests.cases._gossip import GOSSIP
    from tests.cases._local import LOCAL, RECIPES

    assert pathlib.Path(jaxcomm.__file__).is_relative_to(pathlib.Path.cwd()), jaxcomm.__file__
    cases = {case.name: case for case in [*CASES, *GOSSIP, *LOCAL, *RECIPES]}
    if not names:
        print("\n".join(cases))
    for name in names:
        faulthandler.dump_traceback_later(STUCK, exit=True)
        found = {key: attempted(mode) for key, mode in modes_of(cases[name]).items()}
        part = folder / f"{name}.part"
        part.write_bytes(pickle.dumps(found))
        part.replace(folder / f"{name}.pickle")


# In the process that compares.


def results(revision: str, options: Any) -> dict[str, Any]:
    """What each row of a commit does, by name; `None` where its process ended."""
    with tempfile.TemporaryDirectory(prefix="hashes") as temporary:
        tree, folder = ROOT, pathlib.Path(temporary).resolve()
        if revision != ".":
            git = functools.partial(subprocess.check_output, cwd=ROOT)
            commit = git(["git", "rev-parse", "--verify", f"{revision}^{{commit}}"], text=True)[:12]
            archive = git(["git", "archive", commit])
            subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
            version = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:8]
            tree, folder = folder, ROOT / ".hashes" / f"{commit}-{version}"
        return run_rows(revision, tree, folder, options)


def run_rows(revision: str, tree: pathlib.Path, folder: pathlib.Path, options: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    server = [sys.executable, str(SCRIPT), "--serve", str(folder)]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(tree)}

    def run(names: list[str], **streams: Any) -> Any:
        return subprocess.run([*server, *names], cwd=tree, env=environment, text=True, **streams)

    def run_all(names: list[str]) -> None:
        tried: collections.Counter[str] = collections.Counter()
        # Twice, as a busy machine may be too slow for XLA, which then ends the process.
        while left := [n for n in names if not files[n].exists() and tried[n] < 2]:
            tried[left[0]] += 1
            with (folder / "log.txt").open("a") as log:
                run(left, stdout=log, stderr=log)

    wanted = options.rows.split(",") if options.rows else None
    names = run([], stdout=subprocess.PIPE, check=True).stdout.split()
    names = [name for name in names if wanted is None or name in wanted]
    files = {name: folder / f"{name}.pickle" for name in names}
    left = [name for name in names if not files[name].exists()]
    print(f"{revision}: {len(names)} rows, {len(left)} to run, into {folder}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run_all, [left[job :: options.jobs] for job in range(options.jobs)]))
    return {n: pickle.loads(f.read_bytes()) if f.exists() else None for n, f in files.items()}


def differs(before: np.ndarray | None, after: np.ndarray | None) -> tuple[float, str]:
    """By how many units in the last place, infinite for what is no float; and a text."""
    if before is None or after is None:
        return np.inf, "only after" if before is None else "only before"
    types = [f"{x.dtype}{[*x.shape]}" for x in (before, after)]
    if types[0] != types[1]:
        return np.inf, " -> ".join(types)
    old, new = numbers(before), numbers(after)
    unequal = old != new
    if not unequal.any():
        return 0, ""
    is_float = jnp.issubdtype(before.dtype, jnp.floating)
    far = np.abs(old - new) if is_float else unequal
    place = np.unravel_index(np.argmax(far), far.shape)
    text = f"{unequal.sum()} of {far.size}, at {[*map(int, place)]}: {before[place]} -> "
    text += f"{after[place]}" + (f", {far[place]} ulp" if is_float else "")
    return (float(far[place]) if is_float else np.inf), text


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints what differs; 1 if anything does by more than it may."""
    outcomes, notes = collections.defaultdict(list), collections.defaultdict(list)
    near = (0.0, "")
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after:
            outcomes[f"are only {'before' if name in before else 'after'}"].append(name)
            continue
        if before[name] is None or after[name] is None:
            outcomes["ended their process"].append(name)
            continue
        worst = (0.0, "")
        for mode in before[name] | after[name]:
            (old, said), (new, says) = (x[name].get(mode, ({}, {})) for x in (before, after))
            found = {each: differs(old.get(each), new.get(each)) for each in old | new}
            failed = sorted((x for x in found if found[x][0] > ULPS), key=lambda x: x != "error")
            if failed:
                place = f"{failed[0]} {(said | says).get(failed[0], '')}"
                more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
                print(f"{name}, {mode}: {place}: {found[failed[0]][1]}{more}")
            worst = max(worst, *((far, f"{name}, {mode}: {x}") for x, (far, _) in found.items()))
            for each in said.keys() & says.keys():
                if said[each] != says[each]:
                    kind = "message" if each == "error" else "path"
                    notes[f"another {kind}"].append(f"{name}: {said[each]} -> {says[each]}")
            if "error" in new:
                text = f"refused: {new['error']}: {says['error'][:100]}"
                notes[text].append(f"{name}, {mode}")
        is_far = worst[0] > ULPS
        outcomes["differ" if is_far else "are near" if worst[0] else "are equal"].append(name)
        near = near if is_far else max(near, worst)
    for text, examples in notes.items():
        print(f"{text}: {len(examples)}, such as {examples[0]}")
    if near[0]:
        print(f"farthest of rows that are near: {near[0]:.0f} ulp, {near[1]}")
    for outcome, names in outcomes.items():
        print(f"{len(names)} rows {outcome}" + f": {', '.join(names)}" * (outcome != "are equal"))
    return int("differ" in outcomes or "ended their process" in outcomes or not outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", help="another, or `.` for the working tree")
    parser.add_argument("--rows", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    return compare(results(options.before, options), results(options.after, options))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(pathlib.Path(sys.argv[2]), sys.argv[3:])
    else:
        raise SystemExit(main())
