"""One worker process: reads commands from its standard input, and answers each in one line."""

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

WORKERS = {
    "jax": "jax_worker.JaxWorker",
    "overlap": "overlap_worker.OverlapWorker",
    "torch": "torch_worker.TorchWorker",
}
COUNTERS = Path("/sys/class/net/eth0/statistics")


def bytes_sent() -> int | None:
    """The bytes that the worker's link has sent; None without a link."""
    counter = COUNTERS / "tx_bytes"
    return int(counter.read_text()) if counter.exists() else None


def _read(commands: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)  # The process that started this one has ended; a collective may wait forever.


def main(framework: str, arguments: str) -> None:
    """Answers commands until the standard input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print must not be taken for answers.
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    module, name = WORKERS[framework].split(".")
    worker: Any = None
    while True:
        request = json.loads(commands.get())
        try:
            if worker is None:
                loaded = importlib.import_module(f"experiments.lab.{module}")
                worker = getattr(loaded, name)(**json.loads(arguments))
            answer = getattr(worker, request["command"])(**request["arguments"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{request['command']}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
