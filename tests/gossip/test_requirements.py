"""Without its libraries the package is there, and what needs one says what to install."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcomm

# Everything that needs a library, in a process that has none of them.
PROGRAM = """
import json, sys

for name in ("networkx", "cvxpy"):
    sys.modules[name] = None  # An import of it is a ModuleNotFoundError.
import jax
import numpy as np
import optax
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import gossip, synchronization

pair = np.full((2, 2), 0.5)
gossip.randomized([pair]), gossip.cyclic([pair]), gossip.lazy_mixing(pair)
gossip.sgp(pair), gossip.d2(pair)
synchronization.neighbor_barrier(pair)
mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(np.ones((1, 1))))
params = jaxcomm.replicate({"w": np.ones(4, np.float32)}, mesh)
step = jaxcomm.make_step(lambda p, b: (b @ p["w"]).mean() ** 2, tx, mesh)
step(params, jaxcomm.init(tx, params, mesh), np.ones((2, 4), np.float32))

said = {}
for name, call in {
    "ring": lambda: gossip.ring(4),
    "one_peer_exponential": lambda: gossip.one_peer_exponential(4),
    "ad_psgd": lambda: gossip.ad_psgd([[(0, 1)]]),
    "matcha_plan": lambda: gossip.matcha_plan([[(0, 1)]], 0.5),
}.items():
    try:
        call()
    except ImportError as error:
        said[name] = str(error)
del sys.modules["networkx"]
try:
    gossip.matcha_plan(gossip.ring(4), 0.5)
except ImportError as error:
    said["matcha_plan(graph)"] = str(error)
try:
    gossip.dpsgd("ring")
except ValueError as error:
    said["no graph"] = str(error)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_missing_packages_are_named() -> None:
    root = str(Path(jaxcomm.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout)
    install = '`pip install "jaxcomm[gossip]"`.'
    needs = f"`jaxcomm.gossip` needs networkx: {install}"
    graphs = ("ring", "one_peer_exponential", "ad_psgd", "matcha_plan")
    assert said == {
        **dict.fromkeys(graphs, needs),
        "matcha_plan(graph)": f"`jaxcomm.gossip` needs cvxpy: {install}",
        "no graph": said["no graph"],
    }
    assert said["no graph"].startswith("A mixing must be a networkx graph, a matrix")
