"""The predicted seconds of a step, from what its traced program sends."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcomm import wire
from jaxcomm._contract import AxisName, Claims, PerWorker, PyTree
from jaxcomm._gradients import local_value_and_grad
from jaxcomm._require import require_transformation
from jaxcomm._workers import init, worker_axes
from jaxcomm.perf._link import Calibration, Device, Link, to_device
from jaxcomm.perf._recommended import UNKNOWN, ErrorModel, error_of
from jaxcomm.scheduling._times import require_number
from jaxcomm.training._simulate import simulate
from jaxcomm.wire._account import Account
from jaxcomm.wire._collective import Collective

BACKWARD = 2 / 3
"""The part of the computation that is the backward pass, which has two products for each one."""

BUCKET_BYTES = 25 * 2**20
"""The gradients that are left when the backward pass ends; the default bucket of PyTorch."""

EFFICIENCY = 0.25
"""The share of the memory's bandwidth that a codec is assumed to reach."""

LinkLike: TypeAlias = Link | str | Calibration | Mapping[str, Link | str]
"""One link for all axes, links by axis, or a calibration."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of one step.

    Attributes:
      compute_seconds: Forward and backward pass and optimizer, as given.
      codec_seconds: Encoding and decoding.
      network_seconds: All messages, one after another.
      overlapped: The least seconds of the step if messages overlap with the backward pass.
      bytes_per_worker: The bytes that one worker sends.
      messages: The sequential messages of one worker.
      state_bytes: The memory of a transformation's state on one worker; 0 for other programs.
      error: What the method's error is known to cost in steps.
    """

    compute_seconds: float
    codec_seconds: float
    network_seconds: float
    overlapped: float
    bytes_per_worker: float
    messages: int
    state_bytes: float
    error: ErrorModel

    @property
    def seconds(self) -> float:
        """The seconds of the step without overlap: the sum of the parts."""
        return self.compute_seconds + self.codec_seconds + self.network_seconds

    def of_local_steps(self, period: int, coordinates: int) -> "Prediction":
        """The average step, if this is one in `period` that exchanges displacements.

        An exchange overlaps with nothing, and workers keep the parameters of the last one.
        """
        own = dataclasses.replace(
            self,
            codec_seconds=self.codec_seconds / period,
            network_seconds=self.network_seconds / period,
            bytes_per_worker=self.bytes_per_worker / period,
            state_bytes=self.state_bytes + 4 * coordinates,
        )
        return dataclasses.replace(own, overlapped=own.seconds)

    def __str__(self) -> str:
        return (
            f"{1e3 * self.seconds:,.1f} ms per step = {1e3 * self.compute_seconds:,.1f} compute + "
            f"{1e3 * self.codec_seconds:,.1f} codec + {1e3 * self.network_seconds:,.1f} network; "
            f"{1e3 * self.overlapped:,.1f} ms if the network overlaps; "
            f"{self.bytes_per_worker:,.0f} bytes in {self.messages} messages; {self.error}"
        )


def overlapped_seconds(
    compute: float, codec: float, network: float, gradient_bytes: float
) -> float:
    r"""Returns the seconds of a step whose messages overlap with its backward pass.

    .. math:: T = T_\text{forward} + \max(T_\text{backward}, (1 - u)\, T_\text{network})
                  + u\, T_\text{network} + T_\text{codec}

    Here :math:`u` is the share of the last bucket, of 25 MiB, which is sent when the backward pass
    is over. Two thirds of the computation are the backward pass. A method that needs all gradients
    first, e.g. for a norm, does not reach this time.

    Args:
      compute: The seconds of forward and backward pass and optimizer.
      codec: The seconds of encoding and decoding.
      network: The seconds of all messages.
      gradient_bytes: The bytes of the gradients.
    """
    last = min(1.0, BUCKET_BYTES / gradient_bytes)
    backward = BACKWARD * compute
    return compute - backward + max(backward, (1 - last) * network) + last * network + codec


