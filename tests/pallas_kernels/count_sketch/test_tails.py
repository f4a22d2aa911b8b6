"""Errors on structured inputs have no heavier tails over seeds than those of random hashing.

The mean of the error over seeds is that of theory even for hashes that keep structure, but then a
few draws are worse than it by far. So these tests look at the largest of many draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import count_sketch
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.tiling import Key
from tests.slow import slow

DRAWS = 200
SEEDS = jax.random.bits(jax.random.key(7), (DRAWS, 2), jnp.uint32)
UNITS, SLOTS = 1024, 64


def energies(units: int, slots: int) -> dict[str, np.ndarray]:
    """By structure, the energy of each of `units` units: tiles, or blocks of elements."""
    i = np.arange(units)
    per_slot = units // slots
    layer = units // 16
    return {
        "one layer": (i >= 4 * layer) & (i < 5 * layer),
        "one layer, unaligned": (i >= 4 * layer + 37) & (i < 5 * layer + 37),
        "two layers": (i // (layer // 2) == 3) | (i // (layer // 2) == 20),
        "stride of the slots": i % slots == 5,
        "stride of the slots, plus one": i % (slots + 1) == 5,
        "stride of the tiles per slot": i % per_slot == 3,
        "every fourth": i % 4 == 1,
        "power law by position": 1 / (1 + i),
        "power law, two layers": 1 / (1 + i % (units // 2)),
        "embedding rows": np.isin(i // 2, (np.arange(1, 17) ** 2 * 7) % (units // 2)),
        "first of each layer": i % layer < 4,
        "both ends": (i < layer // 2) | (i >= units - layer // 2),
    }


STRUCTURES = [*energies(UNITS, SLOTS)]


@functools.partial(jax.jit, static_argnames=("tiles", "slots"))
def slots_of_all(tiles: int, slots: int) -> jax.Array:
    """The slot of each tile in one row of every draw, [draws, tiles]."""
    shapes = tiling.tiling(tiles * 1024, slots * 1024, 1)

    def draw(seeds: jax.Array) -> jax.Array:
        key = Key(*tiling.keys(seeds, 1)[0])
        return tiling.slot_of(shapes, key, jnp.arange(tiles, dtype=jnp.uint32))

    return jax.vmap(draw)(SEEDS)


def ratios(slot: np.ndarray, energy: np.ndarray, slots: int) -> np.ndarray:
    """In each draw, the error of the nonzero tiles over its mean for slots drawn at random."""
    on = (energy != 0).astype(np.float64)
    loads, numbers = (
        np.stack([np.bincount(draw, weights, slots) for draw in slot]) for weights in (energy, on)
    )
    own = (on * energy).sum()
    return ((loads * numbers).sum(axis=1) - own) / ((on.sum() * energy.sum() - own) / slots)


def deviation(energy: np.ndarray, slots: int) -> float:
    """The standard deviation of that ratio for slots that are drawn at random.

    Whether two tiles share a slot is independent for any two pairs. A pair adds the energy of the
    first if the second is on, and the other way round.
    """
    on = (energy != 0).astype(np.float64)
    pair = np.triu(np.outer(on, energy) + np.outer(energy, on), 1)
    return float(np.sqrt((pair**2).sum() * (1 / slots) * (1 - 1 / slots)) / (pair.sum() / slots))


def tail(slots: int, probability: float) -> float:
    """How many deviations a sum of squares of loads exceeds its mean by, with this probability.

    The loads are about normal, so the sum is a chi-squared variable of k = slots - 1 degrees, which
    exceeds k by 2 sqrt(k t) + 2 t with probability exp(-t) at most (Laurent and Massart, 2000).
    """
    degrees, t = slots - 1, -np.log(probability)
    return float((2 * np.sqrt(degrees * t) + 2 * t) / np.sqrt(2 * degrees))


@pytest.mark.parametrize(
    ("tiles", "slots"), [(UNITS, SLOTS), slow(UNITS, 8), slow(960, 31), slow(4096, 64)]
)
def test_tiles_have_the_tails_of_random_hashing(tiles: int, slots: int) -> None:
    dealt = np.asarray(slots_of_all(tiles, slots))
    for name, energy in energies(tiles, slots).items():
        sd = deviation(energy, slots)
        ratio = ratios(dealt, energy, slots)
        # One draw of 1000, and one of 1000 of all draws of all structures.
        often, ever = tail(slots, 1e-3), tail(slots, 1e-3 / (DRAWS * 5 * len(STRUCTURES)))
        assert np.quantile(ratio, 0.99) <= 1 + often * sd, name
        assert ratio.max() <= 1 + ever * sd, name
        # Pairs in one round never share a slot.
        assert ratio.mean() <= 1 + 5 * sd / np.sqrt(DRAWS), name


def test_an_affine_map_would_fail() -> None:
    """Tiles of one layer stay an arithmetic progression, which a slot may hold as a whole."""
    draws = np.random.default_rng(1).integers(0, 2**32, (DRAWS, 2))
    place = ((draws[:, :1] | 1) * np.arange(UNITS) + draws[:, 1:]) % UNITS
    energy = energies(UNITS, SLOTS)["one layer"]
    ratio = ratios(place // (UNITS // SLOTS), energy, SLOTS)
    assert ratio.max() > 1 + 4 * tail(SLOTS, 1e-7) * deviation(energy, SLOTS)


SIZE, COLUMNS, ROWS = 2**18, 2**14, 5


@functools.partial(jax.jit, static_argnames="hashing")
def quality(x: jax.Array, hot: jax.Array, hashing: str) -> tuple[jax.Array, jax.Array]:
    """The error of row one over that of theory, and the recall of the hot ones, in every draw."""
    count = jnp.sum(hot)
    theory = jnp.sum(jnp.where(hot, jnp.sum(x**2) - x**2, 0)) / COLUMNS
    options = {"shape": x.shape, "hashing": hashing}

    def draw(seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = count_sketch.encode(x, seeds, rows=ROWS, columns=COLUMNS, hashing=hashing)
        one = count_sketch.encode(x, seeds, rows=1, columns=COLUMNS, hashing=hashing)
        error = jnp.sum(jnp.where(hot, (count_sketch.decode(one, seeds, **options) - x) ** 2, 0))
        median = jnp.abs(count_sketch.decode(table, seeds, estimate="median", **options))
        smallest = jnp.sort(median)[-256]
        return error / theory, jnp.sum(hot & (median >= smallest)) / count

    ratio, recall = jax.lax.map(draw, SEEDS)
    return ratio, recall


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["one layer", "stride of the slots", "power law by position", "embedding rows"]
)
def test_elements_are_found_as_by_random_hashing(name: str) -> None:
    """256 of 2**18 are large, and their signs are random.

    A small coordinate meets large ones in three of five rows with probability 3.7e-5, and with
    equal signs in a quarter of them: 2.4 small ones look large, and half of them displace a large
    one. As many are missed by others, so that recall is 0.993 for slots drawn at random. In
    tiles, groups of coordinates meet: the mean is the same, and the worst draw up to twice as far.
    """
    blocks = SIZE // UNITS
    energy = energies(UNITS, 8)[name]
    order = np.argsort(-energy, kind="stable")
    generator = np.random.default_rng(3)
    if (energy > 0).sum() > 256:  # One element of each of the largest blocks, at the same place.
        where = order[:256] * blocks + 77
    else:
        units = np.flatnonzero(energy)
        where = (units[:, None] * blocks + np.arange(-(-256 // len(units)))).ravel()[:256]
    x = generator.normal(size=SIZE) * 0.01
    x[where] = generator.choice([-1.0, 1.0], 256)
    hot = np.zeros(SIZE, bool)
    hot[where] = True
    arguments = jnp.asarray(x, jnp.float32), jnp.asarray(hot)
    found = {}
    for hashing in ("tiles", "elements"):
        ratio, recall = map(np.asarray, quality(*arguments, hashing))
        found[hashing] = recall
        assert ratio.mean() <= 1 + 5 * ratio.std() / np.sqrt(DRAWS)
        assert ratio.max() <= 8  # Tiles that are only rolled reach 17.
    error = 5 * (found["tiles"].std() + found["elements"].std()) / np.sqrt(DRAWS)
    assert found["tiles"].mean() >= found["elements"].mean() - error
    # Of 200 draws of a Poisson variable of mean 1.8, one in 100 has more than 9.
    assert found["elements"].min() >= 1 - 9 / 256
    assert found["tiles"].min() >= 1 - 18 / 256
