"""Links and codecs that are measured."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import perf
from jaxcomm.perf._calibrate import codec_seconds, fit, prepared
from jaxcomm.perf._link import PRIMITIVES

MESSAGES, SENT = [6.0, 6.0, 6.0, 6.0], [1e3, 1e5, 1e6, 4e6]


def test_the_fit_recovers_both_parts_under_noise() -> None:
    seconds = np.array([2e-5 * m + b / 3e8 for m, b in zip(MESSAGES, SENT, strict=True)])
    assert fit(MESSAGES, SENT, [*seconds]) == pytest.approx((3e8, 2e-5))
    for seed in range(5):
        noise = np.random.default_rng(seed).uniform(0.9, 1.1, 4)
        assert fit(MESSAGES, SENT, [*seconds * noise]) == pytest.approx((3e8, 2e-5), rel=0.25)


@pytest.mark.parametrize(
    "seconds",
    [[1e-3, 1e-3, 1e-3, 1e-3], [1e-6, 1e-3, 2e-2, 9e-2], [4e-3, 3e-3, 2e-3, 1e-3], [0.0] * 4],
)
def test_the_fit_has_no_negative_part(seconds: list[float]) -> None:
    bytes_per_second, latency = fit(MESSAGES, SENT, seconds)
    assert latency >= 0 and 0 < bytes_per_second < math.inf


@pytest.mark.slow
def test_the_links_of_a_mesh_of_two_axes() -> None:
    mesh = jax.make_mesh((2, 4, 1), ("slow", "fast", "alone"))
    measured = perf.calibrate(mesh, methods={}, repeats=1)
    assert set(measured.links) == {"slow", "fast"} and measured.codecs == {}
    assert all(set(each) == set(PRIMITIVES) for each in measured.links.values())
    assert measured.jax_version == jax.__version__ and measured.device


def test_a_named_method_is_timed() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    measured = perf.calibrate(mesh, methods={"mine": jaxcomm.mean()}, repeats=1)
    assert measured.links == {} and 0 <= measured.codecs["mine"] < 1e-5
    given = {"w": jax.numpy.ones((8, 8)), "b": jax.numpy.ones(8)}
    timed = codec_seconds({"mean": jaxcomm.mean()}, jax.devices()[0], "data", 1, given)
    assert timed["mean"] >= 0


def test_an_update_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compilation would be timed, and on a GPU it takes seconds."""
    tx, traced = jaxcomm.power_sgd(rank=1), []

    def update(*args: Any, **extra_args: Any) -> Any:
        traced.append(args)
        return tx.update(*args, **extra_args)

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    counted = optax.GradientTransformationExtraArgs(tx.init, update)
    once = prepared(counted, mesh, {"w": jax.numpy.ones((8, 8))})
    for _ in range(3):
        once()
    assert len(traced) == 1


PROGRAM = """
import sys
import jax
from jaxcomm import launch, perf
launch.initialize()
import jaxcomm
mesh = jax.make_mesh((jax.device_count(),), ("data",))
tx = {"qsgd": jaxcomm.global_qsgd()}
perf.calibrate(mesh, methods=tx, repeats=2).save(f"{sys.argv[1]}/{jax.process_index()}.json")
"""


@pytest.mark.slow
def test_all_processes_have_the_same_calibration(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "jaxcomm.launch", "--processes", "2", "--"]
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxcomm.__file__).parents[1])}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    ran = subprocess.run(
        [*command, str(program), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    first, second = ((tmp_path / f"{i}.json").read_text() for i in range(2))
    assert first == second
    assert set(perf.read_calibration(tmp_path / "0.json").links["data"]) == set(PRIMITIVES)
