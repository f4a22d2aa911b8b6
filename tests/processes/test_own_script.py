"""The script of docs/tutorials/machines.md runs as printed, launched and by three variables."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.processes.running import ROOT, finish, free_address, start
from tests.programs import program

pytestmark = pytest.mark.xdist_group("processes")

JOIN = "from jaxcomm import launch\nlaunch.initialize()\nimport jax\n"


def recipe() -> str:
    """Both blocks of Python of its first step."""
    text = (ROOT / "docs" / "tutorials" / "machines.md").read_text(encoding="utf-8")
    first, second = program("run_readme").python_blocks(text.partition("## Step 2")[0])
    return first.code + second.code


def begin(folder: Path, code: str, *options: str, **environment: str) -> "subprocess.Popen[str]":
    """Runs the code as a script."""
    (folder / "script.py").write_text(code, encoding="utf-8")
    return start(*options, folder / "script.py", folder=folder, **environment)


def check(stdout: str, prefix: str = "") -> None:
    """The first process prints what the page shows."""
    assert f"{prefix}process 0 of 2\n" in stdout and f"{prefix}loss 0.18\n" in stdout


LAUNCH = ["-m", "jaxcomm.launch", "--processes", "2", "--"]


def test_the_recipe_is_launched(tmp_path: Path) -> None:
    code, stdout, stderr = finish(begin(tmp_path, recipe(), *LAUNCH))
    assert (code, stderr) == (0, "")
    check(stdout, "[0] ")


MODEL_STATE = """
import jax.numpy as jnp, numpy as np, optax, jaxcomm
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = np.float32([[jax.process_index()], [2]])
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), rows)
tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
loss = lambda w, s, b: (w * jnp.mean(b), {"m": jnp.mean(b), "k": jax.random.split(s["k"])[0]})
step = jaxcomm.make_step(loss, tx, mesh, has_model_state=True, donate=False)
state = {"m": np.float32(0), "k": jax.random.key(3)}
for each in (state, jaxcomm.replicate(state, mesh)):
    _, new, _, _ = step(jnp.float32(0), each, jaxcomm.init(tx, jnp.float32(0), mesh), rows)
    key, mean = (x.addressable_data(0).reshape(()) for x in jax.tree.leaves(new))
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.split(state["k"])[0])).all()
    assert mean == (1.25 if each is state else 1 + jax.process_index() / 2)
"""


@pytest.mark.slow
def test_model_state_of_two_processes(tmp_path: Path) -> None:
    code, _, stderr = finish(begin(tmp_path, JOIN + MODEL_STATE, *LAUNCH))
    assert (code, stderr) == (0, "")


@pytest.mark.slow
def test_the_recipe_joins_by_three_variables(tmp_path: Path) -> None:
    settings = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    both = [begin(tmp_path, recipe(), JAX_PROCESS_ID=str(i), **settings) for i in range(2)]
    ended = [finish(process) for process in both]
    assert [code for code, *_ in ended] == [0, 0], ended
    check(ended[0][1])


@pytest.mark.slow
def test_an_exception_of_one_ends_all_at_once(tmp_path: Path) -> None:
    raises = f"{JOIN}if jax.process_index() == 1:\n    raise KeyError('mine')\n"
    started = time.monotonic()
    process = begin(tmp_path, raises + "import time\ntime.sleep(1000)\n", *LAUNCH)
    code, _, stderr = finish(process)
    assert code == 1 and time.monotonic() - started < 60
    assert "[1] KeyError: 'mine'" in stderr
    assert stderr.splitlines()[-1] == (
        "jaxcomm.launch: error: process 1 of 2 has ended with exit code 1; the others were stopped."
    )
