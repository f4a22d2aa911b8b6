"""A private machine: namespaces of networks and mounts that vanish with this process."""

import ctypes
import os
import shutil
import subprocess
import sys

from experiments.cli.errors import ExperimentError

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000  # <linux/sched.h>
AS_ROOT = ("unshare", "--user", "--map-root-user")
PROGRAMS = ("ip", "tc", "mount", "sysctl", "unshare")


class LabError(ExperimentError):
    """The machine does not permit the lab, or a worker has ended."""


def run(*command: str) -> str:
    """Runs a program and returns its output.

    Raises:
      LabError: If the program fails, with its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].rstrip(
            "."
        )
        raise LabError(f"`{' '.join(command)}` fails: {last}")
    return done.stdout


def require_programs() -> None:
    """Raises a `LabError` unless this is Linux with iproute2."""
    if sys.platform != "linux":
        raise LabError(f"the lab needs Linux, and this is {sys.platform}.")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise LabError(f"the program `{missing[0]}` is missing; install iproute2 and util-linux.")


def _unshare(flags: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def isolate() -> None:
    """Moves this process, and those that it starts, to private networks and mounts.

    The kernel removes them when the last process has ended, even if it was killed. So the lab
    leaves nothing behind, and several labs do not meet. Without root, this replaces the process by
    the same command in an unprivileged user namespace.

    Raises:
      LabError: If the kernel does not permit it.
    """
    require_programs()
    try:
        if os.geteuid() != 0:
            run(*AS_ROOT, "--net", "true")
            os.execvp(AS_ROOT[0], [*AS_ROOT, *sys.orig_argv])
        _unshare(CLONE_NEWNS | CLONE_NEWNET)
    except (OSError, LabError) as error:
        raise LabError(
            f"network namespaces are not permitted here: {error}. The lab needs root, or "
            "unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1)."
        ) from error
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")  # `ip netns` keeps names of namespaces here.
