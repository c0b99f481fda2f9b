"""`scenes`: handwritten digits on textured backgrounds, with exact boxes and masks.

Detection without a download: scikit-learn's digits are enlarged, tinted and placed on stripes,
checks, rings or clouds. `scenes` has 20,000 training images, `scenes:N` has N; the 500 images of
the test split show digits that are not in training.
"""

from __future__ import annotations

import numpy as np

from vit_jax.data.records import Record, SourceInfo, UnknownSplit
from vit_jax.data.sources import digits
from vit_jax.data.sources.panoptic import boxes_around
from vit_jax.data.transforms.pillow import resample
from vit_jax.errors import UserError

SIZES = {'train': 20_000, 'test': 500}
SIDES = (96, 128)  # shortest and longest image side, in pixels
HEIGHTS = (20, 52)  # smallest and largest digit, in pixels
MOST = 6  # most digits per image
EMPTY = 0.05  # share of images without digits
OVERLAP = 0.2  # largest overlap of two boxes, as a share of the smaller one
GROUNDS = ('stripes', 'checks', 'rings', 'clouds')  # backgrounds


class Source:
    """Records {image, boxes, labels, masks, areas}, see `vit_jax.data.transforms.geometry`.

    Record i is a function of the split and i. A pixel belongs to at most one digit: masks and boxes
    include only the visible part of a digit.
    """

    info = SourceInfo(10, tuple('0123456789'))

    def __init__(self, path: str, split: str):
        if split not in SIZES:
            raise UnknownSplit.from_splits('source scenes', split, SIZES)
        if path and not (path.isdecimal() and int(path)):
            raise UserError(
                f"source 'scenes:{path}': write 'scenes', or the number of training images, such "
                f"as 'scenes:{SIZES['train']}'"
            )
        self._split = split
        self._length = int(path) if path and split == 'train' else SIZES[split]
        self._digits = digits.Source('', split)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Record:
        return self.with_ground(index)[0]

    def with_ground(self, index: int) -> tuple[Record, str]:
        """Make a record, and return its background, one of GROUNDS; IndexError past the end."""
        record, ground, _ = self.draw(index)
        return record, ground

    def draw(self, index: int) -> tuple[Record, str, list[int]]:
        """Make a record, its background, and the height of each digit as if it were fully visible.

        Raises:
          IndexError: past the end.
        """
        if not 0 <= index < self._length:
            raise IndexError(index)
        rng = np.random.default_rng((list(SIZES).index(self._split), index))
        height, width = rng.integers(SIDES[0], SIDES[1] + 1, 2).tolist()
        ground = GROUNDS[rng.integers(len(GROUNDS))]
        pattern = _pattern(rng, ground, height, width)[..., None]
        first, second = self._colors(rng, ground)
        noise = rng.normal(0, 6, (height, width, 1))
        image = np.clip(first + pattern * (second - first) + noise, 0, 255).astype(np.uint8)
        masks, labels, heights = self._place_digits(rng, image)
        if rng.random() < 0.5:
            image = 255 - image
        record = {
            'image': image,
            'boxes': boxes_around(masks),
            'labels': np.array(labels, np.int32),
            'masks': masks,
            'areas': masks.sum((1, 2)).astype(np.float32),
        }
        return record, ground, heights

    def labels(self) -> np.ndarray:
        raise UserError('source scenes: images have any number of digits instead of one class')

    def record_name(self, index: int, /) -> str:
        return f'scenes {self._split} record {index}'

    def _colors(self, rng: np.random.Generator, ground: str) -> np.ndarray:
        """Draw the two dark colors [2 3] of a background, independent of its kind."""
        del ground
        return rng.uniform(20, 120, (2, 3))

    def _place_digits(
        self, rng: np.random.Generator, image: np.ndarray
    ) -> tuple[np.ndarray, list[int], list[int]]:
        """Draw digits into the image, and return masks [N H W], classes and heights."""
        masks = np.zeros((MOST, *image.shape[:2]), bool)
        corners: list[tuple[int, ...]] = []
        labels: list[int] = []
        requested = 0 if rng.random() < EMPTY else int(rng.integers(1, MOST + 1))
        for _ in range(requested):
            record = self._digits[int(rng.integers(len(self._digits)))]
            ink = _ink(rng, record['image'])
            y, x = (int(rng.integers(n - m + 1)) for n, m in zip(image.shape, ink.shape))  # noqa: B905
            box = (y, x, y + ink.shape[0], x + ink.shape[1])
            if any(_overlap(box, other) > OVERLAP for other in corners):
                continue  # crowded images get fewer digits than wanted
            window = slice(y, box[2]), slice(x, box[3])
            is_ink = ink >= 0.5
            masks[(slice(len(labels)), *window)] &= ~is_ink
            masks[(len(labels), *window)] = is_ink
            color = rng.integers(150, 256, 3) * (0.5 + 0.5 * ink[is_ink][:, None])
            image[window][is_ink] = color.astype(np.uint8)
            corners.append(box)
            labels.append(record['label'])
        heights = [bottom - top for top, _, bottom, _ in corners]
        return masks[: len(labels)], labels, heights


def _ink(rng: np.random.Generator, digit: np.ndarray) -> np.ndarray:
    """Resize a digit [8 8 1], without empty margins, to a random aspect ratio; 0 to 1."""
    height = int(rng.integers(HEIGHTS[0], HEIGHTS[1] + 1))
    width = max(1, round(height * rng.uniform(0.7, 1.1)))
    ink = resample(digit, height, width, 'bicubic')[..., 0] / 255
    rows, columns = (np.flatnonzero((ink >= 0.5).any(axis)) for axis in (1, 0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _pattern(rng: np.random.Generator, kind: str, height: int, width: int) -> np.ndarray:
    """Draw a background, one of GROUNDS, 0 to 1."""
    if kind == 'clouds':
        return resample(rng.integers(0, 256, (5, 5, 1), np.uint8), height, width, 'bicubic')[
            ..., 0
        ] / np.float64(255)
    y, x = np.mgrid[:height, :width]
    angle, period = rng.uniform(0, np.pi), rng.uniform(6, 30)
    along = (x * np.cos(angle) + y * np.sin(angle)) / period
    across = (y * np.cos(angle) - x * np.sin(angle)) / period
    if kind == 'stripes':
        return 0.5 + 0.5 * np.sin(2 * np.pi * along)
    if kind == 'checks':
        return (np.floor(along) + np.floor(across)) % 2
    center = rng.uniform(0, 1, 2) * (height, width)
    return 0.5 + 0.5 * np.sin(2 * np.pi * np.hypot(y - center[0], x - center[1]) / period)


def _overlap(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Compute the intersection of two boxes (y0, x0, y1, x1) as a share of the smaller one."""
    sides = [max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1)]
    return sides[0] * sides[1] / min((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b))
