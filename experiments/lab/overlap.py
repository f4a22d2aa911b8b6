"""What exchanges beside steps save on a slow link: Streaming DiLoCo in one program, and in two.

`python -m experiments.lab.overlap` starts one process per worker, each in a network namespace with
a shaped link and with two CPU devices. It needs root or unprivileged user namespaces, on Linux with
iproute2. All forms are measured in turn, and their ratios are of one round.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from experiments.lab import inputs
from experiments.lab.models import LOSSES
from experiments.lab.network import Link, Network, isolate
from experiments.lab.processes import Group
from experiments.lab.worker import Answer, timed
from jaxcomm import launch
from jaxcomm.synchronization import streaming_diloco
from jaxcomm.training import make_overlapped_step, second_mesh

CONTROL, ONE_PROGRAM, OVERLAPPED = FORMS = ("no_communication", "one_program", "overlapped")
WORKERS, FRAGMENTS = 2, 2


class Worker:
    """Times the steps of three forms: without exchanges, in one program, and beside the steps."""

    def __init__(self, model: str, period: int, overlap: int):
        """Joins the other workers and compiles nothing yet."""
        jax.config.update("jax_num_cpu_devices", 2)
        launch.initialize()
        count = jax.process_count()
        first = [jax.local_devices(process_index=process)[0] for process in range(count)]
        mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=first)
        inner, outer = optax.sgd(0.05), optax.sgd(0.7, momentum=0.9, nesterov=True)
        tx = streaming_diloco(
            inner, outer, period, fragments=FRAGMENTS, overlap=overlap, mixing_factor=0.5
        )
        alone, loss = jaxcomm.per_worker(inner), LOSSES[model]
        one_program = functools.partial(jaxcomm.make_step, loss, mesh=mesh, metrics="own")
        self._steps = {
            CONTROL: one_program(alone),
            ONE_PROGRAM: one_program(tx),
            OVERLAPPED: make_overlapped_step(loss, tx, mesh, second_mesh(mesh)),
        }
        own = inputs.load(model)
        self._batch = jax.make_array_from_process_local_data(
            NamedSharding(mesh, PartitionSpec("data")), own.batch(0, jax.process_index(), 0)
        )
        self._carry = {}
        for form in FORMS:
            params = jaxcomm.replicate(own.first_weights(0), mesh)
            self._carry[form] = params, jaxcomm.init(alone if form == CONTROL else tx, params, mesh)

    def measure(self, form: str, steps: int) -> Answer:
        """Times steps; one ends with its parameters, which an exchange under way does not delay."""
        params, state = jax.block_until_ready(self._carry.pop(form))

        def step(number):
            nonlocal params, state
            params, state, _ = self._steps[form](params, state, self._batch)
            jax.block_until_ready(params)
            return 0.0

        found = timed(step, steps, lambda: multihost_utils.sync_global_devices("steps"))
        self._carry[form] = params, state
        return found


def summary(milliseconds: Sequence[float], period: int, overlap: int) -> list[float]:
    """The mean and the median of the steps of whole periods, and what waits above the median.

    The last two numbers are of the steps that begin an exchange, and of those that apply one.

    Example:
      >>> summary([4.0, 1.0, 1.0, 2.0], period=4, overlap=3)
      [2.0, 1.5, 1.0, 0.0]
    """
    begins = [number * period // FRAGMENTS for number in range(FRAGMENTS)]
    applies = [(step + overlap) % period for step in begins]
    times = np.reshape(milliseconds, (-1, period))
    median = np.median(times)
    waits = [np.mean(times[:, steps] - median) for steps in (begins, applies)]
    return [float(each) for each in (np.mean(times), median, *waits)]


def main(
    rate: str = "200mbit",
    model: Literal["mlp", "transformer"] = "mlp",
    period: int = 32,
    overlap: int = 15,
    periods: int = 2,
    rounds: int = 3,
) -> None:
    """Measures, and prints a line per round and form.

    Args:
      rate: Bandwidth of each worker's link.
      model: What trains.
      period: Steps between two exchanges of a fragment.
      overlap: Steps between an exchange and the use of its result.
      periods: Periods of a measurement.
      rounds: Rounds, in which all forms are measured in turn.
    """
    isolate()
    network = Network(WORKERS)
    arguments = {"model": model, "period": period, "overlap": overlap}
    group = Group("overlap", WORKERS, arguments, threads=2)
    for form in FORMS:  # Compiles all programs; the next step begins an exchange.
        group.ask("measure", form=form, steps=2 * period - 1)
    network.shape(Link(rate))
    print("milliseconds; round form mean median begins applies MB/period", flush=True)
    for number in range(rounds):
        for form in FORMS:
            answers = group.ask("measure", form=form, steps=periods * period)
            slowest = np.max([answer["milliseconds"] for answer in answers], axis=0)
            found = summary(slowest.tolist(), period, overlap)
            megabytes = answers[0]["sent"] / 1e6 / periods
            print(number, form, *(f"{each:.1f}" for each in (*found, megabytes)), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
