"""Wrong options of studies that would end in other numbers, or in an error after hours."""

from typing import Any

import pytest

from experiments import studies
from experiments.cli.errors import ExperimentError


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gossip", {"methods": ("foo",)}, "--methods must be of dpsgd, .*matcha.* got 'foo'"),
        ("gossip", {"batch": 100}, "--batch 100 is not divisible by 8 workers"),
        ("gossip", {"batch": 1408}, "--batch 1408 exceeds the 1150 training examples of a trial"),
        ("gossip", {"steps": 30}, "--steps 30 is not divisible by twice --log-every 20"),
        ("gossip", {"graphs": ("ring_8",), "methods": ("d2",)}, "not compared on any of --graphs"),
        ("convergence", {"workers": (12,)}, "--workers must be powers of 2"),
        ("convergence", {"steps": 100}, "--steps 100 is not divisible by 256"),
        ("convergence", {"seeds": 1}, "--seeds must be at least 2"),
        ("stragglers", {"minibatch_size": 1000}, "--minibatch-size 1000 exceeds the"),
        ("lab", {"methods": ("mean",), "between": ("1gbit",), "workers": 3}, "even number of work"),
        ("lab", {"methods": ("mean",), "workers": 1}, "--workers must be at least 2"),
        ("lab", {"methods": ("mean",), "delay": "5"}, "--delay is a number with us, ms or s"),
        ("loss", {"methods": ("mean", "dpsgd")}, "--methods has dpsgd, whose workers have no comm"),
        ("loss", {"methods": ("mean_bfloat16",)}, "--methods needs ddp or mean"),
    ],
    ids=str,
)
def test_mistakes(name: str, options: dict[str, Any], message: str) -> None:
    study = studies.load(name)
    with pytest.raises(ExperimentError, match=message):
        study.settings(study.config(**options))
