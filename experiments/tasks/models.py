"""Small networks, one per dataset. The networks scale inputs of bytes."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen

from experiments.tasks.data import Dataset


class Conv(linen.Module):
    """The convolution of `flax.linen.Conv` with stride 1, as one matrix product.

    It has the same parameters and the same values up to rounding. On CPU, gradients take a third of
    the time, or less if each simulated worker has its own parameters.

    Attributes:
      features: Channels of the output.
      kernel_size: The size of the kernel per dimension.
      dilation: The distance between the elements that a kernel reads.
      is_causal: Whether the output at a position depends on no later input; otherwise the input is
        padded at both sides.
    """

    features: int
    kernel_size: tuple[int, ...]
    dilation: int = 1
    is_causal: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, positions ..., channels] -> [batch, positions ..., features]."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", linen.initializers.lecun_normal(), shape)
        bias = self.param("bias", linen.initializers.zeros, (self.features,))
        reach = [(size - 1) * self.dilation for size in self.kernel_size]
        before = [each if self.is_causal else each // 2 for each in reach]
        sides = [(low, each - low) for low, each in zip(before, reach, strict=True)]
        padded = jnp.pad(x, [(0, 0), *sides, (0, 0)])
        offsets = itertools.product(*(range(0, each + 1, self.dilation) for each in reach))
        parts = [
            padded[:, *(slice(at, at + n) for at, n in zip(each, x.shape[1:-1], strict=True))]
            for each in offsets
        ]
        product = jnp.concatenate(parts, axis=-1) @ kernel.reshape(-1, self.features)
        return product + bias.reshape(*[1] * (x.ndim - 1), -1)


class ConvolutionalNetwork(linen.Module):
    """Two 3 x 3 convolutions, each followed by pooling, and two dense layers.

    Attributes:
      peak: The largest value of a pixel.
      channels: Channels of the first convolution; the second has twice as many.
      hidden: Width of the dense layer.
      classes: Width of the output.
    """

    peak: float
    channels: int = 8
    hidden: int = 128
    classes: int = 10

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """uint8[batch, height, width, colors] -> float32[batch, classes]."""
        x = images.astype(jnp.float32) / self.peak
        for channels in (self.channels, 2 * self.channels):
            x = linen.relu(Conv(channels, (3, 3))(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(self.hidden)(x.reshape(x.shape[0], -1)))
        return linen.Dense(self.classes)(x)


class ByteModel(linen.Module):
    """An embedding and two causal convolutions over bytes: the next byte from the last seven.

    Attributes:
      width: Width of the embedding and of the hidden layers.
    """

    width: int = 32

    @linen.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        """uint8[batch, length] -> float32[batch, length, 256]."""
        x = linen.Embed(256, self.width)(text.astype(jnp.int32))
        for dilation in (1, 2):
            convolution = Conv(self.width, (3,), dilation, is_causal=True)
            x = x + linen.relu(convolution(x))
        return linen.Dense(256)(x)


class WordModel(linen.Module):
    """The next word from a window of words: Bengio's network, with one hidden layer.

    Attributes:
      words: Size of the vocabulary.
      width: Width of the embedding. Its gradient has one nonzero row per distinct word of a batch.
      hidden: Width of the hidden layer.
    """

    words: int
    width: int = 64
    hidden: int = 64

    @linen.compact
    def __call__(self, windows: jax.Array) -> jax.Array:
        """int32[batch, length] -> float32[batch, words]."""
        x = linen.Embed(self.words, self.width)(windows)
        x = linen.relu(linen.Dense(self.hidden)(x.reshape(x.shape[0], -1)))
        return linen.Dense(self.words)(x)


class MatrixFactorization(linen.Module):
    """A rating as the product of the factors of user and item, plus a bias of each.

    Attributes:
      users: The number of users.
      items: The number of items.
      center: The constant to which biases and products are added; not trained.
      width: Width of the embeddings.
    """

    users: int
    items: int
    center: float
    width: int = 16

    @linen.compact
    def __call__(self, pairs: jax.Array) -> jax.Array:
        """int32[batch, 2] -> float32[batch]."""
        user, item = pairs[:, 0], pairs[:, 1]
        small, zero = linen.initializers.normal(0.1), linen.initializers.zeros
        factors = [
            linen.Embed(self.users, self.width, embedding_init=small, name="user")(user),
            linen.Embed(self.items, self.width, embedding_init=small, name="item")(item),
        ]
        # Biases are columns, so they have rows as the factors do.
        biases = [
            linen.Embed(self.users, 1, embedding_init=zero, name="user_bias")(user)[:, 0],
            linen.Embed(self.items, 1, embedding_init=zero, name="item_bias")(item)[:, 0],
        ]
        return self.center + sum(biases) + jnp.sum(factors[0] * factors[1], axis=1)


MODELS: dict[str, Callable[[Dataset], linen.Module]] = {
    "digits": lambda dataset: ConvolutionalNetwork(peak=16.0),
    "glyphs": lambda dataset: ConvolutionalNetwork(peak=255.0, hidden=32, classes=62),
    "mnist": lambda dataset: ConvolutionalNetwork(peak=255.0, hidden=32),
    "cifar10": lambda dataset: ConvolutionalNetwork(peak=255.0, hidden=32),
    "text": lambda dataset: ByteModel(),
    "words": lambda dataset: WordModel(*dataset.sizes),
    "movielens": lambda dataset: MatrixFactorization(
        *dataset.sizes, center=float(dataset.train_labels.mean())
    ),
}
