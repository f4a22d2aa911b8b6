"""Small networks, one for each dataset. Inputs are bytes, which the networks scale themselves."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen


class ConvolutionalNetwork(linen.Module):
    """Two 3 x 3 convolutions, each followed by pooling, and two dense layers.

    Attributes:
      peak: The largest value of a pixel.
      channels: Of the first convolution; the second has twice as many.
      hidden: Width of the dense layer.
      classes: Width of the output.
    """

    peak: float
    channels: int = 8
    hidden: int = 128
    classes: int = 10

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """uint8[batch, height, width, colours] -> float32[batch, classes]."""
        x = images.astype(jnp.float32) / self.peak
        for channels in (self.channels, 2 * self.channels):
            x = linen.relu(linen.Conv(channels, (3, 3))(x))
            x = linen.max_pool(x, (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(self.hidden)(x.reshape(x.shape[0], -1)))
        return linen.Dense(self.classes)(x)


class ByteModel(linen.Module):
    """An embedding and two causal convolutions over bytes: the next byte from the last seven.

    Attributes:
      width: Of the embedding and of the hidden layers.
    """

    width: int = 32

    @linen.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        """uint8[batch, length] -> float32[batch, length, 256]."""
        x = linen.Embed(256, self.width)(text.astype(jnp.int32))
        for dilation in (1, 2):
            convolution = linen.Conv(
                self.width, (3,), kernel_dilation=(dilation,), padding="CAUSAL"
            )
            x = x + linen.relu(convolution(x))
        return linen.Dense(256)(x)


MODELS: dict[str, Callable[[], linen.Module]] = {
    "digits": lambda: ConvolutionalNetwork(peak=16.0),
    "mnist": lambda: ConvolutionalNetwork(peak=255.0, hidden=32),
    "cifar10": lambda: ConvolutionalNetwork(peak=255.0, hidden=32),
    "text": ByteModel,
}
