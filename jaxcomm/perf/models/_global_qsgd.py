"""The performance model of Global-QSGD: a tree all-reduce, with and without compression."""

import math

from jaxcomm.perf._require import require_at_least, require_positive


def tree_all_reduce_seconds(
    workers: int, size: float, latency: float, bandwidth: float, reduce_bandwidth: float
) -> float:
    r"""Returns the seconds of a tree all-reduce, up and down the tree.

    .. math:: T = 2 \log_2(n)\, \alpha + 2 \log_2(n) \frac{S}{\beta} + \log_2(n) \frac{S}{\gamma}

    Args:
      workers: :math:`n`.
      size: :math:`S`, the bytes of the array.
      latency: :math:`\alpha`, seconds per message.
      bandwidth: :math:`\beta`, bytes per second of a link.
      reduce_bandwidth: :math:`\gamma`, bytes per second at which a worker adds two arrays.

    Returns:
      Seconds.

    Raises:
      ValueError: If a number is out of range.

    References:
      Xin, Canini, Richtárik, Horváth: Global-QSGD, 2023, arXiv 2305.18627.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.tree_all_reduce_seconds(4, 5.4e9, 0.0, bandwidth=5.4e9, reduce_bandwidth=5.4e9)
      6.0
    """
    require_at_least(1, workers, "workers")
    require_at_least(0, size, "size")
    require_at_least(0, latency, "latency")
    require_positive(bandwidth, "bandwidth")
    require_positive(reduce_bandwidth, "reduce_bandwidth")
    depth = math.log2(workers)
    return depth * (2 * latency + 2 * size / bandwidth + size / reduce_bandwidth)


def tree_speedup(
    workers: int,
    size: float,
    latency: float,
    bandwidth: float,
    reduce_bandwidth: float,
    *,
    omega: float = 1.0,
    ratio: float = 4.0,
    compute_seconds: float = 0.0,
    codec_seconds: float = 0.0,
) -> float:
    r"""Returns the time of a step with float32 sums over that with compressed sums.

    Compression turns :math:`S` into :math:`S` / `ratio` and :math:`\gamma` into :math:`\gamma /
    \omega`. The paper neglects the seconds of the codec.

    Args:
      workers: :math:`n`.
      size: :math:`S`, the bytes of the float32 array.
      latency: :math:`\alpha`, seconds per message.
      bandwidth: :math:`\beta`, bytes per second of a link.
      reduce_bandwidth: :math:`\gamma`, bytes per second at which a worker adds two arrays.
      omega: How many times as long as an addition a byte of the compressed reduction takes. The
        paper measured 79 for exponential dithering, and has 1 for uniform levels.
      ratio: How many times smaller the compressed array is; 4 for 8 bits.
      compute_seconds: The rest of the step, equal in both.
      codec_seconds: Seconds to encode and decode.

    Returns:
      The quotient; above 1, compression is faster.

    Raises:
      ValueError: If a number is out of range.

    References:
      Xin, Canini, Richtárik, Horváth: Global-QSGD, 2023, arXiv 2305.18627.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.tree_speedup(4, 1e9, 0.0, bandwidth=1e9, reduce_bandwidth=1e15)
      4.0
    """
    require_positive(omega, "omega")
    require_positive(ratio, "ratio")
    require_at_least(0, compute_seconds, "compute_seconds")
    require_at_least(0, codec_seconds, "codec_seconds")
    exact = tree_all_reduce_seconds(workers, size, latency, bandwidth, reduce_bandwidth)
    compressed = tree_all_reduce_seconds(
        workers, size / ratio, latency, bandwidth, reduce_bandwidth / omega
    )
    return (compute_seconds + exact) / (compute_seconds + codec_seconds + compressed)


def largest_bandwidth_that_pays(reduce_bandwidth: float, omega: float) -> float:
    r"""Returns the bandwidth below which 8-bit codes are faster than float32 in a tree.

    From :math:`2 S / \beta + S / \gamma > 2 S / (4 \beta) + \omega S / (4 \gamma)`: always for
    :math:`\omega \le 4`, and otherwise for :math:`\beta < 6 \gamma / (\omega - 4)`.

    Args:
      reduce_bandwidth: :math:`\gamma`, bytes per second at which a worker adds two arrays.
      omega: How many times as long a byte of the compressed reduction takes.

    Returns:
      Bytes per second; infinity if the codes are faster over every link.

    Raises:
      ValueError: If a number is not positive.

    References:
      Xin, Canini, Richtárik, Horváth: Global-QSGD, 2023, arXiv 2305.18627.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.largest_bandwidth_that_pays(2e12, omega=79)
      160000000000.0
    """
    require_positive(reduce_bandwidth, "reduce_bandwidth")
    require_positive(omega, "omega")
    return 6 * reduce_bandwidth / (omega - 4) if omega > 4 else math.inf
