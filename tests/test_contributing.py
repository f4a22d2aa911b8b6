"""The guides for methods use public names only; what they build holds the laws."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip, hierarchical
from jaxcomm.testing import check_aggregator, check_codec, check_gossip
from tests.imports import imported

GUIDES = pathlib.Path(__file__).parents[1] / "docs" / "contributing"
NAMES = ("codec", "aggregator", "gossip", "local_method")


def module_of(guide: str) -> str:
    """The first example of a guide, a module."""
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]


def built(guide: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(module_of(guide), guide, "exec"), names)
    return names


@pytest.mark.parametrize("guide", NAMES)
def test_a_guide_imports_public_names_only(guide: str) -> None:
    ours = [name for name in imported(module_of(guide)) if name.startswith("jaxcomm")]
    assert ours and not [name for name in ours if "._" in name]


def test_the_codec_satisfies_the_laws() -> None:
    check_codec(built("codec")["noisy_signs"]())


def test_the_aggregator_satisfies_the_laws_and_nests() -> None:
    median = built("aggregator")["median"]
    check_aggregator(median())
    check_aggregator(median(), workers=1, resolution=0.0)
    nested = hierarchical(median("ici"), jaxcomm.mean("dcn"))
    average = jax.vmap(lambda x: nested.update(x, nested.init(x))[0], axis_name="ici")
    given = jnp.array([[1.0, 2.0, 9.0], [0.0, 4.0, 5.0]])
    np.testing.assert_allclose(jax.vmap(average, axis_name="dcn")(given), 3.0)


def test_the_gossip_method_satisfies_the_laws() -> None:
    check_gossip(built("gossip")["damped_dpsgd"](gossip.ring(4), step_size=0.5))


def test_the_local_method_moves_part_of_the_way() -> None:
    scaled = built("local_method")["scaled_local_sgd"]
    tx = optax.chain(optax.sgd(1.0), scaled(period=1, learning_rate=0.5))
    params = jaxcomm.replicate(jnp.zeros(1), 2)
    step = jaxcomm.simulate(lambda w, x: jnp.sum(w) * jnp.mean(x), tx, 2)
    after, *_ = step(params, jaxcomm.init(tx, params, 2), jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(after.per_worker["data"], -1.0, atol=1e-6)
