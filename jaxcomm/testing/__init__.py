"""Laws that every codec and aggregator is held to, for tests of your own.

Nothing but NumPy, JAX and optax is needed, and no test runner: a law that does not hold raises an
AssertionError that names it. `import jaxcomm` does not import this package.
"""

from jaxcomm.testing._aggregator import check_aggregator
from jaxcomm.testing._codec import check_codec

__all__ = ["check_aggregator", "check_codec"]
