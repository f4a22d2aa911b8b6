"""Keeps freed memory in the processes, so that the next step does not ask the kernel for it."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
KEPT = ":".join(
    f"glibc.malloc.{name}"
    for name in ("mmap_max=0", f"trim_threshold={2**62}", "arena_max=1")  # No threshold is larger.
)


def runs_on_cpus(environment: Mapping[str, str]) -> bool:
    """Whether JAX would have no other devices."""
    if chosen := environment.get("JAX_PLATFORMS"):
        return chosen == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def memory_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes glibc keep freed memory, for processes on CPUs.

    XLA allocates the temporaries of a program in each call. By default, glibc maps blocks of 32 MB
    and more from the kernel and unmaps them when they are freed, so each step faults in every page
    again. That can take half of a step. One arena that is never trimmed reuses the blocks.

    Args:
      environment: The base environment. If it has GLIBC_TUNABLES or a MALLOC_ variable, the result
        is empty: the user has chosen.
    """
    is_chosen = any(name == TUNABLES or name.startswith("MALLOC_") for name in environment)
    return {TUNABLES: KEPT} if runs_on_cpus(environment) and not is_chosen else {}
