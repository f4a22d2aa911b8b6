"""Addresses of the coordinator."""

import errno
import os
import socket
from typing import NamedTuple

from jaxcomm.launch._errors import LaunchError, shown


class Address(NamedTuple):
    """The host and port at which a coordinator listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host(text: str) -> str | None:
    """Returns a host name or address without brackets, or None if the text cannot be one."""
    host = text.removeprefix("[").removesuffix("]")
    if any(letter.isspace() or letter in "[]/\0" for letter in host):
        return None
    try:
        host.encode("idna")  # A name look-up encodes too; it limits labels to 1 to 63 letters.
    except UnicodeError:
        return None
    return host or None


def parse_address(text: str) -> Address:
    """Parses `"10.0.0.1:1234"`, `"host:1234"` or `"[::1]:1234"`.

    Raises:
      LaunchError: If the text has none of these forms.
    """
    name, _, port = text.rpartition(":")
    host = parse_host(name)
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 2**16:
        raise LaunchError(f"{shown(text)} is not a coordinator address: write HOST:PORT.")
    return Address(host, int(port))


def listen(address: Address) -> socket.socket:
    """Returns a socket that listens at this address only.

    Raises:
      LaunchError: If the port is in use, or the address does not belong to this machine.
    """
    all_interfaces = address.host in ("::", "0.0.0.0")
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        dual = all_interfaces and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"the coordinator cannot listen at {address}: the port is in use; choose another."
            ) from error
        # Resolver errors are negative. For the others Python extends the system's message.
        number = error.errno or -1
        reason = os.strerror(number) if number > 0 else error.strerror
        raise LaunchError(f"the coordinator cannot listen at {address}: {reason}.") from error
