"""Images that timm prepares for evaluation, in every way that its config.json describes.

timm needs torchvision, so checksums of its images are stored. As a command this module asks it
again:

    python tests/helpers/timm_images.py > tests/golden/timm_images.json
"""

from __future__ import annotations

import itertools
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

GOLDEN = Path(__file__).parents[1] / 'golden' / 'timm_images.json'
CONTROL = 'Pillow'  # the name of a checksum of Pillow's own resampling
MEAN = (0.485, 0.456, 0.406)
CASES = [
    {
        'crop_pct': share,
        'crop_mode': mode,
        'interpolation': method,
        'input_size': [3, *size],
        'mean': MEAN,
    }
    for share, mode, method, size in itertools.product(
        (0.875, 0.9, 0.95, 1.0),
        ('center', 'squash', 'border'),
        ('bicubic', 'bilinear'),
        ((33, 33), (24, 37)),
    )
]


def photos(count: int = 40) -> list[np.ndarray]:
    """Images of so many sizes, some smaller than what is made of them."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 90, (count, 2))
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def checksum(images: Iterable[np.ndarray]) -> int:
    """Of the bytes of all of them."""
    total = 0
    for image in images:
        total = zlib.crc32(np.ascontiguousarray(image), total)
    return total


def control() -> int:
    """A checksum that differs if Pillow resamples otherwise than where the others were made."""
    return checksum(
        np.asarray(Image.fromarray(photo).resize((37, 24), method))
        for photo in photos()
        for method in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR)
    )


def name(case: Mapping[str, Any]) -> str:
    """The key of a case in the stored file."""
    words = [case[key] for key in ('crop_pct', 'crop_mode', 'interpolation')]
    return ' '.join(map(str, [*words, *case['input_size'][1:]]))


def prepare(case: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    """timm's own function from bytes to bytes, [H W C]."""
    from timm.data import create_transform

    made = create_transform(**case, std=MEAN, normalize=False)
    return lambda photo: made(Image.fromarray(photo)).numpy().transpose(1, 2, 0)


if __name__ == '__main__':
    found = {name(case): checksum(map(prepare(case), photos())) for case in CASES}
    sys.stdout.write(json.dumps({CONTROL: control(), **found}, indent=1) + '\n')
