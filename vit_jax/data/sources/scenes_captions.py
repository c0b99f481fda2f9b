"""`scenes_captions`: one or two colored digits on a textured background, with a caption.

Images with texts without a download: "a red three", "a red three left of a green seven". The digits
are scikit-learn's, enlarged; there are 14,460 captions. `scenes_captions` has 20,000 training
images, `scenes_captions:N` has N; the 500 images of the test split show digits that are not in
training. `scenes_captions:digit` and `scenes_captions:color` have one digit per image, whose name
or color is the class.
"""

from __future__ import annotations

import numpy as np

from vit_jax.data.records import Record, SourceInfo
from vit_jax.data.sources import digits
from vit_jax.data.transforms.pillow import resample
from vit_jax.errors import UserError, nearest

SIZES = {'train': 20_000, 'test': 500}
SIDE = 48  # image side in pixels
HEIGHTS = (19, 22)  # smallest and largest digit, in pixels; each is in a quarter of the image
NAMES = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
COLORS = {
    'red': (235, 50, 50),
    'green': (50, 200, 70),
    'blue': (80, 110, 255),
    'yellow': (245, 220, 60),
    'purple': (190, 70, 220),
    'white': (245, 245, 245),
}
CLASSES = {'digit': NAMES, 'color': tuple(COLORS)}
SINGLE = 0.3  # share of images with a single digit
# For each axis, the relation of the digit with the lower coordinate, and the inverse relation.
RELATIONS = (('above', 'below'), ('left of', 'right of'))


class Source:
    """Records {image, caption}, and {label} if each image has one digit.

    Record i is a function of the split and i.
    """

    def __init__(self, path: str, split: str):
        if split not in SIZES:
            raise UserError('source scenes_captions: ' + nearest('split', split, SIZES))
        if path and path not in CLASSES and not (path.isdecimal() and int(path)):
            raise UserError(
                f"source 'scenes_captions:{path}': write 'scenes_captions', "
                "'scenes_captions:digit', 'scenes_captions:color', or the number of training "
                f"images, such as 'scenes_captions:{SIZES['train']}'"
            )
        self._split, self._kind = split, path if path in CLASSES else ''
        self._length = int(path) if path.isdecimal() and split == 'train' else SIZES[split]
        names = CLASSES.get(self._kind, ())
        self.info = SourceInfo(len(names), names)
        self._digits = digits.Source('', split)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Record:
        if not 0 <= index < self._length:
            raise IndexError(index)
        rng = np.random.default_rng((list(SIZES).index(self._split), index, bool(self._kind)))
        image = _ground(rng)
        quarter = rng.integers(0, 2, 2)
        color, digit = self._draw(rng, image, quarter)
        caption = _describe(color, digit)
        if self._kind:
            label = {'digit': digit, 'color': color}[self._kind]
            return {'image': image, 'caption': caption, 'label': label}
        if rng.random() >= SINGLE:
            axis = int(rng.integers(2))
            is_first_half = quarter[axis] == 0
            quarter[axis] = is_first_half
            other = _describe(*self._draw(rng, image, quarter))
            caption += f' {RELATIONS[axis][0 if is_first_half else 1]} {other}'
        return {'image': image, 'caption': caption}

    def labels(self) -> np.ndarray:
        if not self._kind:
            raise UserError('source scenes_captions: images have captions instead of classes')
        return np.array([self[i]['label'] for i in range(len(self))])

    def record_name(self, index: int, /) -> str:
        return f'scenes_captions {self._split} record {index}'

    def _draw(
        self, rng: np.random.Generator, image: np.ndarray, quarter: np.ndarray
    ) -> tuple[int, int]:
        """Draw a digit into a quarter (row, column) of the image.

        Returns:
          The numbers of its color and class.
        """
        record = self._digits[int(rng.integers(len(self._digits)))]
        height = int(rng.integers(HEIGHTS[0], HEIGHTS[1] + 1))
        width = min(HEIGHTS[1], round(height * rng.uniform(0.85, 1.1)))
        ink = resample(record['image'], height, width, 'bicubic') / 255
        color = int(rng.integers(len(COLORS)))
        tint = np.array(list(COLORS.values())[color]) * rng.uniform(0.85, 1.0)
        y, x = quarter * (SIDE // 2) + rng.integers(0, SIDE // 2 - HEIGHTS[1] + 1, 2)
        window = image[y : y + height, x : x + width]
        window[:] = (window + (tint - window) * np.clip(1.4 * ink, 0, 1)).astype(np.uint8)
        return color, int(record['label'])


def _describe(color: int, digit: int) -> str:
    return f'a {list(COLORS)[color]} {NAMES[digit]}'


def _ground(rng: np.random.Generator) -> np.ndarray:
    """Draw a dark, cloudy background, uint8 [48 48 3]."""
    clouds = resample(rng.integers(0, 256, (5, 5, 1), np.uint8), SIDE, SIDE, 'bicubic') / 255
    first, second = rng.uniform(0, 75, (2, 3))
    noise = rng.normal(0, 5, (SIDE, SIDE, 1))
    return np.clip(first + clouds * (second - first) + noise, 0, 255).astype(np.uint8)
