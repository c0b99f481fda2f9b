"""Labels in pictures: their colors, and places where they hide little."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SIZE = 8.0  # points of the labels' letters
SMALL = 5.0  # of the letters of labels of objects narrower than their labels, and in small images
# The most luminance behind white letters: a contrast of 4.5, as W3C requires (WCAG 2.1, 1.4.3).
LUMINANCE = 1.05 / 4.5 - 0.05
GAMMA = 2.2

Box = tuple[float, float, float, float]  # x, y, width, height
Color = tuple[float, float, float]


def room_of(text: str, inch: float, points: float = SIZE) -> tuple[float, float]:
    """Width and height in pixels of a label in letters of this size, at `inch` pixels an inch."""
    return (0.6 * points * len(text) + 4) / 72 * inch, (1.25 * points + 3) / 72 * inch


def write(
    axes: Axes, place: Box, text: str, ground: Color, inch: float, points: float = SIZE
) -> None:
    """Write white letters on the color `ground`, in a place of `find_place`."""
    axes.text(
        place[0] + 2 / 72 * inch,
        place[1] + place[3] / 2,
        text,
        va='center',
        fontsize=points,
        color='white',
        bbox={'facecolor': ground, 'edgecolor': 'none', 'pad': 1.0 if points < SIZE else 1.5},
    )


def find_place(
    box: Box,
    room: tuple[float, float],
    size: tuple[float, float],
    taken: Sequence[Box],
    boxes: Sequence[Box] = (),
) -> Box:
    """The place of a label of this width and height: beside or in its box, within the image, where
    it covers least of other labels and of objects, each by the share that is covered.
    """

    def clash(place: Box) -> float:
        labels = sum(overlap(place, other) / math.prod(room) for other in taken)
        return 4 * labels + sum(overlap(place, one) / max(math.prod(one[2:]), 1) for one in boxes)

    return min(_places(box, room, size), key=clash)


def _places(box: Box, room: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Places around and in a box, moved into the image; the best ones first."""
    x, y, width, height = box
    wide, tall = room
    ends = [(left, top) for top in (y - tall, y + height) for left in (x, x + width - wide)]
    inner = [(left, top) for top in (y, y + height - tall) for left in (x, x + width - wide)]
    sides = [(left, top) for left in (x + width, x - wide) for top in (y, y + height - tall)]
    for left, top in (*ends, *inner, *sides):
        inside = max(0, min(left, size[1] - wide)), max(0, min(top, size[0] - tall))
        yield (*inside, *room)


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes have in common."""
    sides = [min(a[i] + a[i + 2], b[i] + b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
    return max(0, sides[0]) * max(0, sides[1])


def color(label: int) -> Color:
    """The color of a class: saturated, dark enough for white letters; neighbors differ most."""
    hue = (0.6 + label * (math.sqrt(5) - 1) / 2) % 1
    rgb = colorsys.hsv_to_rgb(hue, 0.85, 0.75)
    share = min(1, LUMINANCE / luminance(rgb)) ** (1 / GAMMA)
    return rgb[0] * share, rgb[1] * share, rgb[2] * share


def luminance(rgb: Sequence[float]) -> float:
    """The luminance of a color of sRGB, 0 to 1, with its curve approximated by a power."""
    weights = (0.2126, 0.7152, 0.0722)
    return sum(w * c**GAMMA for w, c in zip(weights, rgb, strict=True))
