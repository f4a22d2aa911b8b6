"""Asynchronous training on Ray."""

import contextlib
import importlib
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm._gradients import LossFn
from jaxcomm._require import AboveZero, Natural, Positive, checked, require_option
from jaxcomm.asynchronous._coordinator import replayed
from jaxcomm.asynchronous._islands import ReplayOfIslands
from jaxcomm.asynchronous._messages import Batches, Island, Job, Row
from jaxcomm.asynchronous._owner import Limits, Owner
from jaxcomm.asynchronous._replay import Replay
from jaxcomm.asynchronous._summary import Summary
from jaxcomm.launch._environment import memory_environment
from jaxcomm.synchronization.events import Policy

_SECONDS_TO_STOP = 60


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
      params: The parameters, as NumPy arrays.
      rows: What happened, in order: enough to replay the run.
      summary: What the rows add up to.
      is_done: False if the rows of a replay ended before the run.
    """

    params: PyTree
    rows: list[Row]
    summary: Summary
    is_done: bool


@checked
def train(
    loss_fn: LossFn,
    params: PyTree,
    batches: Batches,
    *,
    policy: Policy,
    workers: Positive,
    examples: Positive,
    batch_size: Positive,
    total: Positive | None = None,
    seconds: AboveZero | None = None,
    seed: Natural = 0,
    devices: Positive | None = None,
    has_key: bool = False,
    clip: AboveZero | None = None,
    start: Positive | None = None,
    patience: AboveZero = 10.0,
    directory: str | Path | None = None,
    checkpoint_seconds: AboveZero = 60.0,
    island: Island | None = None,
    worker_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
    on_row: Callable[[Row], None] | None = None,
    progress: bool = True,
    replay: Sequence[Row] | None = None,
) -> Trained:
    r"""Trains on processes that do not wait for each other, by a policy of events.

    .. math:: \text{worker } i: \; m_i, s_i = \mathrm{steps}(s_i, v_i), \qquad
              \text{owner}: \; S = \mathrm{finish}(S, m_i) \;\text{ in the order of arrivals}

    Each worker is an actor of Ray with its own JAX and its own devices; the owner of the parameters
    is another, beside this program. What travels are the policy's messages, such as payloads of its
    codec. Workers may be slow, die, hang, return, or join late. What a dead worker had not sent is
    lost, one gradient or one window of local steps: its memory is dropped, its examples are dealt
    again, and a new process takes its place. A message with something not finite is dropped, and so
    is one that is staler than the policy allows. Everything that is lost or dropped is in the rows.

    With :func:`jaxcomm.synchronization.events.asynchronous_pairs`, workers have the parameters and
    send them to each other; the owner deals examples, and collects the mean at the end. A worker
    that joins late begins at the parameters of another. While one hangs, those that wait for it
    wait until its deadline.

    Ray is used where the program is connected to it, or at the address in `RAY_ADDRESS`; otherwise
    a cluster on this machine is begun and ended. Ctrl+C and SIGTERM end a run, after a checkpoint.

    Args:
      loss_fn: `(params, batch) -> loss`, as for :func:`jaxcomm.make_step`.
      params: The first parameters.
      batches: `(numbers, worker) -> batch`, called by the workers with int32[batch_size], numbers
        of examples. It is sent to each worker, with what it refers to.
      policy: Such as :func:`jaxcomm.synchronization.events.parameter_server`,
        `stale_synchronous`, `backup_workers`, `decoupled_diloco`, `easgd`, `lag_wk`, `laq` or
        `asynchronous_pairs`. It has the optimizer and the codec. What is computed is what
        :func:`jaxcomm.synchronization.events.event_loop` simulates.
      workers: The number of workers.
      examples: How many examples there are. Each is dealt once in an epoch, in random order, to
        whoever is free. The owner draws the order of an epoch at once, with 4 bytes per example.
      batch_size: The examples of a gradient.
      total: The run ends when so many examples have been used.
      seconds: The run ends after this time. One of both must be given.
      seed: Of the order of examples, and of the keys of gradients.
      devices: The devices of a worker, over which its batch is split. By default, all that its
        process has. The gradient is the mean over them, by :func:`jaxcomm.make_step`.
      has_key: Whether the loss is `(params, batch, key) -> loss`.
      clip: If given, each gradient with a larger norm is scaled to this norm.
      start: The number of workers with which the run begins; by default, all.
      patience: A worker is taken for dead when it is silent for longer than `patience` times its
        slowest recent work, and the time that a new process takes to start.
      directory: Where the owner saves its state; a run goes on from the newest one. If the process
        of the owner dies, another begins there.
      checkpoint_seconds: The time between two checkpoints.
      island: If given, each worker is an :class:`Island` of processes near each other, and only
        pseudo-gradients and views of `policy` travel between islands and the owner. `total`,
        `examples` and `batch_size` are still those of single gradients.
      worker_options: Of the actors, such as `{"num_cpus": 4, "num_gpus": 1}`; by default one CPU.
        Or one for each worker or island, such as `[{"resources": {"east": 0.1}}, ...]`.
      environment: Variables of the workers' processes.
      on_row: Called with each row, soon after it has happened.
      progress: Whether to print the summary on stderr, as one changing line on a terminal.
      replay: Rows of a run, from its beginning. They then happen again in this process, without
        Ray. With the same arguments and as many devices, the parameters are the same, bit for bit
        on CPUs.

    Returns:
      A named tuple: the `params`, the `rows`, the `summary`, and `is_done`, which is false if rows
      of a replay ended early.

    Raises:
      ImportError: If Ray is missing or too old.
      ValueError: If a number is out of range, neither `total` nor `seconds` is given, or the policy
        abandons gradients, needs every worker to the end, or keeps nothing in a `directory`.
      FloatingPointError: If many messages in a row are not finite.
      RuntimeError: If all workers die again and again; if the owner dies and there is no
        `directory`; or if the object store is full; or if no worker has the parameters any more.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> from jaxcomm import asynchronous
      >>> from jaxcomm.synchronization import events
      >>> targets = np.float32([1.0, 2.0, 3.0, 6.0])
      >>> def loss(w, targets):
      ...     return jnp.mean((w - targets) ** 2)
      >>> rows = [asynchronous.Row("joined", 0.0, 0)]
      >>> rows += [asynchronous.Row("arrived", float(i), 0) for i in range(40)]
      >>> trained = asynchronous.train(
      ...     loss,
      ...     np.float32(0),
      ...     lambda numbers, worker: targets[numbers],
      ...     policy=events.parameter_server(optax.sgd(0.2)),
      ...     workers=1,
      ...     examples=4,
      ...     batch_size=4,
      ...     total=160,
      ...     devices=1,
      ...     replay=rows,  # without it, on processes of Ray
      ... )
      >>> print(trained.params.round(4), trained.summary.used)
      3.0 40

    References:
      Douillard et al., `Decoupled DiLoCo for Resilient Distributed Pre-training
      <https://arxiv.org/abs/2604.21428>`_, 2026, for what such runs are worth; each policy names
      its own paper.
    """
    if policy.restarts or (island is not None and island.policy.restarts):
        raise ValueError(
            "`policy` abandons gradients that are half finished, which a process cannot: use "
            "`in_flight='finish_late'`."
        )
    if policy.attend is None and policy.pairs is None:
        raise ValueError(
            "`policy` needs every worker to the end, and a process may die: simulate it with "
            "`jaxcomm.synchronization.events.event_loop`."
        )
    if island is not None and (policy.pairs is not None or island.policy.move is None):
        raise ValueError(
            "Both owners of `island` need the parameters: use `parameter_server`, "
            "`stale_synchronous`, `backup_workers`, `decoupled_diloco` or `easgd`."
        )
    if island is not None:
        require_option(island.workers, "island.workers", Positive)
        require_option(island.messages, "island.messages", Positive)
        if examples < workers:
            raise ValueError(f"`examples`={examples} are fewer than the {workers} islands.")
    start = workers if start is None else start
    if start > workers:
        raise ValueError(f"`start`={start} is more than `workers`={workers}.")
    given = loss_fn, batches, policy, workers, seed, batch_size, devices, has_key, clip
    job = Job(*given, examples, island)
    if total is None and seconds is None:
        raise ValueError("Pass `total` or `seconds`: when does the run end?")
    if policy.pairs is not None and directory is not None:
        raise ValueError("The workers of `policy` have the parameters: it keeps no `directory`.")
    limits = Limits(total or math.inf, seconds or math.inf, start, checkpoint_seconds)
    params = jax.tree.map(np.asarray, params)
    jax.eval_shape(lambda params: policy.init(params, workers), params)  # Raises its errors here.
    if island is not None:
        jax.eval_shape(lambda params: island.policy.init(params, island.workers), params)
    if replay is not None:
        if replay and replay[0].kind == "restored":
            raise ValueError(
                f"`replay` begins at a checkpoint: pass the first {replay[0].number} rows of the "
                "run that saved it, and these."
            )
        rows: list[Row] = []
        if policy.pairs is not None:
            model, rows, is_done = replayed(job, params, limits, replay)
        else:
            clock = Replay(job, replay) if island is None else ReplayOfIslands(job, replay)
            owner = Owner(job, params, limits, clock, on_row=rows.append)
            owner.run()
            model, is_done = owner.model, owner.is_done
        summary = Summary(workers)
        summary.add(rows)
        return Trained(model, rows, summary, is_done)
    from jaxcomm.asynchronous import _ray

    ray = _ray.require_ray()
    is_one = worker_options is None or isinstance(worker_options, Mapping)
    each_of: Any = [worker_options or {}] if is_one else worker_options
    variables = {**memory_environment(os.environ), **(environment or {})}
    in_them = {"runtime_env": {"env_vars": variables}} if variables else {}
    chosen = [{"num_cpus": 1, **in_them, **each} for each in each_of]
    processes = workers * (1 if island is None else island.workers)
    with _cluster(ray, processes * max(each["num_cpus"] for each in chosen)), _terminated():
        here = ray.get_runtime_context().get_node_id()
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        make = ray.remote(max_concurrency=4, num_cpus=0)(_ray.OwnerProcess).options(
            # Where `directory` is.
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        )
        of_owner = [ray.put(job)], chosen, patience
        run = _Run(ray, make, of_owner, Summary(workers), on_row, progress)
        return run.until_done((params, limits, None if directory is None else str(directory)))


@contextlib.contextmanager
def _cluster(ray: Any, cpus: float) -> Iterator[None]:
    """Ray's cluster: the one that the program is connected to, or another for this run."""
    if ray.is_initialized():
        yield
        return
    # Without an address, Ray would connect to any cluster on this machine, whoever began it.
    local = {"address": "local", "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus))}
    with warnings.catch_warnings():
        # JAX has threads, and Ray forks to start its processes, which do not use them.
        warnings.filterwarnings("ignore", ".*fork", RuntimeWarning)
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        ray.init(
            include_dashboard=False,
            logging_level="ERROR",
            **({} if "RAY_ADDRESS" in os.environ else local),
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the program as Ctrl+C does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    got: list[int] = []

    def end(number: int, frame: Any) -> None:
        got.append(number)
        raise KeyboardInterrupt  # Ray's calls pass on no other exception.

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if got:
            raise SystemExit(128 + got[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


class _Run:
    """A run, seen from the program that began it."""

    def __init__(
        self,
        ray: Any,
        make: Any,
        given: tuple[list[Any], list[dict[str, Any]], float],
        summary: Summary,
        on_row: Callable[[Row], None] | None,
        progress: bool,
    ) -> None:
        self._ray, self._make, self._given, self._on_row = ray, make, given, on_row
        self._rows: list[Row] = []
        self._summary, self._progress = summary, progress
        self._printed = 0.0
        self._is_first = True

    def until_done(self, given: tuple[PyTree, Limits, str | None]) -> Trained:
        """Runs owners, one after the other if they die."""
        errors = self._ray.exceptions
        while True:
            self._is_first = True
            owner = self._make.remote(*self._given)
            try:
                self._warn(owner)
                params, is_done = self._watch(owner, owner.run.remote(*given))
                self._print("\n")
                return Trained(params, self._rows, self._summary, is_done)
            except (errors.OutOfDiskError, errors.ObjectStoreFullError) as error:
                raise RuntimeError(
                    "Ray's object store and the disk that it spills to are full: begin Ray with "
                    "more `object_store_memory`, or use a codec."
                ) from error
            except errors.RayActorError as error:
                if given[2] is None:
                    raise RuntimeError(
                        "The process of the owner has died. If it has the parameters, pass "
                        "`directory`, so that they are saved."
                    ) from error
                if self._is_first:
                    raise RuntimeError("The process of the owner dies at once, again.") from error
            finally:
                self._ray.kill(owner)

    def _warn(self, owner: Any) -> None:
        if not self._ray.get(owner.is_authenticated.remote()):
            warnings.warn(
                "This Ray cluster has no token: whoever reaches its ports can run programs on it. "
                "See docs/clusters.md.",
                stacklevel=2,
            )

    def _watch(self, owner: Any, run: Any) -> tuple[PyTree, bool]:
        seen = 0
        try:
            while True:
                done, _ = self._ray.wait([run], timeout=0.2)
                new = self._ray.get(owner.rows.remote(seen))
                seen += len(new)
                self._add(new)
                if done:
                    return self._ray.get(run)
        except KeyboardInterrupt:
            with contextlib.suppress(self._ray.exceptions.RayError):
                owner.stop.remote()
                self._ray.wait([run], timeout=_SECONDS_TO_STOP)
            raise

    def _add(self, rows: list[Row]) -> None:
        if rows and self._is_first:
            rows = self._begin_again(rows)
        for row in rows:
            self._rows.append(row)
            self._summary.add([row])
            if self._on_row is not None:
                self._on_row(row)
        if time.monotonic() - self._printed > (0.2 if sys.stderr.isatty() else 10):
            self._print("" if sys.stderr.isatty() else "\n")

    def _begin_again(self, rows: list[Row]) -> list[Row]:
        """Drops what an owner does not know, and returns those of its first rows that are new."""
        self._is_first = False
        # The rows of a checkpoint may have that of an earlier restoration: the last is its own.
        place = max((i for i, row in enumerate(rows) if row.kind == "restored"), default=None)
        kept = 0 if place is None else rows[place].number
        undone = sum(row.outcome == "used" for row in self._rows[kept:]) + self._summary.undone
        del self._rows[kept:]
        self._summary = Summary(self._summary.workers, undone=undone)
        self._summary.add(self._rows)
        missing = kept - len(self._rows)
        # If it has fewer, an earlier program has the others, and `rows` begin at the checkpoint.
        return rows if place is None else rows[place - missing if place >= missing else place :]

    def _print(self, end: str) -> None:
        """Prints the summary, on a terminal in place of the last one, as wide as fits in a line."""
        self._printed = time.monotonic()
        text = str(self._summary)
        if sys.stderr.isatty():
            text = "\r\033[K" + (text if end else text[: shutil.get_terminal_size().columns - 1])
        if self._progress:
            print(text, end=end, file=sys.stderr, flush=True)
