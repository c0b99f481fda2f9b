"""Common parts of figures: colors, axes, labels, metric names, and atomic writing of files."""

from __future__ import annotations

import collections
import colorsys
import contextlib
import functools
import io
import logging
import math
import re
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.errors import UserError, visible
from vit_jax.storage import paths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.text import Text

log = logging.getLogger(__name__)

INK, FAINT, GRID = '#1f2430', '#767c89', '#e4e6eb'
COLORS = ('#2f6fde', '#e2661a', '#149e78', '#a24bc4', '#c8961a', '#d43d6b')
HINTING = 1.08  # maximum growth of small letters when rounded to pixels
MARGIN = 0.1  # total inches left and right of a picture in the constrained layout
LABEL_SIZE = 8.0  # points
MAX_LINES = 3  # of a title; longer ones are shortened in the middle
SMALL_LABEL_SIZE = 6.0  # for objects narrower than their labels, and in small images
# Of colors behind white letters: a contrast of 4.5, as W3C requires (WCAG 2.1, 1.4.3).
MAX_LUMINANCE = 1.05 / 4.5 - 0.05
GAMMA = 2.2
FORMATS = ('png', 'pdf', 'svg', 'jpg')
METRIC_WORDS = {
    'ap': 'AP',
    'ap50': 'AP50',
    'ap75': 'AP75',
    'ar': 'AR',
    'bleu': 'BLEU',
    'chrf': 'chrF',
    'dim': 'size',
    'iou': 'IoU',
    'knn': 'kNN',
    'lr': 'learning rate',
    'miou': 'mIoU',
    'mlp': 'MLP',
    'pq': 'PQ',
    'psnr': 'PSNR',
    'rq': 'RQ',
    'sec': 's',
    'sq': 'SQ',
}
# Units of metrics; metrics with the same unit share an axis.
UNITS = ('accuracy', 'loss', 'perplexity', 'bleu', 'chrf', 'psnr', 'shot', 'ap', 'ar', 'pq')
MAX_PANELS = 9  # most panels of a figure
REPEAT_SHIFT = 0.3  # shift of the color for another object of a class, in classes
_UNLABELED = re.compile(r'_(child|container)\d+|_nolegend_')
_formulas: weakref.WeakSet[Text] = weakref.WeakSet()
_reported: set[int] = set()  # characters missing in all fonts
Box = tuple[float, float, float, float]  # x, y, width, height
Color = tuple[float, float, float]


def new_figure(size: tuple[float, float], layout: Any = 'constrained') -> Figure:
    """Create an empty figure of this width and height in inches; imports Matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout=layout)


def style(axes: Axes, title: str, size: float = 11) -> None:
    """Style axes: a light grid below the data, no box, a title of `size` points on the left."""
    title = wrap(title, 0.85 * _cell_width(axes), size)  # bold letters are wider
    axes.set_title(title, loc='left', fontsize=size, color=INK, fontweight='bold', pad=8)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right', 'left']].set_visible(False)
    axes.spines['bottom'].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)


def show_image(axes: Axes, image: np.ndarray, title: str, size: float = 8) -> None:
    """Draw an image [H, W, 3] without axes; long titles are wrapped."""
    axes.imshow(image, interpolation='nearest')
    axes.set(xticks=[], yticks=[])  # hidden ticks still take time to lay out
    axes.set_axis_off()
    axes.set_title(wrap(title, _cell_width(axes), size), fontsize=size, color=INK, pad=3)


def heading(figure: Figure | SubFigure, text: str, size: float = 11, **style: Any) -> None:
    """Write a title above a figure, on the left; long titles are wrapped."""
    width = 0.97 if style.get('fontweight') != 'bold' else 0.85  # bold letters are wider
    text = wrap(text, width * figure.bbox.width / figure.dpi, size)
    style = {'x': 0.01, 'ha': 'left', 'color': INK, **style}
    figure.suptitle(text, fontsize=size, **style)


def footnote(figure: Figure, text: str) -> None:
    """Write a note below a figure, on the left."""
    figure.supxlabel(text, x=0.01, ha='left', fontsize=9, color=FAINT)


def wrap(text: str, inches: float, points: float) -> str:
    """Wrap each line of a text to at most `inches`, for this font size.

    A line that is still longer than `MAX_LINES` is shortened in the middle, since file names often
    differ at their ends.
    """
    return '\n'.join(_wrap_line(line, 72 * inches, points) for line in text.split('\n'))


def _wrap_line(line: str, max_width: float, points: float) -> str:
    if (width := text_width(line, points)) <= max_width:
        return line
    letters = int(max_width / width * len(line)) + 1
    while True:
        letters -= 1
        if len(broken := textwrap.wrap(line, max(letters, 1))) > MAX_LINES:
            half = max(1, MAX_LINES * letters // 2 - letters // 4)
            broken = textwrap.wrap(f'{line[:half]}…{line[-half:]}', max(letters, 1))
        if letters < 8 or all(text_width(part, points) <= max_width for part in broken):
            return '\n'.join(broken)


def _cell_width(axes: Axes) -> float:
    """Return the width in inches of a grid cell, before the figure is laid out."""
    width = axes.figure.bbox.width / axes.figure.dpi
    if (cell := axes.get_subplotspec()) is None:
        return width * axes.get_position().width
    shares = np.array(cell.get_gridspec().get_width_ratios(), float)
    return width * float(shares[cell.colspan].sum() / shares.sum())


def text_width(text: str, points: float) -> float:
    """Return the width of a line in points, for this font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=['sans-serif', *fallback_fonts(text)], size=points)
    with _without_glyph_warnings():
        size = text_to_path.get_text_width_height_descent(visible(text), font, ismath=False)
    return HINTING * size[0]


