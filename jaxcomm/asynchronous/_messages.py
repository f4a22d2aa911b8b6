"""What the owner and its workers send each other, and what a run records."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm._gradients import LossFn
from jaxcomm.synchronization.events import Policy

Batches = Callable[[np.ndarray, int], PyTree]
Outcome = Literal["used", "stale", "nonfinite"]


class Island(NamedTuple):
    r"""Workers near each other with an owner of their own: one worker of the whole.

    .. math:: y \gets x + \text{the effect of } K \text{ messages}, \qquad g = x - y

    The island begins at the parameters :math:`x` that the policy of the whole gives a worker, and
    its pseudo-gradient :math:`g` is the gradient of that policy. Its workers go on with theirs
    meanwhile. Of n islands, island i has the examples :math:`i, i + n, \dots`, and worker j of it
    is worker :math:`i m + j` for `batches`.

    Attributes:
      policy: Of the island, with a codec of its own.
      workers: m, the workers of each island.
      messages: K, at least 1; those that its policy drops count.

    Example:
      >>> import optax
      >>> from jaxcomm import asynchronous
      >>> from jaxcomm.synchronization import events
      >>> steps = events.decoupled_diloco(optax.sgd(0.1), optax.sgd(1.0), period=8, quorum=1)
      >>> island = asynchronous.Island(steps, workers=4, messages=16)

    References:
      Kim et al., `HALoS: Hierarchical Asynchronous Local SGD over Slow Networks
      <https://arxiv.org/abs/2506.04531>`_, 2025: local steps as here on islands, and a
      :func:`jaxcomm.synchronization.events.parameter_server` with momentum above them.

    Differs from the paper: it mixes the parameters of the whole into those of an island with a
    weight; here they replace them. An island applies no messages while its own travels.
    """

    policy: Policy
    workers: int
    messages: int


class Job(NamedTuple):
    """What every worker is given once."""

    loss_fn: LossFn
    batches: Batches
    policy: Policy
    workers: int
    seed: int
    batch_size: int  # of a gradient
    devices: int | None  # of a worker; None for all that its process has
    has_key: bool
    clip: float | None
    examples: int  # of the data set
    island: Island | None = None  # what each worker is, if not one


class Order(NamedTuple):
    """What a worker is to compute."""

    number: int  # of the first gradient
    examples: np.ndarray  # int32[gradients, batch]
    params: PyTree = None  # where it joins
    reply: PyTree = None  # of the owner to its last message
    view: PyTree = None
    life: int = 0  # how often the worker had joined before
    is_late: bool = False  # whether the run has begun


class Version(NamedTuple):
    """The parameters that a worker without an owner has had."""

    worker: int
    life: int
    age: int  # how often they have changed in this life


class Change(NamedTuple):
    """How the parameters of a worker without an owner have changed."""

    after: Version
    other: Version | None  # with which it averaged, or as which it began
    number: int  # of its gradient; -1 if it was that of the other, or if it only read them again


class Report(NamedTuple):
    """What a worker has computed."""

    message: PyTree  # None if it was not finite
    loss: float = float("nan")  # the mean over its gradients
    seconds: float = 0.0  # that it computed
    heard: tuple[tuple[int, int], ...] = ()  # `(number of the gradient, version of the view)`
    upload_bytes: int = 0
    download_bytes: int = 0  # from others than the owner
    staleness: int = -1  # by changes of others, if not by messages to the owner
    changes: tuple[Change, ...] = ()
    examples: int = -1  # if the owner has not dealt them
    rows: tuple["Row", ...] = ()  # of an island


class Happening(NamedTuple):
    """What a clock returns to the owner."""

    kind: Literal["joined", "left", "arrived", "time", "restored", "collected", "stopped"]
    seconds: np.float32
    worker: int = -1
    report: Report | None = None
    reason: str = ""  # for which a worker has left


class Row(NamedTuple):
    """A happening as a run records it.

    A run is determined by its rows, so that they can be replayed.
    """

    kind: Literal["joined", "left", "arrived", "time", "restored", "collected"]
    seconds: float  # since the beginning
    worker: int = -1
    number: int = 0  # of the first gradient of the work; if restored, of the rows before
    staleness: int = 0  # the messages of others since the worker was sent what it computed at
    outcome: Outcome | Literal["lost", ""] = ""
    loss: float = float("nan")
    examples: int = 0
    work_seconds: float = 0.0
    upload_bytes: int = 0
    download_bytes: int = 0  # since the row before of this worker
    heard: tuple[tuple[int, int], ...] = ()
    reason: str = ""
    changes: tuple[Change, ...] = ()  # of workers without an owner
    inner: tuple["Row", ...] = ()  # of an island, since the row before of this worker


def row_of(values: Sequence[Any]) -> Row:
    """The row that JSON has held."""
    row = Row(*values)
    heard = tuple((number, version) for number, version in row.heard)
    # Runs without an owner, whose rows have changes, are not saved.
    return row._replace(heard=heard, changes=(), inner=tuple(map(row_of, row.inner)))


class Clock(Protocol):
    """Returns to the owner what happens next; the workers are on its other side."""

    def seconds(self) -> float:
        """The time since the beginning."""

    def resume(self, seconds: float) -> None:
        """Sets the time."""

    def start(self, worker: int) -> None:
        """Starts a worker, which will join."""

    def begin(self, worker: int, order: Order) -> None:
        """Lets a worker compute."""

    def hear(self, worker: int, version: int, view: PyTree) -> None:
        """Sends a worker a view between its gradients."""

    def next(self, due: float) -> Happening:
        """Waits for what happens next, or for the time `due` in seconds."""


def hosted(tree: PyTree) -> Any:
    """The same arrays as NumPy's, without a copy on CPUs."""
    return jax.tree.map(np.asarray, tree)
