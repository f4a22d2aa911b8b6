"""The predicted seconds of a step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from jaxcomm import wire
from jaxcomm._contract import AxisName, Claims, Codec, PyTree
from jaxcomm._require import require_transformation
from jaxcomm.perf._calibration import Calibration
from jaxcomm.perf._codec_time import roofline_seconds
from jaxcomm.perf._error import UNKNOWN, ErrorModel, error_of
from jaxcomm.perf._network import LinkLike, links_of, network_seconds
from jaxcomm.perf._presets import Device, to_device
from jaxcomm.perf._require import require_at_least, require_positive, require_workers
from jaxcomm.perf._traced import bytes_of_tree, count_of_tree, shapes_of, traced

BACKWARD = 2 / 3
"""The part of the computation that is the backward pass, which has two products for each one."""

BUCKET_BYTES = 25 * 2**20
"""The gradients that are left when the backward pass ends; the default bucket of PyTorch."""


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
      error: What the method's error is known to cost in steps.
    """

    compute_seconds: float
    codec_seconds: float
    network_seconds: float
    overlapped: float
    bytes_per_worker: float
    messages: int
    error: ErrorModel = UNKNOWN

    @property
    def seconds(self) -> float:
        """The seconds of the step without overlap: the sum of the parts."""
        return self.compute_seconds + self.codec_seconds + self.network_seconds

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

    Returns:
      The seconds of the step.

    Raises:
      ValueError: If a number is negative, or there are no bytes.

    Example:
      >>> from jaxcomm import perf
      >>> perf.overlapped_seconds(0.3, 0.0, 0.1, gradient_bytes=100 * 2**20)
      0.325
    """
    require_at_least(0, compute, "compute")
    require_at_least(0, codec, "codec")
    require_at_least(0, network, "network")
    require_positive(gradient_bytes, "gradient_bytes")
    last = min(1.0, BUCKET_BYTES / gradient_bytes)
    backward = BACKWARD * compute
    return compute - backward + max(backward, (1 - last) * network) + last * network + codec


def predict(
    program: Any,
    *args: Any,
    link: LinkLike,
    compute_seconds: float,
    workers: int | Mapping[str, int] | Mesh | None = None,
    axis_name: AxisName = "data",
    share: float = 1.0,
    device: Device | str = "a100",
    codec_seconds: float | None = None,
    method: str | None = None,
    state_bytes: float | None = None,
    error: ErrorModel | Claims = UNKNOWN,
) -> Prediction:
    """Predicts the seconds of a step on a link.

    Args:
      program: A step with its arguments, as for :func:`jaxcomm.wire.account`; or a transformation
        with `params`; or an account with `params`. The first of `args` is always the parameters,
        arrays or `jax.ShapeDtypeStruct`.
      *args: The arguments of the program.
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
      state_bytes: The bytes of the codec's state on one worker, for the roofline. By default those
        of the transformation, or 0.
      error: The claims of the codec, such as `dither(bits=8).claims`, or an error model.

    Returns:
      The prediction; print it.

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
    require_positive(compute_seconds, "compute_seconds")
    if not args:
        raise ValueError("`predict` needs the parameters after the program, got none.")
    params = shapes_of(args[0])
    account, kept, count = _accounted(program, args, params, workers, axis_name)
    gradient_bytes = bytes_of_tree(params)
    network = network_seconds(account, links_of(link), share)
    if codec_seconds is None and isinstance(link, Calibration) and method is not None:
        if method not in link.codecs:
            raise ValueError(
                f"`method`={method!r} is not in the calibration, which has {sorted(link.codecs)}."
            )
        codec_seconds = share * link.codecs[method] * count_of_tree(params)
    if codec_seconds is None:
        codec_seconds = share * roofline_seconds(
            account,
            gradient_bytes,
            kept if state_bytes is None else state_bytes,
            to_device(device),
        )
    require_at_least(0, codec_seconds, "codec_seconds")
    return Prediction(
        compute_seconds,
        codec_seconds,
        network,
        overlapped_seconds(compute_seconds, codec_seconds, network, gradient_bytes),
        account.amortized_bytes_per_worker(share),
        account.messages,
        error if isinstance(error, ErrorModel) else error_of(error, count_of_tree(params), count),
    )


def _accounted(
    program: Any,
    args: tuple[Any, ...],
    params: PyTree,
    workers: int | Mapping[str, int] | Mesh | None,
    axis_name: AxisName,
) -> tuple[wire.Account, float, int]:
    """The account, the bytes of the state, and the workers of the largest collective."""
    kept = 0.0
    if isinstance(program, wire.Account):
        account = program
    elif isinstance(program, optax.GradientTransformation):
        if workers is None:
            raise ValueError("`workers` is required with a transformation: a number or a mesh.")
        sizes = dict(workers.shape) if isinstance(workers, Mesh) else workers
        if not isinstance(sizes, Mapping):
            require_workers(sizes)
        account, kept = traced(program, params, sizes, axis_name)
    elif isinstance(program, Codec) or hasattr(program, "init") or not callable(program):
        require_transformation(program, "program")  # Says what it is instead.
        raise ValueError(f"`program` must be an optax transformation, got {program!r}.")
    else:
        account = wire.account(program, *args)
    return account, kept, max((each.workers for each in account.collectives), default=1)
