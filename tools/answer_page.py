"""Writes the page "Should I compress?" as one file, with the numbers of jaxcomm.

    python tools/answer_page.py FILE [ADDRESS OF THE FIRST PAGE]

Its sources are in `docs/answer/`. No number of a method is typed there: this program traces every
method of `jaxcomm.advise` for a few models and numbers of workers, and the page interpolates.
"""

import html
import itertools
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.advise import _advise
from jaxcomm.compression._bits import MOST
from jaxcomm.compression.quantizers._dither import DEFAULT_LEVELS, choose_field
from jaxcomm.perf import _link, _predict
from jaxcomm.perf._link import DEVICES, LINKS
from jaxcomm.perf._recommended import Method, error_of, recommended

SOURCES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "answer"
SCRIPTS = ("model.js", "inputs.js", "picture.js", "page.js")
HOME = "../index.html"
NAVIGATION = {
    "Should I compress?": "",
    "Getting started": "getting_started.html",
    "How to choose": "which_method.html",
    "Concepts": "concepts.html",
    "How-tos": "tutorials/index.html",
    "Methods": "methods.html",
    "API reference": "api/index.html",
    "Results": "results.html",
}
"""The bar of links, as on all other pages: texts, and pages of the site."""
FSDP = "tutorials/fsdp.html"

MOST_WORKERS = 10**6
DEFAULT_DEVICE = "a100"
DTYPES = ("float32", "bfloat16")

COUNTS = tuple(
    _advise.LAYERS * side**2 + rest
    for side, rest in ((20_000, 0), (40_000, 0), (20_000, 400_000), (1000, 0))
)
"""Models that are traced: square matrices, and a vector of what is left; in a small one, messages
are padded noticeably."""

NOTICEABLE = 5e-3


def features_of(count: int, workers: int) -> np.ndarray:
    """What amounts depend on: parameters, rows of all matrices, parameters of the vector, and 1.

    Then the same per worker.
    """
    shapes = _advise.shapes_of_count(count).values()
    rows = sum(leaf.shape[0] for leaf in shapes if leaf.ndim > 1)
    rest = sum(leaf.shape[0] for leaf in shapes if leaf.ndim == 1)
    return np.outer([1, 1 / workers], [count, rows, rest, 1]).ravel()


def fit(features: np.ndarray, amounts: np.ndarray) -> list[float]:
    """Coefficients of features [points, features]; 0 for features that are never noticeable."""
    relative = features / np.where(amounts, amounts, 1)[:, None]
    wanted = amounts != 0
    scale = np.abs(relative).max(axis=0)
    first, *_ = np.linalg.lstsq(relative / scale, wanted)
    kept = (np.abs(relative / scale * first) > NOTICEABLE).any(axis=0)
    found, *_ = np.linalg.lstsq((relative / scale)[:, kept], wanted)
    coefficients = np.zeros(len(kept))
    coefficients[kept] = found / scale[kept]
    return [float(f"{each:.9g}") for each in coefficients]


def traced(method: Method, count: int, dtype: str, workers: int) -> list[float]:
    """Bytes and messages per other worker, bytes in the buffers of a step, and of the state."""
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, dtype)
        for name, leaf in _advise.shapes_of_count(count).items()
    }
    leaves, structure = jax.tree.flatten(shapes)
    account, state = _predict.traced(method.tx, tuple(leaves), structure, (("data", workers),))
    payload = sum(c.times * math.prod(c.shape) * c.dtype.itemsize for c in account.collectives)
    others = workers - 1
    return [account.bytes_per_worker / others, account.messages / others, payload, state]


def amounts(index: int, dtype: str, workers: Sequence[int]) -> dict[str, Any]:
    """What a method sends and keeps, as coefficients of `features_of`.

    Args:
      index: The number of the method.
      dtype: That of the gradients.
      workers: Two numbers of workers; if they are equal, the coefficients are for these only.
    """
    first = recommended("data", workers[0])[index], COUNTS[0]
    if traced(*first, dtype, workers[0]) == traced(*first, DTYPES[0], workers[0]):
        dtype = DTYPES[0]  # Most methods send as much, and these are traced.
    points = [*itertools.product(COUNTS, workers)]
    features = np.array([features_of(count, n) for count, n in points])
    found = [traced(recommended("data", n)[index], count, dtype, n) for count, n in points]
    sent, messages, payload, state = np.array(found).T
    return {
        "bytes": fit(features, sent),
        "messages": float(messages[0]),
        "payload": fit(features, payload),
        "state": fit(features, state),
    }


