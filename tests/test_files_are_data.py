"""Files are read, never executed: no function that runs what it reads, and no shell."""

import ast
import pathlib
from collections.abc import Iterator

from tests.imports import imported

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted(
    path
    for package in ("jaxcomm", "pallas_kernels", "experiments")
    for path in (ROOT / package).rglob("*.py")
)

RUNS_WHAT_IT_READS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle"}
RUNS_WHAT_IT_READS |= {"marshal", "shelve", "code", "codeop", "pdb"}
# Nothing reads archives, so no member can leave its folder. What does must bring its own rule.
READS_ARCHIVES = {"tarfile", "zipfile"}
MODULES = RUNS_WHAT_IT_READS | READS_ARCHIVES
BUILTINS = {"eval", "exec", "compile", "__import__"}
# By their last two names; the first may be an alias of the module.
ATTRIBUTES = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
ATTRIBUTES |= {"asyncio.create_subprocess_shell", "shutil.unpack_archive", "torch.load"}
ATTRIBUTES |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}
ATTRIBUTES |= {"serialize_executable.deserialize_and_load"}  # Which unpickles.
NUMPY = {"np", "numpy", "jnp", "onp"}
METHODS = {"extractall", "unpack_archive", "read_pickle"}

EXCEPTIONS: dict[str, str] = {}
"""Findings that stay, as `path: finding`, and why."""


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute, or an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _is_false(call: ast.Call, name: str) -> bool | None:
    """Whether a keyword is the constant False; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    return None


def _of_call(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Name) and call.func.id in BUILTINS:
        yield f"{call.func.id}("
    name = _dotted(call.func)
    head, _, last = name.rpartition(".")
    if ".".join(name.split(".")[-2:]) in ATTRIBUTES:
        yield f"{name}("
    if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
        yield f".{call.func.attr}("
    if head in NUMPY and last == "load" and not _is_false(call, "allow_pickle"):
        yield f"{name} without allow_pickle=False"
    for option in ("allow_pickle", "shell"):
        if _is_false(call, option) is False:
            yield f"{option}="


def findings(source: str) -> set[str]:
    """What a module uses that runs what it reads."""
    found = set()
    for name in imported(source):
        first, *_ = parts = name.split(".")
        if first in MODULES or ".".join(parts[-2:]) in ATTRIBUTES:
            found.add(f"import {name}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found |= {*_of_call(node)}
    return found


def test_no_file_is_executed_and_every_exception_is_needed() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {each}"
        for path in SOURCES
        for each in findings(path.read_text(encoding="utf-8"))
    }
    assert found == EXCEPTIONS.keys() and all(EXCEPTIONS.values())


def test_the_rule_detects_a_violation() -> None:
    for source in (
        "import pickle as p", "from marshal import loads", "import zipfile",
        "from torch import load", "eval(text)", "np.load(path)",
        "np.load(path, allow_pickle=chosen)", "jax.numpy.save(path, x, allow_pickle=True)",
        "opened().extractall(folder)", "yaml.load(text)", "os.system(command)",
        "subprocess.run(command, shell=True)",
    ):  # fmt: skip
        assert findings(source), source


def test_the_rule_allows_what_is_data() -> None:
    for source in (
        "model.eval()", "jitted.lower(x).compile()", "np.load(path, allow_pickle=False)",
        "json.load(file)", "subprocess.run(command, shell=False)", "studies.load(name)",
    ):  # fmt: skip
        assert findings(source) == set(), source