def as_picture(image: np.ndarray, side: int = 1) -> np.ndarray:
    """Convert an image of any range and channels to uint8 RGB, its shorter side at least `side`.

    Of more than three channels the first three are used, of two only the first.
    """
    image = image[..., : 3 if image.shape[-1] > 3 else 1 if image.shape[-1] == 2 else None]
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = np.round((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    factor = -(-side // min(image.shape[:2]))
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)))


def has_colors(image: UInt8[np.ndarray, 'Y X C']) -> bool:
    """Return whether any pixel is not gray."""
    return bool((image != image[..., :1]).any())


def legend(axes: Axes) -> None:
    """Draw a legend in the colors of its lines or bars.

    Unlike Matplotlib's, it includes labels that begin with an underscore, since names of runs may.
    """
    artists: list[Any] = [*axes.lines, *axes.containers]
    labeled = [artist for artist in artists if not _UNLABELED.match(artist.get_label())]
    labels = [artist.get_label() for artist in labeled]
    style: dict[str, Any] = {'labelcolor': 'linecolor', 'handlelength': 1.4}
    axes.legend(labeled, labels, frameon=False, fontsize=9, **style)


def log_ticks(
    axis: Axis, low: float, high: float, *, few: bool = False, labels: Callable[[float], str]
) -> None:
    """Label the ticks of a logarithmic axis so that at least two labels are visible.

    Args:
      axis: `axes.xaxis` or `axes.yaxis`.
      low, high: Range to show.
      few: Whether there is little space.
      labels: Function that formats a number as a label.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log10(high / low)
    if decades > (1.2 if few else 2):
        subs: tuple[float, ...] = (1.0,)
    elif few:
        subs = (1.0, 3.0) if decades > 0.6 else (1.0, 2.0, 3.0, 5.0, 7.0)
    else:
        subs = (1.0, 2.0, 5.0) if decades > 0.7 else tuple(map(float, range(1, 10)))
        if decades < 0.5:
            subs = (1.0, 1.2, 1.5, *subs[1:])
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: labels(value)))
    axis.set_minor_locator(NullLocator())


def label_size(text: str, inch: float, points: float = LABEL_SIZE) -> tuple[float, float]:
    """Return width and height of a label in pixels, at `inch` pixels per inch."""
    return (text_width(text, points) + 4) / 72 * inch, (1.25 * points + 3) / 72 * inch


def find_label_box(
    box: Box,
    label_size: tuple[float, float],
    size: tuple[float, float],
    labels: Sequence[Box],
    boxes: Sequence[Box] = (),
) -> Box:
    """Place a label of this width and height next to or in its box, within the image.

    The place covers the smallest shares of other labels and of objects. If all places at the box
    cover a label, a free one above or below them is chosen.
    """

    def cost(candidate: Box) -> float:
        share = sum(overlap(candidate, label) / math.prod(label_size) for label in labels)
        return 4 * share + sum(
            overlap(candidate, obj) / max(math.prod(obj[2:]), 1) for obj in boxes
        )

    best = min(_label_boxes(box, label_size, size), key=cost)
    if not any(overlap(best, other) for other in labels):
        return best
    half = label_size[1] / 2
    moved = [
        (cost(candidate) + 0.02 * abs(step), candidate)  # prefer the nearest
        for step in range(-round(size[0] / half), round(size[0] / half) + 1)
        for candidate in _label_boxes((box[0], box[1] + step * half, *box[2:]), label_size, size)
        if not any(overlap(candidate, other) for other in labels)
    ]
    return min(moved)[1] if moved else best


def _label_boxes(
    box: Box, label_size: tuple[float, float], size: tuple[float, float]
) -> Iterator[Box]:
    """Yield places around and in a box, moved into the image, the best first."""
    x, y, width, height = box
    wide, tall = label_size
    ends = [(left, top) for top in (y - tall, y + height) for left in (x, x + width - wide)]
    inner = [(left, top) for top in (y, y + height - tall) for left in (x, x + width - wide)]
    sides = [(left, top) for left in (x + width, x - wide) for top in (y, y + height - tall)]
    for left, top in (*ends, *inner, *sides):
        inner_corner = max(0, min(left, size[1] - wide)), max(0, min(top, size[0] - tall))
        yield (*inner_corner, *label_size)


def overlap(a: Box, b: Box) -> float:
    """Return the area of the intersection of two boxes."""
    sides = [min(a[i] + a[i + 2], b[i] + b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
    return max(0, sides[0]) * max(0, sides[1])


def write_label(
    axes: Axes, box: Box, text: str, background: Color, inch: float, points: float = LABEL_SIZE
) -> None:
    """Write white letters on the color `background`, in a box from `find_label_box`."""
    label = axes.text(
        box[0] + 2 / 72 * inch,
        box[1] + box[3] / 2,
        text,
        va='center',
        fontsize=points,
        color='white',
        bbox={
            'facecolor': background,
            'edgecolor': 'none',
            'pad': 1.0 if points < LABEL_SIZE else 1.5,
        },
    )
    label.set_in_layout(False)  # otherwise the image would shrink with its labels


def class_color(label: float) -> Color:
    """Return the color of a class: saturated, and dark enough for white letters."""
    hue = (0.6 + label * (math.sqrt(5) - 1) / 2) % 1
    rgb = colorsys.hsv_to_rgb(hue, 0.85, 0.75)
    share = min(1, MAX_LUMINANCE / luminance(rgb)) ** (1 / GAMMA)
    return rgb[0] * share, rgb[1] * share, rgb[2] * share


def object_colors(labels: Sequence[int]) -> list[Color]:
    """Return a color for each object of an image: its class's, shifted for later objects of it."""
    counts: collections.Counter[int] = collections.Counter()
    colors = []
    for label in labels:
        colors.append(class_color(label + REPEAT_SHIFT * counts[label]))
        counts[label] += 1
    return colors


