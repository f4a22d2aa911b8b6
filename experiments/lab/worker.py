"""What the worker processes of all frameworks share: commands, timed steps, and training.

`python -m experiments.lab.worker MODULE ARGUMENTS` reads commands from its standard input,
and answers each in one line.
"""

import importlib
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]  # Of a worker to a command, by name.

LEARNING_RATE = 1e-3  # Of steps that are timed.
MOMENTUM = 0.9  # The decay of Adam's first moment.
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def timed(step: Callable, steps: int, barrier: Callable) -> Answer:
    """The `milliseconds` and `losses` of steps, and the bytes that all of them `sent`.

    Args:
      step: Does the step of a number, waits for it, and returns its loss.
      steps: The number of steps.
      barrier: Waits for the other workers.
    """
    milliseconds, losses = [], []
    barrier()
    before = int(COUNTER.read_text())
    for number in range(steps):
        began = time.perf_counter()
        losses.append(step(number))
        milliseconds.append(1e3 * (time.perf_counter() - began))
    barrier()
    sent = int(COUNTER.read_text()) - before
    return {"milliseconds": milliseconds, "sent": sent, "losses": losses}


class BaseWorker:
    """Measures and trains. All workers make the same calls in the same order.

    A replica is a training: `step(batch)` does a step, waits for it and returns its loss, and
    `loss(rows)` evaluates.

    Attributes:
      inputs: What training starts from and reads.
      rank: The number of this worker, of `workers`.
      replica: `(method, learning_rate, seed, momentum)` -> a replica at the first weights of the
        seed; the last by default `MOMENTUM`.
      measured: `method` -> the replica whose steps are timed.
      batch: `(replica, seed, number)` -> a batch of this worker.
      batches: `(replica, count)` -> batches of steps that are timed.
      total: `value` -> the sum over workers; all of them wait for it.
    """

    def measure(self, method: str, warm_up: int, steps: int) -> Answer:
        """Times steps, after `warm_up` untimed ones, as other methods have run; see `timed`."""
        replica = self.measured(method)
        for batch in self.batches(replica, warm_up):
            replica.step(batch)
        batches = self.batches(replica, steps)
        return timed(lambda number: replica.step(batches[number]), steps, lambda: self.total(0))

    def train(
        self,
        method: str,
        learning_rate: float,
        steps: int,
        seed: int,
        evaluate_every: int,
        split: str = "held_out",
        until: float = -math.inf,
        momentum: float = MOMENTUM,
    ) -> Answer:
        """Trains; evaluates before the first step, then every `evaluate_every`, and at the end.

        Training ends early if an evaluated loss is at most `until`, or is not finite. Each worker
        evaluates its share of the rows `split`: `held_out` or `validation`.

        Returns:
          `losses` per step, and per evaluation `steps`, `evaluated` and `seconds`: the time of all
          steps before it, without that of evaluations.
        """
        replica = self.replica(method, learning_rate, seed, momentum)
        rows = getattr(self.inputs, split)
        own, seconds = rows[self.rank :: self.workers], 0.0
        curve = {name: [] for name in ("steps", "evaluated", "seconds", "losses")}
        for number in range(steps + 1):
            if number % evaluate_every == 0 or number == steps:
                loss = self.total(replica.loss(own) * len(own)) / len(rows)
                for name, value in (("steps", number), ("evaluated", loss), ("seconds", seconds)):
                    curve[name].append(value)
                if not until < loss < math.inf:
                    break
            if number < steps:
                began = time.perf_counter()
                curve["losses"].append(replica.step(self.batch(replica, seed, number)))
                seconds += time.perf_counter() - began
        return curve


def _read(commands: queue.Queue) -> None:
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)  # The process that started this one has ended; a collective may wait forever.


def main(module: str, arguments: str) -> None:
    """Answers commands, the methods of the module's `Worker`, until standard input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print must not be taken for answers.
    commands = queue.Queue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    worker = None
    while True:
        request = json.loads(commands.get())
        try:
            worker = worker or importlib.import_module(module).Worker(**json.loads(arguments))
            answer = getattr(worker, request["command"])(**request["arguments"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{request['command']}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
