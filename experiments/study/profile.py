"""The command `profile`: what the steps of methods spend their time on, on a slow link."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from experiments.cli.configs import Profile
from experiments.cli.errors import ExperimentError
from experiments.lab.network import Link, bits_per_second
from experiments.lab.peers import METHODS as PEERS
from experiments.study.files import write_atomically
from experiments.training.lab import Lab

TABLE = "profile.md"


def table(found: Mapping[str, Mapping[str, float]], longest: int) -> str:
    """The longest operations of each method: milliseconds per step."""
    lines = [
        "| method | operation | ms per step | of all operations |",
        "| --- | --- | ---: | ---: |",
    ]
    for method, milliseconds in found.items():
        total = sum(milliseconds.values())
        first = sorted(milliseconds.items(), key=lambda pair: -pair[1])[:longest]
        rest = total - sum(took for _, took in first)
        for name, took in (*first, ("all others", rest), ("total", total)):
            lines.append(f"| {method} | {name} | {took:.1f} | {took / total:.0%} |")
    return "\n".join(lines) + "\n"


def main(config: Profile) -> int:
    """Runs `python -m experiments profile`; returns the exit code.

    Raises:
      ExperimentError: If a method is of PyTorch, or an option is invalid.
    """
    if theirs := [name for name in config.methods if name in PEERS]:
        raise ExperimentError(f"`{theirs[0]}` is no method of jaxcomm, whose steps are profiled.")
    try:
        bits_per_second(config.bandwidth)
    except ValueError as error:
        raise ExperimentError(f"--bandwidth: {error}") from error
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lab, found = Lab(config, config.model), {}
    for method in config.methods:
        lab.prepare(method)
        lab.network.shape(Link(config.bandwidth))
        file = folder / f"{method.replace(':', '_')}_{config.bandwidth}.trace.json.gz"
        answers = lab.group(method).ask(
            "profile", method=method, steps=config.steps, file=str(file.resolve())
        )
        found[method] = answers[0]["milliseconds"]
        print(f"{method}: {sum(found[method].values()):.0f} ms of operations a step; {file}")
    options = ", ".join(
        f"{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name not in ("folder", "longest", "delay", "methods")
    )
    heading = f"# What a step spends its time on\n\nThe first worker; {options}.\n\n"
    write_atomically(folder / TABLE, (heading + table(found, config.longest)).encode())
    return 0