def luminance(rgb: Sequence[float]) -> float:
    """Compute the luminance of an sRGB color, 0 to 1, with a power law as the transfer curve."""
    weights = (0.2126, 0.7152, 0.0722)
    return sum(w * c**GAMMA for w, c in zip(weights, rgb, strict=True))


def metric_words(name: str) -> str:
    """Format a metric: `weight_decay` -> `Weight decay`, `images_per_sec` -> `Images/s`."""
    text = re.sub(r'(?<=\d)_(?=\d)', '–', name).replace('_', ' ').strip()
    text = ' '.join(METRIC_WORDS.get(word.lower(), word) for word in text.split()).replace(
        ' per ', '/'
    )
    return text if text[:3] in ('chr', 'kNN', 'mIo') else text[:1].upper() + text[1:]


def short_rate(value: float, place: float = 0) -> str:
    """Format a tick of a rate: `0.8`, `1.5k`; a formatter of Matplotlib's axes."""
    from matplotlib.ticker import EngFormatter

    del place
    return f'{value:g}' if abs(value) < 1000 else EngFormatter(sep='')(value)


def title(metric: str) -> str:
    """Format a title: `val/perplexity` -> `Perplexity (val)`."""
    prefix, _, key = metric.rpartition('/')
    return f'{metric_words(key)} ({prefix})' if prefix else metric_words(key)


def unit(metric: str) -> str:
    """Return a metric's unit: `test_bleu/bleu_1_8` -> `bleu`; its own name if it is unknown."""
    key = metric.rpartition('/')[2].lower()
    parts = [part.rstrip('0123456789') for part in key.split('_')]
    return next((part for part in reversed(parts) if part in UNITS), key)


