r"""The formats of one element, a sign and a magnitude of 7 bits.

.. math:: |y| = n\, 2^{q}, \qquad q = \max(\lfloor \log_2 |y| \rfloor, e_{\min}) - m

with n below :math:`2^{m + 1}`. For floats, m is the number of mantissa bits. int8 has one exponent
only, so :math:`q = 0`. The 7 bits of a float are :math:`(q - q_{\min}) 2^m + n`, which holds for
subnormal numbers too, and where rounding n up carries into the exponent.
"""

import math
from typing import NamedTuple


class Format(NamedTuple):
    """One element of 8 bits."""

    largest: float  # The largest finite magnitude.
    mantissa: int  # m, binary digits after the leading one.
    least: int  # e_min, the exponent of the smallest normal number.
    is_integer: bool  # Negative numbers in two's complement; else bit 7 is the sign.

    @property
    def most(self) -> int:
        """The exponent of `largest`."""
        return math.frexp(self.largest)[1] - 1

    @property
    def fraction(self) -> int:
        """The 23 digits of `largest` after the leading one."""
        return round((self.largest / 2.0**self.most - 1) * 2**23)

    def error(self, block_size: int) -> float:
        r"""A bound on the squared error of a block, relative to the squares of its numbers.

        .. math:: \omega = 4^{-m - 1} + \frac{b u^2}{L^2}

        for the distance u of the smallest numbers and the largest number L. Half of L is below the
        largest magnitude of each block, after scaling. int8 has the second term only.
        """
        step = 2.0 ** (self.least - self.mantissa)
        relative = 0.0 if self.is_integer else 4.0 ** -(self.mantissa + 1)
        return relative + block_size * step**2 / self.largest**2


FORMATS: dict[str, Format] = {
    "int8": Format(127.0, 6, 6, True),
    "float8_e4m3fn": Format(448.0, 3, -6, False),
    "float8_e5m2": Format(57344.0, 2, -14, False),
}
"""The formats by the name of their dtype."""
