"""Draws small changes of the library, and finds which of them the nearest tests notice.

    python tools/mutants.py [--count 60] [--seed 0] [--seconds 90] [--jobs 2] [--record FILE]
    python tools/mutants.py --list      # the changes, without a run

A change is one of an arithmetic operator, a comparison, a sign, a constant or an `axis`, the same
number of each kind. It is made in a copy of the last commit, never in the working tree. Its tests
are the quick ones of its file, the laws of a few methods that are made of it, and the quick tests
that name a function of it. A run ends with the first test that fails: the change is `killed`. If
all pass it `survived`; after the seconds it is a `timeout`, which counts as neither.
What the record holds is not run again.
"""

import argparse
import ast
import collections
import concurrent.futures
import functools
import json
import os
import pathlib
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("aggregation", "compression", "gossip", "synchronization")
OWN_TARGETS = ("aot", "browser", "gpu")  # Folders of tests that are not run.
KINDS = ("arithmetic", "comparison", "sign", "constant", "axis")
ROWS = 3  # Whose laws are run; a file may be used by a hundred.
NAMING = 4  # Files of tests that name something of a file.
# What has no method of its own is tried with these, by folder.
SHARED = {
    "gossip": ("dpsgd", "choco_sgd"),
    "synchronization": ("local_sgd", "diloco"),
    "": ("global_qsgd", "top_k_sgd", "two_stage_8_bits"),
}