def short_key_names(keys: Sequence[str]) -> list[str]:
    """Shorten config keys to their last parts, except where these collide."""
    short_names = [key.rpartition('.')[2] for key in keys]
    return [
        metric_words(x) if short_names.count(x) == 1 else key
        for key, x in zip(keys, short_names, strict=True)
    ]


def set_formula(text: Text) -> None:
    """Enable TeX math between dollar signs, which is off by default."""
    _formulas.add(text)


@contextlib.contextmanager
def _literal_text(figure: Figure) -> Iterator[None]:
    """Draw names of classes, files and runs without TeX or control characters, in any script."""
    from matplotlib.text import Text

    texts: list[Any] = figure.findobj(Text)
    for text in texts:
        text.set_parse_math(text in _formulas)
        text.set_text(visible(text.get_text()))
    if families := fallback_fonts(''.join(text.get_text() for text in texts)):
        for text in texts:
            text.set_fontfamily([*text.get_fontfamily(), *families])
    with _without_glyph_warnings():
        yield


def fallback_fonts(text: str) -> tuple[str, ...]:
    """Return installed fonts for characters that Matplotlib's font lacks, such as Chinese.

    Characters that no font has are logged once, and drawn as boxes.
    """
    return () if text.isascii() else _fonts_of(frozenset(filter(str.isprintable, text)))


@functools.cache
def _fonts_of(characters: frozenset[str]) -> tuple[str, ...]:
    from matplotlib import font_manager

    missing = set(map(ord, characters)) - _charmap(
        font_manager.findfont(font_manager.FontProperties())
    )
    names: list[str] = []
    if missing:
        # Sans serif first; emoji fonts of colored bitmaps cannot be drawn.
        fonts = {e.fname: e.name for e in font_manager.fontManager.ttflist}
        for path, name in sorted(fonts.items(), key=lambda font: ('Sans' not in font[1], font)):
            is_fallback = name.startswith('Last Resort') or 'Color Emoji' in name
            if missing and not is_fallback and not missing.isdisjoint(covered := _charmap(path)):
                names.append(name)
                missing -= covered
    if missing and not _reported:
        _reported.update(missing)
        sample = ' '.join(map(chr, sorted(missing)[:8]))
        log.warning('no font has %s: install one, such as Noto Sans CJK; boxes are drawn', sample)
    return tuple(names)


@functools.cache
def _charmap(path: str) -> frozenset[int]:
    """Return the characters of a font file; none if it cannot be read."""
    from matplotlib import font_manager

    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@contextlib.contextmanager
def _without_glyph_warnings() -> Iterator[None]:
    """Hide Matplotlib's warnings about characters, which `fallback_fonts` has logged."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', r'Glyph \d+|Matplotlib currently does not support')
        yield


def check_format(path: str | paths.Path, flag: str) -> None:
    """Raise UserError unless the file's suffix is a supported image format."""
    if paths.Path(path).suffix.lower().removeprefix('.') not in FORMATS:
        raise UserError(f'{flag} {str(path)!r}: the name must end in .' + ', .'.join(FORMATS))


def save(figure: Figure, path: str | paths.Path, dpi: int = 150) -> paths.Path:
    """Write a figure in the format of the path's suffix, creating the folder if needed.

    Raises:
      OSError: if it cannot be written; no partial file is left.
    """
    path = paths.path(path)
    paths.make_folder(path.parent)
    picture = io.BytesIO()
    kind = path.suffix.lower().removeprefix('.')
    with _literal_text(figure):
        figure.savefig(picture, format=kind, dpi=dpi, facecolor='white')
    paths.write_atomic(path, picture.getvalue())
    return path


def pixels(figure: Figure, dpi: int = 100) -> UInt8[np.ndarray, 'Y X 3']:
    """Render a figure on white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set(dpi=dpi, facecolor='white')
    canvas = FigureCanvasAgg(figure)
    with _literal_text(figure):
        canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def svg(figure: Figure) -> bytes:
    """Render a figure as SVG without background; equal figures have equal bytes."""
    import matplotlib

    for axes in figure.axes:
        axes.set_facecolor('none')
    buffer = io.BytesIO()
    with _literal_text(figure), matplotlib.rc_context({'svg.hashsalt': 'vit_jax'}):
        figure.savefig(buffer, format='svg', facecolor='none', metadata={'Date': None})
    return buffer.getvalue()
