"""Use an installed jaxcomm without the checkout or extras; see tools/test_wheel.

    python -P tools/check_wheel.py CHECKOUT

It takes from the checkout only the programs of README.md and docs/clusters.md.
"""

import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ABSENT = ("networkx", "cvxpy", "matplotlib", "flax", "sklearn", "orbax", "experiments", "tests")


def public_modules() -> list[str]:
    """All modules of the wheel without a part that begins with an underscore."""
    names = []
    for package in ("jaxcomm", "pallas_kernels"):
        module = importlib.import_module(package)
        assert "site-packages" in module.__file__, f"{package} is not the wheel's: {module}"
        found = pkgutil.walk_packages(module.__path__, f"{package}.")
        names += [package, *(each.name for each in found)]
    return [name for name in names if not any(part[0] == "_" for part in name.split("."))]


def reader_of(checkout: Path) -> Any:
    """The module that reads the blocks of a page."""
    path = checkout / "tools" / "run_readme.py"
    specification = importlib.util.spec_from_file_location("run_readme", path)
    readme = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(readme)
    return readme


def programs(readme: Any, checkout: Path) -> tuple[Any, str]:
    """The first program of the README, as a block, and the one for several processes."""
    text = (checkout / "README.md").read_text(encoding="utf-8")
    machines = (checkout / "docs" / "tutorials" / "machines.md").read_text(encoding="utf-8")
    first_step = readme.python_blocks(machines.partition("## Step 2")[0])
    return readme.python_blocks(text)[0], "".join(block.code for block in first_step)


def run(*arguments: str) -> str:
    devices = "--xla_force_host_platform_device_count=8"
    environment = {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu", "NPROC": "16", **os.environ}
    print("python", *arguments, flush=True)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip


def main(checkout: Path) -> None:
    """Imports everything, and runs both programs; README's prints what the page shows."""
    for name in ABSENT:
        assert importlib.util.find_spec(name) is None, f"{name} is installed, and should not be"
    names = public_modules()
    for name in names:
        importlib.import_module(name)
    print(f"imported {len(names)} public modules")
    reader = reader_of(checkout)
    first, processes = programs(reader, checkout)
    Path("readme.py").write_text(first.code, encoding="utf-8")
    Path("processes.py").write_text(processes, encoding="utf-8")
    reader.require_printed(first, run("readme.py"))
    run("-m", "jaxcomm.launch", "--processes", "2", "--", "processes.py")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
