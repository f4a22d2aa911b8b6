"""Wrong options of studies that would end in other numbers, or in an error after hours."""

from typing import Any

import pytest

from experiments.errors import ExperimentError
from experiments.studies import load


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("survey", {"methods": ("mean:8",)}, "the method 'mean' takes no bits"),
        ("survey", {"batch": 1408}, "--batch 1408 exceeds the 1150 training examples"),
        ("estimate", {"devices": 1}, "an estimate requires at least 2 workers"),
        ("gossip", {"methods": ("foo",)}, "--methods must be of dpsgd, .*matcha.* got 'foo'"),
        ("gossip", {"batch": 100}, "--batch 100 is not divisible by 8 workers"),
        ("gossip", {"steps": 30}, "--steps 30 is not divisible by twice --log-every 20"),
        ("convergence", {"workers": (12,)}, "--workers must be powers of 2"),
        ("convergence", {"steps": 100}, "--steps 100 is not divisible by 256"),
        ("budgets", {"steps": 30}, "--steps 30 is not divisible by 20"),
        ("pace", {}, "at least two processes"),
        (
            "lab",
            {"methods": ("mean",), "between": ("1gbit",), "workers": 3},
            "and even with --between",
        ),
        ("lab", {"methods": ("mean",), "workers": 1}, "--workers must be at least 2"),
        ("loss", {"methods": ("mean", "hierarchical")}, "--methods has hierarchical, which needs"),
        ("loss", {"methods": ("mean_bfloat16",)}, "--methods needs mean, whose steps define"),
    ],
    ids=str,
)
def test_mistakes(name: str, options: dict[str, Any], message: str) -> None:
    study = load(name)
    with pytest.raises(ExperimentError, match=message):
        study.settings(study.config(**options))
