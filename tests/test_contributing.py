"""The guides for methods use public names only; what they build holds the laws."""

import ast
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip, hierarchical, synchronization
from jaxcomm.catalogue import LARGE, METHODS, Method, _dense, _parameters
from jaxcomm.testing import check_aggregator, check_codec, check_gossip
from tests.cases import _case, _gossip, _local, _quantized, page
from tests.gossip import oracle
from tests.imports import imported

GUIDES = pathlib.Path(__file__).parents[1] / "docs" / "contributing"
NAMES = ("codec", "aggregator", "gossip", "local_method")


PLACES = {  # Of the entries that a guide shows beside its module.
    "codec": (_dense, _quantized),
    "aggregator": (_dense, _quantized),
    "gossip": (_parameters, oracle, _gossip),
    "local_method": (_parameters, _local),
}


def blocks_of(guide: str) -> list[str]:
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def module_of(guide: str) -> str:
    """The first example of a guide, a module."""
    return blocks_of(guide)[0]


def built(guide: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(module_of(guide), guide, "exec"), names)
    return names


@pytest.mark.parametrize("guide", NAMES)
def test_a_guide_imports_public_names_only(guide: str) -> None:
    ours = [name for name in imported(module_of(guide)) if name.startswith("jaxcomm")]
    assert ours and not [name for name in ours if "._" in name]


@pytest.mark.parametrize("guide", NAMES)
def test_the_entries_of_a_guide_are_entries(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are evaluated where they belong; the catalogue's builds what its call is."""
    own = built(guide)
    names = {name: value for module in PLACES[guide] for name, value in vars(module).items()} | own
    for module in (jaxcomm, gossip, synchronization, oracle):
        for name, value in own.items():
            monkeypatch.setattr(module, name, value, raising=False)
    entries: list[Any] = []
    for block in blocks_of(guide)[1:]:
        if block.startswith("def "):
            exec(block, names)
            monkeypatch.setattr(oracle, "damped", names["damped"], raising=False)
            continue
        parsed: Any = ast.parse(f"[{block}]", mode="eval").body
        for entry in parsed.elts:
            entries.append(eval(ast.unparse(entry), names))
            if isinstance(entries[-1], Method):
                catalogue = {**METHODS, entries[-1].name: entries[-1]}
                for module in (_gossip, _local, _case):
                    monkeypatch.setattr(module, "METHODS", catalogue, raising=False)
    method, case = entries
    assert method.name == case.name
    given = {**page.names(10**4), **own, "jaxcomm": jaxcomm}
    assert type(eval(method.call, given)) is type(rebuilt(method))


def rebuilt(method: Method) -> Any:
    return method.build(LARGE, **({"period": 2} if method.kind == "local" else {}))


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
