"""The model of "On the Utility of Gradient Compression in Distributed Training Systems"."""

from jaxcomm.perf._require import require_at_least, require_positive, require_workers


def ring_all_reduce_seconds(size: float, workers: int, bandwidth: float, latency: float) -> float:
    r"""Returns :math:`\alpha (p - 1) + 2 b (p - 1) / (p\, BW)` for a ring all-reduce.

    Args:
      size: :math:`b`, the bytes of the array.
      workers: :math:`p`.
      bandwidth: :math:`BW`, bytes per second.
      latency: :math:`\alpha`, seconds.

    Returns:
      Seconds.

    Raises:
      ValueError: If a number is out of range.

    References:
      Agarwal, Wang, Venkataraman, Papailiopoulos: On the Utility of Gradient Compression in
      Distributed Training Systems, 2022, arXiv 2103.00543.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.ring_all_reduce_seconds(100e6, 4, bandwidth=1e9, latency=0.0)
      0.15
    """
    _require(size, workers, bandwidth, latency)
    return latency * (workers - 1) + 2 * size * (workers - 1) / (workers * bandwidth)


def all_gather_seconds(size: float, workers: int, bandwidth: float, latency: float) -> float:
    r"""Returns :math:`\alpha (p - 1) + b (p - 1) / BW` for an all-gather.

    Args:
      size: :math:`b`, the bytes of one worker's array.
      workers: :math:`p`.
      bandwidth: :math:`BW`, bytes per second.
      latency: :math:`\alpha`, seconds.

    Returns:
      Seconds.

    Raises:
      ValueError: If a number is out of range.

    References:
      Agarwal, Wang, Venkataraman, Papailiopoulos: On the Utility of Gradient Compression in
      Distributed Training Systems, 2022, arXiv 2103.00543.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.all_gather_seconds(1e6, 4, bandwidth=1e9, latency=0.0)
      0.003
    """
    _require(size, workers, bandwidth, latency)
    return latency * (workers - 1) + size * (workers - 1) / bandwidth


def synchronous_seconds(
    backward_seconds: float,
    size: float,
    workers: int,
    bandwidth: float,
    latency: float,
    *,
    bucket_bytes: float = 25e6,
    slowdown: float = 1.0,
) -> float:
    r"""Returns the backward pass of synchronous SGD that sends buckets while it computes.

    .. math:: T = \max(\gamma\, T_\text{comp},\; (k - 1)\, T_\text{comm}(b)) +
              T_\text{comm}(\hat b)

    with :math:`k` buckets of :math:`b` bytes, the last of which has :math:`\hat b`.

    Args:
      backward_seconds: :math:`T_\text{comp}`, the backward pass alone.
      size: The bytes of all gradients.
      workers: :math:`p`.
      bandwidth: Bytes per second.
      latency: Seconds per hop of the ring.
      bucket_bytes: :math:`b`; 25 MB is the default of PyTorch.
      slowdown: :math:`\gamma`, at least 1: sending slows the computation down.

    Returns:
      Seconds from the start of the backward pass to the end of the last bucket.

    Raises:
      ValueError: If a number is out of range.

    References:
      Agarwal, Wang, Venkataraman, Papailiopoulos: On the Utility of Gradient Compression in
      Distributed Training Systems, 2022, arXiv 2103.00543.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.synchronous_seconds(0.1, 50e6, 2, bandwidth=1e9, latency=0.0)
      0.125
    """
    _require(size, workers, bandwidth, latency)
    require_at_least(0, backward_seconds, "backward_seconds")
    require_positive(bucket_bytes, "bucket_bytes")
    require_at_least(1, slowdown, "slowdown")
    whole = max(int(-(-size // bucket_bytes)) - 1, 0)
    last = size - whole * bucket_bytes
    each = ring_all_reduce_seconds(bucket_bytes, workers, bandwidth, latency)
    return max(slowdown * backward_seconds, whole * each) + ring_all_reduce_seconds(
        last, workers, bandwidth, latency
    )


def compressed_seconds(
    backward_seconds: float, codec_seconds: float, communication_seconds: float
) -> float:
    """Returns the backward pass of a compressed method, which does not overlap.

    The authors found that a codec which runs beside the backward pass slows both down, so the
    three parts add up.

    Args:
      backward_seconds: The backward pass alone.
      codec_seconds: Encoding and decoding.
      communication_seconds: The messages: of PowerSGD, two ring all-reduces; of top-k, two
        all-gathers of values and indices; of signSGD, one all-gather.

    Returns:
      Seconds, the sum.

    Raises:
      ValueError: If a number is negative.

    References:
      Agarwal, Wang, Venkataraman, Papailiopoulos: On the Utility of Gradient Compression in
      Distributed Training Systems, 2022, arXiv 2103.00543.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.compressed_seconds(0.5, 0.25, 0.125)
      0.875
    """
    require_at_least(0, backward_seconds, "backward_seconds")
    require_at_least(0, codec_seconds, "codec_seconds")
    require_at_least(0, communication_seconds, "communication_seconds")
    return backward_seconds + codec_seconds + communication_seconds


def _require(size: float, workers: int, bandwidth: float, latency: float) -> None:
    require_at_least(0, size, "size")
    require_workers(workers)
    require_positive(bandwidth, "bandwidth")
    require_at_least(0, latency, "latency")
