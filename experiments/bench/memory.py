"""The peak memory of a step of one worker, beside parameters, gradients and state.

`python -m experiments.bench.memory NAME WIDTH` runs a step and prints its resident memory.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.bench.methods import TIMED
from experiments.bench.programs import compile_step, lower_step, transformer
from experiments.training.train import make_mesh

FAMILIES = {
    "no codec": "mean",
    "codes that are added": "global_qsgd_8_bits",
    "codes that are merged": "global_qsgd_exponential",
    "codes that are gathered": "qsgd",
    "two stages, blocks of 4 bits": "two_stage_4_bits",
    "votes": "signum",
    "signs with feedback": "ef_sign_sgd",
    "ternary": "terngrad",
    "powers of two": "natural_compression",
    "a rotation": "rotated",
    "largest coordinates with feedback": "top_k_sgd",
    "means of those": "stc",
    "drawn coordinates with feedback": "random_k_feedback",
    "coordinates by their variance": "variance_based",
    "a sketch of the union": "s2_reducer_peel",
    "recursive doubling": "sparcml",
    "a sketch that finds the largest": "fetch_sgd",
    "stages by turns": "warmup",
    "largest coordinates, merged": "gtop_k",
    "momentum correction": "deep_gradient_compression",
    "shifts of a biased codec": "ef21",
    "shifts of an unbiased codec": "diana",
}
"""A row per family; methods that mix parameters need more than one worker."""

MEASURED = ("mean", "global_qsgd_8_bits", "top_k_sgd")
STATUS = Path("/proc/self/status")


class Memory(NamedTuple):
    """Bytes of one worker: of parameters, gradients and state, and the peak beside those."""

    arguments: int
    peak: int


def with_sgd(name: str) -> optax.GradientTransformation:
    """The aggregator of a row, followed by an optimizer without state."""
    return optax.chain(TIMED[name].build(), optax.sgd(0.1))


def compiled_memory(name: str, params: Any) -> Memory:
    """The memory of the compiled program on one device, which is not run."""
    program = compile_step(with_sgd(name), params, make_mesh(1))
    return Memory(program.arguments, program.peak)


def _status(field: str) -> int:
    """The bytes of a field such as `VmRSS`."""
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def measure_resident(name: str, params: Any) -> int:
    """The peak of the resident bytes of this process in a step, minus those before it."""
    lowered, arguments = lower_step(with_sgd(name), params, make_mesh(1), per_worker=False)
    compiled = lowered.compile()
    fill = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), arguments),
        out_shardings=jax.tree.map(lambda x: x.sharding, arguments),
    )
    filled = jax.block_until_ready(fill())
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = _status("VmRSS")
    jax.block_until_ready(compiled(*filled))
    return _status("VmHWM") - before


def resident_in_subprocess(name: str, width: int) -> float:
    """`measure_resident` in a subprocess; NaN if the system does not report resident memory."""
    if not STATUS.exists():
        return math.nan
    command = [sys.executable, "-m", __name__, name, str(width)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


if __name__ == "__main__":
    print(measure_resident(sys.argv[1], transformer(int(sys.argv[2]))))
