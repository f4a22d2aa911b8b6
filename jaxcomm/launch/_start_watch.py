"""Ends a launch whose script never joins the processes."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from jaxcomm.launch._address import Address, parse_address
from jaxcomm.launch._environment import COORDINATOR
from jaxcomm.launch._errors import WRONG_INPUT
from jaxcomm.launch._processes import Outcome
from jaxcomm.launch._run_directory import JOINED, RunDirectory

CONNECT_SECONDS = 0.5


def _somebody_listens(address: Address) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, timeout=CONNECT_SECONDS) as connection,
    ):
        # A port of this machine without a listener may be connected to itself.
        return bool(connection.getsockname() != connection.getpeername())
    return False


class StartWatch:
    """Checks once, at the start timeout, that process 0 has begun to join the others."""

    def __init__(
        self,
        timeout: float,
        environments: Sequence[Mapping[str, str]],
        directory: RunDirectory,
        after: Callable[[], Outcome | None],
    ) -> None:
        """Calls `after`, the next watch, at all times."""
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if len(environments) > 1 else None
        self._coordinator = parse_address(environments[0][COORDINATOR])
        self._directory = directory
        self._after = after

    def __call__(self) -> Outcome | None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return self._after()
        self._deadline = None
        # A script that calls jax.distributed itself reports nothing, but its coordinator listens.
        if self._directory.has(JOINED) or _somebody_listens(self._coordinator):
            return self._after()
        return Outcome(
            WRONG_INPUT,
            reason=(
                "process 0 has not called jaxcomm.launch.initialize(), or "
                f"jax.distributed.initialize(), within {self._timeout:g} s; call it at the start "
                "of the script, or raise --start-timeout"
            ),
        )
