"""Letters and digits in the fonts that matplotlib installs: 10416 images of 32 x 32 pixels."""

import itertools
import string
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import Dataset

SIDE = 32
CHARACTERS = string.digits + string.ascii_letters
SIZES = (18, 21, 24, 27)  # Pixels per em.
REPETITIONS = 2
LARGEST_SHIFT = 2  # Pixels.
SHIFT_SEED = 0
_CUTS = {
    "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
    "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
    "cm": ("r10", "b10", "ss10", "ti10", "tt10"),
}
FONTS = tuple(family + cut for family, cuts in _CUTS.items() for cut in cuts)
TEST_FONTS = ("DejaVuSansMono-Bold", "DejaVuSerif", "STIXGeneralBolIta", "cmtt10")


def _draw(character: str, font: ImageFont.FreeTypeFont, shift: np.ndarray) -> np.ndarray:
    image = Image.new("L", (SIDE, SIDE))
    position = (SIDE // 2 + int(shift[0]), SIDE // 2 + int(shift[1]))
    ImageDraw.Draw(image).text(position, character, fill=255, font=font, anchor="mm")
    return np.asarray(image)


def load_glyphs(data: Path | None) -> Dataset:
    """8432 training images in 17 fonts and 1984 test images in 4 others, uint8[..., 32, 32, 1].

    The 62 labels are the digits, then the letters. Every character is drawn twice per font in 4
    sizes, each time with a random shift of at most 2 pixels, the same for all seeds. Other cuts of
    the families of the test fonts are in the training set. Images differ slightly between versions
    of Pillow.

    Raises:
      ExperimentError: If `data` is not None.
    """
    if data is not None:
        raise ExperimentError("--dataset glyphs is drawn from installed fonts and takes no --data.")
    import matplotlib

    folder, rng = (
        Path(matplotlib.get_data_path(), "fonts", "ttf"),
        np.random.default_rng(SHIFT_SEED),
    )

    def images(fonts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        drawn = [
            _draw(character, font, rng.integers(-LARGEST_SHIFT, LARGEST_SHIFT, 2, endpoint=True))
            for name, size in itertools.product(fonts, SIZES)
            for font in [ImageFont.truetype(folder / f"{name}.ttf", size)]
            for _, character in itertools.product(range(REPETITIONS), CHARACTERS)
        ]
        labels = np.tile(np.arange(len(CHARACTERS)), len(drawn) // len(CHARACTERS))
        return np.stack(drawn)[..., None], labels.astype(np.int32)

    train_fonts = tuple(name for name in FONTS if name not in TEST_FONTS)
    return Dataset(*images(train_fonts), *images(TEST_FONTS))