def ranges(sharing: int) -> list[tuple[int, int]]:
    """Numbers of workers, first to last, with which a method has the same program.

    Only the bits of fields that are summed depend on them.
    """
    if sharing == 1:
        return [(2, MOST_WORKERS)]
    groups = itertools.groupby(
        range(2, 2**15), lambda n: choose_field(DEFAULT_LEVELS, None, n).width
    )
    firsts = [next(each) for _, each in groups]
    return [*zip(firsts, [first - 1 for first in firsts[1:]] + [MOST_WORKERS], strict=True)]


def methods() -> Iterator[dict[str, Any]]:
    """The methods that `advise` compares, and what it knows of them."""
    for index, method in enumerate(recommended("data", 2)):
        most = _advise.MOST
        try:
            error_of(method.claims, MOST + 1, 2)
        except ValueError:  # Then `advise` omits it for a larger model.
            most = MOST
        yield {
            "line": method.code,
            "started": method.paste,
            "period": method.period,
            "aggregator": method.aggregator,
            "optimizer": method.optimizer,
            "steps": method.steps,
            "risk": method.risk,
            "overlaps": method.overlaps,
            "most_params": most,
            "amounts": [
                {
                    "most_workers": last,
                    **{x: amounts(index, x, (first, min(last, 16 * first))) for x in DTYPES},
                }
                for first, last in ranges(method.sharing)
            ],
        }


def numbers() -> dict[str, Any]:
    """Everything that the page needs of jaxcomm."""
    return {
        "methods": [*methods()],
        "itemsizes": {dtype: jnp.dtype(dtype).itemsize for dtype in DTYPES},
        "devices": {name: device.memory_bytes_per_second for name, device in DEVICES.items()},
        "default_device": DEFAULT_DEVICE,
        "links": {
            name: {
                "bandwidth": f"{8e-9 * link.bytes_per_second:g}Gbit",
                "latency": f"{1e6 * link.latency:g}us",
            }
            for name, link in LINKS.items()
        },
        "units": {"counts": _advise._FACTORS, "seconds": _link.SECONDS, "rates": _link._RATES},
        "layers": _advise.LAYERS,
        "levels": {
            "levels": DEFAULT_LEVELS,
            "widths": [
                {"most_workers": last, "width": choose_field(DEFAULT_LEVELS, None, first).width}
                for first, last in ranges(2)
            ],
        },
        "most_params": _advise.MOST,
        "most_of_leaf": _advise.MOST_OF_LEAF,
        "most_workers": MOST_WORKERS,
        "efficiency": _predict.EFFICIENCY,
        "backward": _predict.BACKWARD,
        "last_bucket_bytes": _predict.BUCKET_BYTES,
        "near": _advise.NEAR,
    }


def navigation(home: str) -> str:
    """The bar of links of the page, whose own is not a link elsewhere."""
    lines = [f'  <a href="{html.escape(home)}">jaxcomm</a>']
    for text, target in NAVIGATION.items():
        address = home.removesuffix("index.html") + target if target else "#"
        own = "" if target else ' aria-current="page"'
        lines.append(f'  <a href="{html.escape(address)}"{own}>{html.escape(text)}</a>')
    return "\n".join(lines)


def page(home: str = HOME) -> str:
    """The whole page; it asks for no other file."""
    read = {path.name: path.read_text(encoding="utf-8") for path in SOURCES.iterdir()}
    found = numbers()
    # A browser ends a script at `</`, wherever that is.
    parts = {
        "style": read["style.css"].strip(),
        "script": "\n".join(read[name].strip() for name in SCRIPTS),
        "numbers": json.dumps(found).replace("</", "<\\/"),
        "layers": str(found["layers"]),
        "efficiency": f"{found['efficiency']:.0%}",
        "near": f"{_advise.NEAR - 1:.0%}".replace("%", " %"),
        "fsdp": html.escape(home.removesuffix("index.html") + FSDP),
        "navigation": navigation(home),
    }
    text = read["page.html"]
    for name in parts:
        if f"{{{{{name}}}}}" not in text:
            raise SystemExit(f"docs/answer/page.html must have {{{{{name}}}}}.")
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], text)


def write(path: pathlib.Path, home: str = HOME) -> None:
    """Writes the page, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(home), encoding="utf-8")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *sys.argv[2:])
