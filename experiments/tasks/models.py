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
        parts = [
            padded[:, *(slice(at, at + n) for at, n in zip(each, x.shape[1:-1], strict=True))]
            for each in itertools.product(*(range(0, n + 1, self.dilation) for n in reach))
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


MODELS: dict[str, Callable[[Dataset], linen.Module]] = {
    "digits": lambda dataset: ConvolutionalNetwork(peak=16.0),
    "glyphs": lambda dataset: ConvolutionalNetwork(peak=255.0, hidden=32, classes=62),
    "text": lambda dataset: ByteModel(),
    "words": lambda dataset: WordModel(dataset.words),
}
