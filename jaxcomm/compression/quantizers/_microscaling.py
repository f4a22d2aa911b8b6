"""The block formats of OCP's microscaling specification, and NVFP4, bit for bit."""

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm._require import checked
from jaxcomm.compression._bits import pack_numbers, unpack_numbers
from jaxcomm.compression.quantizers._small_floats import (
    FORMATS,
    exponent_of,
    of_codes,
    shifted,
    to_codes,
)
from pallas_kernels._dispatch import nondifferentiable

FormatName: TypeAlias = Literal[
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4"
]
E4M3 = FORMATS["mxfp8_e4m3"]
NONFINITE = 255  # E8M0's NaN, the scale of a block with a NaN or an infinity.


class MicroscalingPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    elements: jax.Array  # uint8[size]; of 4 or 6 bits packed in uint32
    scales: jax.Array  # uint8[ceil(size / block)], E8M0, or E4M3 of NVFP4
    scale: jax.Array  # float32[1] of NVFP4, float32[0] of the others


@checked
def microscaling(
    format: FormatName = "mxfp8_e4m3",
    *,
    rounding: Literal["nearest", "stochastic"] = "nearest",
) -> Codec:
    r"""The standard block formats: MXFP8, MXFP6, MXFP4 and MXINT8 of OCP, and NVIDIA's NVFP4.

    .. math:: Q(x)_j = X \operatorname{round}(x_j / X), \qquad
              X = 2^{\lfloor \log_2 \max_i |x_i| \rfloor - e}

    over blocks of 32, for the exponent e of the largest number L of the elements; what would be
    more than L becomes L. NVFP4 has blocks of 16 with the scale :math:`X = s g`:

    .. math:: g = \frac{\max_{\text{unit}} |x|}{6 \cdot 448}, \qquad
              s = \operatorname{round}_{\text{E4M3}}\Big(\frac{\max_i |x_i|}{6 g}\Big)

    A worker sends the bits of an element per coordinate, 8 bits per block, and 32 of NVFP4. Scales
    may be too small for the largest magnitudes, so formats are biased, also with stochastic
    rounding: use :func:`jaxcomm.compression.feedback.error_feedback`. In its place,
    :func:`jaxcomm.compression.quantizers.block_float` rounds scales up, and is unbiased.

    Args:
      format: The name; e4m3 has 4 bits of an exponent and 3 of the mantissa.
      rounding: To `"nearest"`, ties to even; or `"stochastic"`.

    Returns:
      A codec that claims a `contraction`, without statistics. `combine` is `None`, because each
      worker has its own scales: receivers add in float32. A block with NaN or infinity decodes to
      NaN; of NVFP4, the whole unit.

    Raises:
      ValueError: If an argument is not one of the above.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import microscaling
      >>> codec, x = microscaling("mxfp4"), jnp.array([7.0, -1.3, 0.2])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(payload.scales, codec.decode(Context.of(x), payload))
      [127] [ 6.  -1.5  0. ]

    References:
      Open Compute Project, `OCP Microscaling Formats (MX) Specification 1.0
      <https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>`_,
      2023. Rouhani et al., `Microscaling Data Formats for Deep Learning
      <https://arxiv.org/abs/2310.10537>`_, 2023. NVIDIA, `Pretraining Large Language Models with
      NVFP4 <https://arxiv.org/abs/2509.25149>`_, 2025.

    Differs from the specification: words hold planes of elements, or of their bits if there are
    6, where it leaves the layout open. MXINT8 does not use -128. A block of zeros has the smallest
    scale.
    """
    form, is_nvfp4 = FORMATS[format], format == "nvfp4"
    length, sign = (16 if is_nvfp4 else 32), 1 << (form.bits - 1)
    complement = 2 * sign if format == "mxint8" else None  # Others have the sign in the first bit.

    def encode(context: Context, x: jax.Array) -> tuple[MicroscalingPayload, Memory]:
        (flat,) = nondifferentiable("microscaling", x.ravel().astype(jnp.float32))
        blocks = jnp.pad(flat, (0, -flat.size % length)).reshape(-1, length)
        peaks, unit = jnp.max(jnp.abs(blocks), axis=1), jnp.zeros(0, jnp.float32)
        if is_nvfp4:
            of_unit = jnp.maximum(jnp.max(peaks, initial=0) / (6 * 448), 2.0**-126)
            scales, unit = to_codes(peaks / 6 / of_unit, E4M3), of_unit[None]
            factors = of_codes(scales, E4M3)[:, None]
            over = jnp.where(factors > 0, blocks / of_unit / factors, 0)
        else:
            scales = jnp.clip(exponent_of(peaks) + (127 - form.most), 0, 254)
            over = shifted(blocks, 127 - scales[:, None])
            scales = jnp.where(jnp.isfinite(peaks), scales, NONFINITE)
        over = over.ravel()[: flat.size]
        noise = _noise.bits(context.keys.private, over.shape) if rounding == "stochastic" else None
        codes = to_codes(jnp.abs(over), form, noise)
        negative = (complement - codes) % complement if complement else codes | sign
        signed = jnp.where(jnp.signbit(over), negative, codes).astype(jnp.uint32)
        packed = pack_numbers(signed, form.bits) if form.bits < 8 else signed.astype(jnp.uint8)
        return MicroscalingPayload(packed, scales.astype(jnp.uint8), unit), context.memory

    def decode(context: Context, payload: MicroscalingPayload) -> jax.Array:
        packed, scales = payload.elements, jnp.repeat(payload.scales.astype(jnp.int32), length)
        scales = scales[: context.size]
        signed = unpack_numbers(packed, form.bits, context.size) if form.bits < 8 else packed
        signed = signed.astype(jnp.int32).ravel()
        negative = complement - signed if complement else signed - sign
        codes = jnp.where(signed < sign, signed, negative)
        values = jnp.where(signed < sign, 1.0, -1.0) * of_codes(codes, form)
        if is_nvfp4:
            x = values * of_codes(scales, E4M3) * payload.scale
        else:
            finite = scales != NONFINITE
            x = jnp.where(finite, shifted(values, jnp.where(finite, scales - 127, 0)), jnp.nan)
        return x.reshape(context.shape) / context.count

    def contraction(size: int, workers: int) -> float:
        # Blocks of NVFP4 whose scale would be below the normal ones may be lost.
        return 1 - form.error - (size / (448 * 2**6) ** 2 if is_nvfp4 else 0)

    return Codec(
        encode=encode,
        decode=decode,
        claims=Claims(contraction=contraction),
        layout="concatenated" if is_nvfp4 else "independent",
    )