def size_of(tree: PyTree) -> tuple[int, float]:
    """The coordinates and the bytes of one worker, of leaves that may be those of all workers."""
    count = size = 0.0
    for node in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PerWorker)):
        for leaf in jax.tree.leaves(node):
            own = math.prod(leaf.shape[1:] if isinstance(node, PerWorker) else leaf.shape)
            count, size = count + own, size + own * leaf.dtype.itemsize
    return round(count), size


def shapes_of(params: PyTree) -> PyTree:
    """The shapes and dtypes of parameters.

    Raises:
      TypeError: If a leaf is not an array.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def _loss(params: PyTree, batch: jax.Array) -> jax.Array:
    """A loss that sends nothing by itself; the account would count equal gradients once."""
    total = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(params))
    return total * jnp.mean(batch)


@functools.lru_cache(maxsize=256)  # Links and step times are often varied for one model.
def traced(
    tx: Any, leaves: tuple[Any, ...], structure: Any, axes: tuple[tuple[str, int], ...]
) -> tuple[Account, float]:
    """What a step of `tx` sends on simulated workers, and the bytes of its state on one of them.

    Raises:
      ValueError: If `tx` is not a transformation, or does not fit the axes.
    """
    require_transformation(tx)
    shapes, workers = jax.tree.unflatten(structure, leaves), dict(axes)
    axis_name = tuple(workers)
    state = jax.eval_shape(lambda params: init(tx, params, workers, axis_name=axis_name), shapes)
    # `gradients=`, since the loss does not mark the layers of `wait_free`: they send as much.
    gradients = local_value_and_grad(_loss, axis_name=axis_name)
    step = simulate(
        _loss, tx, workers, axis_name=axis_name, gradients=lambda _, *args: gradients(*args)
    )
    batch = jax.ShapeDtypeStruct((math.prod(workers.values()),), jnp.float32)
    return wire.account(step, shapes, state, batch), size_of(state)[1]


def _calibrated(link: LinkLike, axes: Iterable[str]) -> Calibration:
    """Links by axis and collective; a single link is that of all axes."""
    if isinstance(link, Calibration):
        return link
    measured = Calibration({}, {})
    for axis, one in (link if isinstance(link, Mapping) else dict.fromkeys(axes, link)).items():
        measured = measured.with_link(one, axis)
    return measured


def network_seconds(account: Account, link: LinkLike, share: float) -> float:
    """The seconds of all messages, one after another, each on the slowest link of its axes.

    Args:
      account: What is sent.
      link: A link, links by axis, or a calibration.
      share: The fraction of the steps in which conditionals take their heaviest branch.

    Raises:
      ValueError: If a loop of unknown length sends, or an axis has no link.
    """
    if account.unbounded:
        raise ValueError("A loop of unknown length sends each time, so the time is unknown.")
    measured = _calibrated(link, {axis for c in account.collectives for axis in c.axes})

    def parts(c: Collective) -> tuple[float, float]:
        links = [measured.link(axis, c.kind) for axis in c.axes]
        each = [(c.messages * x.latency, c.bytes_per_worker / x.bytes_per_second) for x in links]
        return max(each, key=sum)

    def cost(collectives: list[Collective]) -> float:
        sending = [(c.group, parts(c)) for c in collectives if c.workers > 1]
        # Compilers combine the collectives of a group: one latency, all bytes.
        waits = {group: wait for group, (wait, _) in sending}
        return sum(waits.values()) + sum(seconds for _, (_, seconds) in sending)

    heaviest = cost(account.heaviest(cost))
    lightest = cost(account.heaviest(lambda collectives: -cost(collectives)))
    return share * heaviest + (1 - share) * lightest


def roofline_seconds(account: Account, gradients: float, state: float, device: Device) -> float:
    r"""The seconds of a codec that is limited by memory, at a quarter of the bandwidth.

    .. math:: \frac{2 G + 2 M + 2 P + R}{\text{bandwidth} / 4}

    Gradients (G) and the codec's state (M) are read and written once, what is sent (P) is written
    and read, and what is received (R, as many bytes as a
    worker sends) is read. If as much is sent as the gradients have, nothing is
    encoded, and the time is 0. Sorting and matrix products are not modeled: calibrate instead.

    Args:
      account: What is sent.
      gradients: The bytes of the gradients.
      state: The bytes of the codec's state.
      device: The device with the memory.
    """
    sent = account.heaviest(lambda collectives: sum(c.bytes_per_worker for c in collectives))
    payload = sum(c.times * math.prod(c.shape) * c.dtype.itemsize for c in sent)
    if payload >= gradients:
        return 0.0
    received = sum(c.bytes_per_worker for c in sent)
    moved = 2 * gradients + 2 * state + 2 * payload + received
    return moved / (EFFICIENCY * device.memory_bytes_per_second)


def predict(
    program: Any,
    params: PyTree,
    *args: Any,
    link: LinkLike,
    compute_seconds: float,
    workers: int | Mapping[str, int] | Mesh = 0,
    axis_name: AxisName = "data",
    share: float = 1.0,
    device: Device | str = "a100",
    codec_seconds: float | None = None,
    method: str | None = None,
    error: ErrorModel | Claims = UNKNOWN,
) -> Prediction:
    """Predicts the seconds of a step on a link.

    Args:
      program: A step with its arguments, as for :func:`jaxcomm.wire.account`; or a transformation,
        or an account, with the parameters only.
      params: The parameters, arrays or `jax.ShapeDtypeStruct`.
      *args: The other arguments of a step.
      link: A :class:`Link`, a bandwidth such as "10Gbit", a preset's name, a dict of them by mesh
        axis, or a :class:`Calibration`.
      compute_seconds: The seconds of a step that does not communicate.
      workers: The number of workers, the sizes of several axes by name, or a mesh; for a
        transformation only.
      axis_name: The axis or axes of the workers, for a transformation.
      share: The fraction of the steps that send, if only some do: 1 / H for local SGD.
      device: The device whose memory limits the codec, if its time is not known.
      codec_seconds: The seconds of encoding and decoding in an average step. By default `share`
        times those of `method` in the calibration, or else those of moving gradients, state and
        payloads through memory at a quarter of the bandwidth of `device`.
      method: The name of the method in the calibration.
      error: The claims of the codec, such as `dither(bits=8).claims`, or an error model.

    Returns:
      The prediction; print it. Seconds of a step: `compute_seconds`, `codec_seconds` and
      `network_seconds`, their sum `seconds`, and `overlapped`, the least if messages overlap with
      the backward pass. One worker sends `bytes_per_worker` in `messages`, one after another, and
      keeps `state_bytes` of the transformation; 0 for other programs. `error` says what the error
      of the method is known to cost in steps.

    Raises:
      ValueError: If `compute_seconds` is not positive, a loop of unknown length sends, a link is
        missing or wrong, or the number of workers is.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm import perf
      >>> params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> seen = perf.predict(
      ...     jaxcomm.mean(), params, link="1Gbit", compute_seconds=0.1, workers=8
      ... )
      >>> round(seen.network_seconds, 4), round(seen.seconds, 4)
      (0.0567, 0.1567)
    """
    require_number(compute_seconds, "compute_seconds", strict=True)
    shapes, state_bytes = shapes_of(params), 0.0
    if isinstance(program, Account):
        account = program
    elif hasattr(program, "init"):
        sizes = worker_axes(workers.shape if isinstance(workers, Mesh) else workers, axis_name)
        leaves, structure = jax.tree.flatten(shapes)
        account, state_bytes = traced(program, tuple(leaves), structure, tuple(sizes.items()))
    else:
        account = wire.account(program, params, *args)
    coordinates, gradient_bytes = size_of(shapes)
    sent = account.amortized_bytes_per_worker(share)
    network = network_seconds(account, link, share)
    if codec_seconds is None and isinstance(link, Calibration) and method is not None:
        codec_seconds = share * link.codecs[method] * coordinates
    if codec_seconds is None:
        moved = roofline_seconds(account, gradient_bytes, state_bytes, to_device(device))
        codec_seconds = share * moved
    require_number(codec_seconds, "codec_seconds")
    return Prediction(
        compute_seconds,
        codec_seconds,
        network,
        overlapped_seconds(compute_seconds, codec_seconds, network, gradient_bytes),
        sent,
        account.messages,
        state_bytes,
        error_of(error, coordinates, max((c.workers for c in account.collectives), default=1)),
    )
