"""Does random sequences with checkpoints, and compares with a run without them.

`python -m tests.checkpoint.stress SEED COUNT` does those of COUNT seeds from SEED on.
"""

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from jaxcomm.checkpoint import Checkpoints
from tests.cases import CASES
from tests.cases._gossip import GOSSIP
from tests.cases._local import LOCAL
from tests.checkpoint.sequences import KEEP, Event, History, Op, Sequence, sequence
from tests.checkpoint.trees import assert_equal

SHAPES = {"bias": (2,), "kernel": (6, 2)}


def given(loss_fn: Any, params: Any, batch: Any) -> Any:
    """The gradients are the batch."""
    del loss_fn, params
    return jnp.zeros((), jnp.float32), jax.tree.map(lambda x: x[0], batch)


def batch_of(event: Event) -> Any:
    """The gradients of a step, of one worker perhaps NaN."""
    random = np.random.default_rng([event.number, event.workers])
    batch = {k: np.float32(random.normal(size=(event.workers, *s))) for k, s in SHAPES.items()}
    if event.spoiled >= 0:
        batch["kernel"][event.spoiled, 1, 1] = np.nan
    return batch


class Method:
    """A row of a table of cases for a number of workers, and its compiled step."""

    def __init__(self, family: str, name: str, workers: int, on_mesh: bool) -> None:
        inner = optax.sgd(0.1, momentum=0.5)
        self.own = family != "aggregator"
        if family == "aggregator":
            made = {case.name: case for case in CASES}[name].make()
            self.tx: Any = jaxcomm.skip_nonfinite(optax.chain(made, inner))
        elif family == "gossip":
            made = {case.name: case for case in GOSSIP}[name].make(workers)
            self.tx = optax.chain(jaxcomm.per_worker(inner), made)
        else:
            self.tx = {case.name: case for case in LOCAL}[name].make(inner)
        self.where: Any = workers
        make: Any = jaxcomm.simulate
        if on_mesh:
            auto = (jax.sharding.AxisType.Auto,)
            devices = jax.devices()[:workers]
            self.where = jax.make_mesh((workers,), ("data",), axis_types=auto, devices=devices)
            make = jaxcomm.make_step
        loss = lambda params, batch: jnp.zeros(())  # noqa: E731
        self._step = make(loss, self.tx, self.where, gradients=given, donate=False)

    def start(self) -> dict[str, Any]:
        """The state of a new run."""
        params: Any = {k: jnp.ones(s) for k, s in SHAPES.items()}
        params = jaxcomm.replicate(params, self.where) if self.own else params
        return {"params": params, "opt_state": jaxcomm.init(self.tx, params, self.where)}

    def step(self, state: dict[str, Any], event: Event) -> dict[str, Any]:
        params, opt_state, _ = self._step(state["params"], state["opt_state"], batch_of(event))
        return {"params": params, "opt_state": opt_state}

    def resize(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state for the workers of this method."""
        opt_state, params = jaxcomm.resize_workers(
            self.tx, state["opt_state"], state["params"], self.where
        )
        return {"params": params, "opt_state": opt_state}


@functools.lru_cache(maxsize=32)
def method(family: str, name: str, workers: int, on_mesh: bool) -> Method:
    """One object, so that sequences share compiled steps."""
    return Method(family, name, workers, on_mesh)


class Program:
    """Does a sequence; `restart` stands for a new process."""

    def __init__(self, of: Sequence, directory: Path, workers: int) -> None:
        self.of, self.directory, self.workers = of, directory, workers
        self.oracle: dict[History, Any] = {}
        self.checkpoints = Checkpoints(directory, keep=KEEP)
        self.state = self.method().start()

    def method(self, workers: int | None = None) -> Method:
        return method(self.of.family, self.of.name, workers or self.workers, self.of.on_mesh)

    def expected(self, history: History) -> Any:
        """The state of a run that has done only this, without interruption."""
        if not history:
            return self.method().start()
        if history not in self.oracle:
            *before, event = history
            it = self.method(event.workers)
            old = self.expected(tuple(before)) if before else it.start()
            new = it.step(old, event) if event.kind == "step" else it.resize(old)
            self.oracle[history] = new
        return self.oracle[history]

    def restart(self, workers: int) -> None:
        self.checkpoints.close()
        self.workers = workers
        self.checkpoints = Checkpoints(self.directory, keep=KEEP)
        self.state = self.method().start()

    def restore(self, op: Op) -> None:
        it = self.method()
        restored = self.checkpoints.restore(it.start(), tx=it.tx, workers=it.where)
        assert restored.step == op.steps[-1], (restored.step, op.steps)
        assert restored.position == {"sample": restored.step}
        self.state = restored.state

    def do(self, op: Op) -> None:
        """Does one operation, and checks what it must come to."""
        if op.kind == "step":
            self.state = self.method().step(self.state, op.history[-1])
        elif op.kind == "save":
            done = op.steps[-1]
            self.checkpoints.save(done, self.state, position={"sample": done})
        elif op.kind == "kill":
            self.restart(op.workers)
        elif op.kind == "restore":
            self.restore(op)
        else:
            self.workers = op.workers
            self.state = self.method().resize(self.state)
        if op.kind in ("restore", "kill") or op is self.of.ops[-1]:
            self.checkpoints.wait()
            assert self.checkpoints.steps == op.steps, (self.checkpoints.steps, op.steps)
            assert_equal(self.state, self.expected(op.history))
        if self.of.family == "aggregator":
            skipped = sum(event.spoiled >= 0 for event in op.history)
            assert int(np.max(self.state["opt_state"].skipped_steps)) == skipped


def explain(of: Sequence, done: list[str], error: Exception) -> AssertionError:
    """Names what is needed to do the sequence again."""
    return AssertionError(
        f"seed {of.seed}, {of.family} {of.name}, after {done}: {error!r}. Do it again: "
        f"python -m tests.checkpoint.stress {of.seed} 1"
    )


def run(of: Sequence) -> None:
    """Does a sequence in this process.

    Raises:
      AssertionError: If a state is not that of the oracle.
    """
    with jax.numpy_dtype_promotion("standard"), tempfile.TemporaryDirectory() as directory:
        program = Program(of, Path(directory), of.workers)
        done = []
        try:
            for op in of.ops:
                done.append(op.kind)
                program.do(op)
        except Exception as error:
            raise explain(of, done, error) from error
        finally:
            program.checkpoints.close()


def main(first: int, count: int) -> None:
    """Prints a line of JSON per sequence; goes on after a failure, and ends with 1 then."""
    failed = 0
    for seed in range(first, first + count):
        of, error = sequence(seed), None
        try:
            run(of)
        except AssertionError as found:
            error, failed = str(found), failed + 1
        line = {"seed": seed, "method": of.name, "ops": len(of.ops), "failed": error}
        print(json.dumps(line), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
