"""What the study of time to a loss measures: trainings on unshaped links, steps on all links."""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.cli.errors import ExperimentError
from experiments.lab.methods import LABELS, find
from experiments.lab.network import UNSHAPED, Link, bits_per_second, check_delay
from experiments.lab.peers import METHODS as PEERS
from experiments.lab.peers import require_torch, trained_as
from experiments.methods import expand
from experiments.training.lab import Lab, Limits

MODEL, OPTIMIZER = "transformer", "adam"
REFERENCES = ("ddp", "mean")
METHODS = (
    *("mean", "mean_bfloat16", "global_qsgd:8", "ef_top_1_percent_start_2", "power_sgd_rank_4"),
    *("power_sgd_rank_1_start_2", "power_sgd_rank_2_start_2", "power_sgd_rank_4_start_2"),
    "acp_sgd_rank_4_start_2",
    *("ddp", "ddp_fp16", "ddp_power_sgd_1", "ddp_power_sgd_2", "ddp_power_sgd_4"),
    *("ddp_power_sgd_1_kept_memory", "ddp_power_sgd_4_kept_memory"),
)
TRAINING_SECONDS = 3600  # The time limit of a training.


def methods(config: Any) -> list[str]:
    """The methods of a config; by default without those of PyTorch if it is not installed."""
    chosen = config.methods or METHODS
    if not config.methods and importlib.util.find_spec("torch") is None:
        chosen = [name for name in METHODS if name not in PEERS]
    return list(expand(chosen, (*LABELS, *PEERS)))


def check(name: str) -> None:
    """Raises an `ExperimentError` unless the workers of a method have the same parameters."""
    if name in PEERS:
        require_torch()
        is_common = PEERS[name].communicates
    else:
        is_common = not (find(name).own_parameters or find(name).clusters)
    if not is_common:
        raise ExperimentError(
            f"--methods has {name}, whose workers have no common parameters or need clusters; the "
            "study of time to a loss evaluates one set of parameters."
        )


def links(config: Any) -> list[Link]:
    """The unshaped link, and those of a config."""
    return list(dict.fromkeys([Link(), *(Link(rate) for rate in config.bandwidth)]))


@functools.cache
def settings(config: Any) -> Sequence[Mapping[str, Any]]:
    """Every method on every link; first the unshaped one, where methods train.

    Raises:
      ExperimentError: If an option is invalid, or PyTorch is required and not installed.
    """
    if config.workers < 2:
        raise ExperimentError("--workers must be at least 2.")
    check_delay(config.delay)
    names = methods(config)
    for name in names:
        check(name)
    for name in config.confirm:  # A method that does not train is ignored, an unknown one is not.
        if name not in PEERS:
            find(name)
    if not {*REFERENCES} & {*names}:
        raise ExperimentError("--methods needs ddp or mean, whose loss defines the target.")
    return [{"link": link.name, "method": name} for link in links(config) for name in names]


def trains(config: Any, setting: Mapping[str, Any]) -> bool:
    """Whether a setting is a training; otherwise it only has step times."""
    return setting["link"] == UNSHAPED and setting["method"] == trained_as(
        setting["method"], methods(config)
    )


def grid(config: Any, setting: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]] | None:
    """The learning rates of a training; None for step times."""
    if not trains(config, setting):
        return None
    return {"learning_rate": (tuple(sorted({*config.learning_rates})),)}


@functools.cache
def _lab(config: Any) -> Lab:
    return Lab(config, MODEL, OPTIMIZER)


def train(config: Any, setting: Mapping[str, str]) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """The trainer of one method on one link."""
    (link,) = (link for link in links(config) if link.name == setting["link"])
    name, lab = setting["method"], _lab(config)
    period = 1 if name in PEERS else find(name).period
    limits = Limits(config.timed_steps, config.seconds, config.drift, config.attempts)

    def curve(link: Link, parameters: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
        lab.network.shape(link)
        return lab.group(name).ask(
            "train",
            seconds=TRAINING_SECONDS,
            method=name,
            learning_rate=parameters["learning_rate"],
            optimizer=OPTIMIZER,
            **arguments,
        )[0]

    def trainer(
        setting: Mapping[str, str], seed: int, parameters: Mapping[str, Any], *, validation: bool
    ) -> Iterator[Mapping[str, Any]]:
        if validation:
            steps = config.trial_steps
            tried = curve(
                Link(), parameters, steps=steps, seed=seed, evaluate_every=steps, split="validation"
            )
            yield {"validation_loss": tried["evaluated"][-1]}
            return
        found: dict[str, Any] = {}
        if trains(config, setting):
            every = max(1, config.steps // config.points)
            done = curve(link, parameters, steps=config.steps, seed=seed, evaluate_every=every)
            for step, loss in zip(done["steps"], done["evaluated"], strict=True):
                yield {"step": step, "held_out": loss}
            found = {"held_out": loss, "trained_seconds": done["seconds"][-1]}
        found |= lab.time_steps(name, link, period, limits)
        if link.rate != UNSHAPED:
            found["megabits"] = bits_per_second(link.rate) / 1e6
        if steps := parameters.get("confirmed_steps"):
            done = curve(link, parameters, steps=steps, seed=seed, evaluate_every=steps)
            found["confirmed_seconds"] = done["seconds"][-1]
            found["confirmed_loss"] = done["evaluated"][-1]
        yield found

    return trainer