# Of operators that several of these begin with, the longest is first.
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Pow: ("**", "*"),
    ast.Mult: ("*", "/"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.LtE: ("<=", "<"),
    ast.Lt: ("<", "<="),
    ast.GtE: (">=", ">"),
    ast.Gt: (">", ">="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}


class Change(NamedTuple):
    file: str
    kind: str
    line: int
    begin: int  # Bytes of the file that `after` replaces.
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.before!r} -> {self.after!r}"


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute: no annotations, decorators, messages and strings."""
    yield node
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def changes(file: str, source: bytes) -> Iterator[Change]:
    """All changes of a file."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def begin(node: Any) -> int:
        return starts[node.lineno - 1] + int(node.col_offset)

    def end(node: Any) -> int:
        return starts[node.end_lineno - 1] + int(node.end_col_offset)

    def change(kind: str, node: Any, first: int, last: int, after: str) -> Change:
        return Change(file, kind, node.lineno, first, last, source[first:last].decode(), after)

    def operator(kind: str, node: Any, left: Any, symbol: type, right: Any) -> Iterator[Change]:
        if symbol in OPERATORS:
            before, after = OPERATORS[symbol]
            first = source.index(before.encode(), end(left), begin(right))
            yield change(kind, node, first, first + len(before), after)

    for node in _code(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            yield from operator("arithmetic", node, node.left, type(node.op), node.right)
        if isinstance(node, ast.Compare):
            pairs = zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
            for left, symbol, right in pairs:
                yield from operator("comparison", node, left, type(symbol), right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield change("sign", node, begin(node), begin(node) + 1, "+")
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            more = value + 1 if isinstance(value, int) else 2 * value or 1.0
            yield change("constant", node, begin(node), end(node), repr(more))
        if isinstance(node, ast.keyword) and node.arg in ("axis", "axes"):
            number = source[begin(node.value) : end(node.value)].decode()
            if number.lstrip("-").isdigit():
                after = "0" if int(number) else "-1"
                yield change("axis", node.value, begin(node.value), end(node.value), after)


def library() -> list[pathlib.Path]:
    """The core, and the folders of methods."""
    package = ROOT / "jaxcomm"
    files = [
        *package.glob("*.py"),
        *(f for each in FOLDERS for f in (package / each).rglob("*.py")),
    ]
    return sorted(file for file in files if file.name != "__init__.py")


def draw(count: int, seed: int) -> list[Change]:
    """The same number of each kind, of all changes of that kind."""
    kinds = collections.defaultdict(list)
    for path in library():
        for change in changes(str(path.relative_to(ROOT)), path.read_bytes()):
            kinds[change.kind].append(change)
    chance = random.Random(seed)
    drawn = [chance.sample(kinds[kind], count // len(KINDS)) for kind in KINDS]
    return [change for of_kind in drawn for change in of_kind]


@functools.cache
def words_of_tests() -> dict[str, set[str]]:
    files = [*(ROOT / "tests").rglob("test_*.py")]
    words = {str(f.relative_to(ROOT)): {*re.findall(r"\w+", f.read_text())} for f in files}
    return {test: found for test, found in words.items() if test.split("/")[1] not in OWN_TARGETS}


def naming(file: str) -> list[str]:
    """Files of tests that name a function or class of a file; first those that name rare ones."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    body = ast.parse((ROOT / file).read_text()).body
    scores: collections.Counter[str] = collections.Counter()
    defined = [node.name for node in body if isinstance(node, kinds)]
    for name in [name for name in defined if "_" in name.strip("_")]:  # No word of English.
        users = [test for test, words in words_of_tests().items() if name in words]
        scores.update(dict.fromkeys(users, 1 / len(users)) if users else {})
    return [test for test, _ in scores.most_common(NAMING)]


def mirrored(file: str) -> list[str]:
    """The file of tests of the same name, or else the nearest folder."""
    path = pathlib.PurePath(file)
    folder = pathlib.PurePath("tests", *path.parts[1:-1])
    places = [folder / f"test_{path.stem.strip('_')}.py", folder, *folder.parents]
    found = next(place for place in places if (ROOT / place).exists())
    return [str(found)] if found.parts[1:] else []


def rows(file: str) -> list[str]:
    """Some methods that are made of what a file defines; or that all use, if it has no method."""
    from jaxcomm.catalogue import METHODS

    body = ast.parse((ROOT / file).read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    made_of = [name for name, method in METHODS.items() if method.words & names]
    return made_of[:ROWS] or list(SHARED.get(file.split("/")[1], SHARED[""]))


def run_tests(copy: pathlib.Path, file: str, seconds: float) -> tuple[str, str]:
    """The outcome, and the first test that failed."""
    own = mirrored(file)
    others = [test for test in naming(file) if test not in own]
    laws = ["tests/laws", "-k", " or ".join(rows(file))]
    quick = ["-m", "not slow"]
    runs = [[*quick, *own] if own else [], [*quick, *laws], [*quick, *others], laws]
    until = time.monotonic() + seconds
    for run in filter(None, runs):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", *run]
        process = subprocess.Popen(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=max(until - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout", ""
        if process.returncode not in (0, 5):
            failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return "killed", failed[0] if failed else printed[-500:]
    return "survived", ""


def make_copy(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    (ROOT / ".jax_cache").mkdir(exist_ok=True)
    (folder / ".jax_cache").symlink_to(ROOT / ".jax_cache")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=pathlib.Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--list", action="store_true", help="only print the changes")
    given = parser.parse_args()
    drawn = draw(given.count, given.seed)
    if given.list:
        print(*drawn, sep="\n")
        return 0
    given.record.parent.mkdir(parents=True, exist_ok=True)
    said = given.record.read_text().splitlines() if given.record.exists() else []
    outcomes = {line["change"]: line["outcome"] for line in map(json.loads, said)}
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, given.record.open("a") as record:
        copies: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
        for job in range(given.jobs):
            copies.put(make_copy(pathlib.Path(folder, str(job))))

        def try_one(change: Change) -> None:
            copy, begun = copies.get(), time.monotonic()
            path = copy / change.file
            source = path.read_bytes()
            changed = source[: change.begin] + change.after.encode() + source[change.end :]
            path.write_bytes(changed)
            outcome, test = run_tests(copy, change.file, given.seconds)
            path.write_bytes(source)
            copies.put(copy)
            outcomes[str(change)] = outcome
            took = round(time.monotonic() - begun)
            line = {"change": str(change), "outcome": outcome, "test": test, "seconds": took}
            record.write(json.dumps(line) + "\n")
            record.flush()
            print(f"{outcome:9}{took:4} s  {change}  {test}", flush=True)

        left = [change for change in drawn if str(change) not in outcomes]
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(try_one, left))
    counts = collections.Counter(outcomes[str(change)] for change in drawn)
    for change in drawn:
        if outcomes[str(change)] != "killed":
            print(f"{outcomes[str(change)]:9}{change}")
    decided = counts["killed"] + counts["survived"]
    print(f"{counts['killed']} of {decided} killed, {counts['timeout']} timeouts")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
