"""Puts the picture at the head of the README together from committed ones: `make gallery`."""

from __future__ import annotations

import pathlib
import sys

import make
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from vit_jax.scaling import rows, table
from vit_jax.viz import figures

DOCS = pathlib.Path(__file__).resolve().parents[1]
WIDTH, TITLE, GAP = 8.3, 0.34, 0.06  # inches; the README shows a hundred pixels an inch
DPI = 192
# Titles and pictures of the upper row, and the part of each: left, top, right, bottom as shares.
UPPER = (
    ('where it looks', 'attention.png', (0.505, 0.745, 0.745, 0.98)),
    ('', 'attention.png', (0.757, 0.745, 0.997, 0.98)),
    ('what it is shown, sees and reconstructs', 'reconstruction.png', (0.004, 0.041, 0.246, 0.494)),
    ('', 'reconstruction.png', (0.254, 0.041, 0.496, 0.494)),
    ('', 'reconstruction.png', (0.754, 0.041, 0.996, 0.494)),
)
FOUND = ('what it finds', 'boxes.png', (0.677, 0.045, 0.973, 0.42))
LAWS = ('how it scales', 'scaling_cifar10.csv')
LOWER = 2.6


def main(out: str) -> None:
    """Draw five pictures above a detection and scaling laws."""
    side = (WIDTH - GAP * (len(UPPER) - 1)) / len(UPPER)
    tall = 2 * TITLE + side + LOWER + GAP
    figure = Figure(figsize=(WIDTH, tall))
    for i, (title, name, box) in enumerate(UPPER):
        show(add(figure, title, i * (side + GAP), tall - TITLE - side, side, side), cut(name, box))
    title, name, box = FOUND
    image = cut(name, box)
    width = LOWER * image.shape[1] / image.shape[0]
    show(add(figure, title, 0, GAP, width, LOWER), image)
    title, name = LAWS
    left = width + 0.62
    add_laws(add(figure, title, left, 0.42, WIDTH - left - 0.05, LOWER + GAP - 0.42), DOCS / name)
    path = pathlib.Path(out)
    before = path.read_bytes() if path.exists() else None
    figures.save(figure, out, dpi=DPI)
    make.shrink(path)
    make.keep(path, before)


def add(figure: Figure, title: str, left: float, low: float, width: float, tall: float) -> Axes:
    """Axes at a place in inches, below their title."""
    whole = figure.get_size_inches()[1]
    at = max(left - 0.55, 0) if title == LAWS[0] else left
    figure.text(
        (at + 0.04) / WIDTH,
        (low + tall + 0.09) / whole,
        title,
        fontsize=10.5,
        fontweight='bold',
        color=figures.INK,
    )
    return figure.add_axes((left / WIDTH, low / whole, width / WIDTH, tall / whole))


def show(axes: Axes, image: np.ndarray) -> None:
    """Draw a picture that fills its axes."""
    axes.imshow(image, interpolation='antialiased', aspect='auto')
    axes.set_axis_off()


def add_laws(axes: Axes, path: pathlib.Path) -> None:
    """Draw the laws of the table's six models, and the band of the largest of each family."""
    options = table.FitOptions(
        ('data_size',), '1-test/accuracy', by=('model', 'parameters'), form='power'
    )
    curves = table.fit_curves(rows.read_csv(path), options)
    names = {'vit': 'ViT, 3 sizes', 'bit_resnet': 'BiT ResNet, 3 sizes'}
    for i, curve in enumerate(curves):
        family = list(names).index(curve.by['model'])
        color, size = figures.COLORS[family], 3.5 + i % 3
        x, kept = curve.x[:, 0], curve.fit_mask
        axes.plot(x[kept], curve.y[kept], 'o', color=color, markersize=size, markeredgewidth=0)
        axes.plot(x[~kept], curve.y[~kept], 'o', color=color, markersize=size, fillstyle='none')
        grid = np.geomspace(x.min(), x.max())
        axes.plot(grid, curve.fit.predict(grid), color=color, linewidth=0.8 + 0.4 * (i % 3))
        if i % 3 == 2:  # the sizes of a family ascend
            low, high = curve.fit.predict_band(grid)
            axes.fill_between(grid, low, high, color=color, alpha=0.13, linewidth=0)
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.axvline(np.sqrt(10_000 * 25_000), color=figures.FAINT, linewidth=0.9, linestyle=':')
    texts = ((1_020, 0.425, names['bit_resnet'], 1), (1_020, 0.385, names['vit'], 0))
    for x, y, text, color in texts:
        axes.text(x, y, text, color=figures.COLORS[color], fontsize=10, fontweight='bold')
    axes.text(16_500, 0.68, 'held out', color=figures.FAINT, fontsize=9)
    axes.set_xticks([1_000, 3_000, 10_000, 30_000], ['1k', '3k', '10k', '30k'])
    axes.set_yticks([0.4, 0.5, 0.6, 0.7], ['0.4', '0.5', '0.6', '0.7'])
    axes.minorticks_off()
    axes.set_xlabel('training images of CIFAR-10', fontsize=9.5, color=figures.FAINT, labelpad=1)
    axes.set_ylabel('test error', fontsize=9.5, color=figures.FAINT)
    axes.tick_params(labelsize=9.5)
    axes.spines[['top', 'right']].set_visible(False)


def cut(name: str, box: tuple[float, float, float, float]) -> np.ndarray:
    """The part of a picture that the shares of its width and height enclose."""
    image = Image.open(DOCS / name).convert('RGB')
    size = np.array(image.size * 2)
    return np.asarray(image.crop(tuple(np.round(np.array(box) * size).astype(int))))


if __name__ == '__main__':
    main(sys.argv[1])
