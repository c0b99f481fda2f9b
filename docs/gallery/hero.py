"""Puts the picture at the head of the README together from committed ones: `make gallery`."""

from __future__ import annotations

import pathlib
import sys

import make
from matplotlib.figure import Figure
from PIL import Image

from vit_jax.viz import figures

DOCS = pathlib.Path(__file__).resolve().parents[1]
# For either column: titles, pictures, and the part of each: left, top, right, bottom as shares.
COLUMNS = (
    (
        ('where it looks', 'attention.png', (0, 0.727, 1, 1)),
        ('what it finds', 'boxes.png', (0, 0.047, 1, 0.466)),
    ),
    (
        ('what it makes of what it sees', 'reconstruction.png', (0, 0.04, 1, 0.5)),
        ('how it scales', 'scaling_cifar10.png', (0, 0.045, 1, 0.735)),
    ),
)
WIDTH, TITLE = 13.0, 0.35  # inches


def main(out: str) -> None:
    """Draws those parts whose pictures there are, both columns equally high."""
    columns = [
        [(title, cut(Image.open(DOCS / name).convert('RGB'), box)) for title, name, box in column]
        for column in ([part for part in c if (DOCS / part[1]).exists()] for c in COLUMNS)
    ]
    slopes = [sum(image.height / image.width for _, image in column) for column in columns]
    # width_0 * slope_0 + titles_0 = width_1 * slope_1 + titles_1
    titles = [TITLE * len(column) for column in columns]
    first = (WIDTH * slopes[1] + titles[1] - titles[0]) / sum(slopes)
    widths, tall = (first, WIDTH - first), first * slopes[0] + titles[0]
    figure = Figure(figsize=(WIDTH, tall))
    for column, left, width in zip(columns, (0, first), widths, strict=True):
        top = tall
        for title, image in column:
            height = width * image.height / image.width
            place = left / WIDTH, (top - TITLE - height) / tall, width / WIDTH, height / tall
            axes = figure.add_axes(place)
            axes.imshow(image, interpolation='antialiased', aspect='auto')
            axes.set_axis_off()
            at = (left + 0.08) / WIDTH, (top - 0.24) / tall
            figure.text(*at, title, fontsize=13, fontweight='bold', color=figures.INK)
            top -= TITLE + height
    path = pathlib.Path(out)
    before = path.read_bytes() if path.exists() else None
    figures.save(figure, out, dpi=84)
    make.keep(path, before)


def cut(image: Image.Image, box: tuple[float, float, float, float]) -> Image.Image:
    """The part of an image that the shares of its width and height enclose."""
    width, height = image.size
    left, top, right, bottom = box
    return image.crop(
        (round(left * width), round(top * height), round(right * width), round(bottom * height))
    )


if __name__ == '__main__':
    main(sys.argv[1])
