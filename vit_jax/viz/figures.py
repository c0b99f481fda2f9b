"""Common parts of figures: colors, axes, labels, names of metrics, and atomic writing of files."""

from __future__ import annotations

import colorsys
import io
import math
import re
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
    from matplotlib.figure import Figure
    from matplotlib.text import Text

INK, FAINT, GRID = '#1f2430', '#767c89', '#e4e6eb'
COLORS = ('#2f6fde', '#e2661a', '#149e78', '#a24bc4', '#c8961a', '#d43d6b')
LABEL_SIZE = 8.0  # points of a label's letters
SMALL_LABEL_SIZE = 5.0  # for objects narrower than their labels, and in small images
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
    'knn': 'kNN',
    'lr': 'learning rate',
    'mlp': 'MLP',
    'pq': 'PQ',
    'psnr': 'PSNR',
    'rq': 'RQ',
    'sec': 's',
    'sq': 'SQ',
}
# Units of metrics; metrics of one unit share an axis.
UNITS = ('accuracy', 'loss', 'perplexity', 'bleu', 'chrf', 'psnr', 'shot', 'ap', 'ar', 'pq')
_UNLABELED = re.compile(r'_(child|container)\d+')
_formulas: weakref.WeakSet[Text] = weakref.WeakSet()
Box = tuple[float, float, float, float]  # x, y, width, height
Color = tuple[float, float, float]


def new_figure(size: tuple[float, float], layout: Any = 'constrained') -> Figure:
    """An empty figure of this width and height in inches; imports Matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout=layout)


def style(axes: Axes, title: str, size: float = 11) -> None:
    """Style axes: a light grid below the data, no box, a title of `size` points at the left."""
    axes.set_title(title, loc='left', fontsize=size, color=INK, fontweight='bold', pad=8)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right', 'left']].set_visible(False)
    axes.spines['bottom'].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)


def show_image(axes: Axes, image: np.ndarray, title: str, size: float = 8) -> None:
    """Draw an image [H, W, 3] without axes, its title above it."""
    axes.imshow(image, interpolation='nearest')
    axes.set(xticks=[], yticks=[])  # hidden ticks still take time to lay out
    axes.set_axis_off()
    axes.set_title(title, fontsize=size, color=INK, pad=3)


def as_picture(image: np.ndarray, side: int = 1) -> np.ndarray:
    """Convert an image of any range and channels to uint8 RGB, its shorter side at least `side`.

    Of more than three channels it keeps the first three, of two the first.
    """
    image = image[..., : 3 if image.shape[-1] > 3 else 1 if image.shape[-1] == 2 else None]
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = np.round((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    factor = -(-side // min(image.shape[:2]))
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)))


def has_colors(image: UInt8[np.ndarray, 'Y X C']) -> bool:
    """Whether any pixel is not gray."""
    return bool((image != image[..., :1]).any())


def legend(axes: Axes) -> None:
    """Draw a legend in the colors of its lines or bars.

    Unlike Matplotlib it keeps labels that begin with an underscore, as names of runs may.
    """
    artists: list[Any] = [*axes.lines, *axes.containers]
    shown = [artist for artist in artists if not _UNLABELED.match(artist.get_label())]
    labels = [artist.get_label() for artist in shown]
    style: dict[str, Any] = {'labelcolor': 'linecolor', 'handlelength': 1.4}
    axes.legend(shown, labels, frameon=False, fontsize=9, **style)


def log_ticks(
    axis: Axis, low: float, high: float, *, few: bool = False, words: Callable[[float], str]
) -> None:
    """Label the ticks of a logarithmic axis so that at least two labels are visible.

    Args:
      axis: `axes.xaxis` or `axes.yaxis`.
      low, high: the range to show.
      few: whether there is little room.
      words: formats a number as a label.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log10(high / low)
    if decades > (1.2 if few else 2):
        subs: tuple[float, ...] = (1.0,)
    elif few:
        subs = (1.0, 3.0) if decades > 0.6 else (1.0, 2.0, 3.0, 5.0, 7.0)
    else:
        subs = (1.0, 2.0, 5.0) if decades > 0.7 else tuple(map(float, range(1, 10)))
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.set_minor_locator(NullLocator())


def label_size(text: str, inch: float, points: float = LABEL_SIZE) -> tuple[float, float]:
    """Width and height of a label in pixels, at `inch` pixels per inch."""
    return (0.6 * points * len(text) + 4) / 72 * inch, (1.25 * points + 3) / 72 * inch


def find_label_box(
    box: Box,
    room: tuple[float, float],
    size: tuple[float, float],
    taken: Sequence[Box],
    boxes: Sequence[Box] = (),
) -> Box:
    """Place a label of this width and height beside or in its box, within the image.

    The place is the one that covers the smallest shares of other labels and of objects.
    """

    def clash(place: Box) -> float:
        labels = sum(overlap(place, other) / math.prod(room) for other in taken)
        return 4 * labels + sum(overlap(place, one) / max(math.prod(one[2:]), 1) for one in boxes)

    return min(_label_boxes(box, room, size), key=clash)


def _label_boxes(box: Box, room: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Yield places around and in a box, moved into the image, the best first."""
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


def write_label(
    axes: Axes, place: Box, text: str, ground: Color, inch: float, points: float = LABEL_SIZE
) -> None:
    """Write white letters on the color `ground`, in a box of `find_label_box`."""
    axes.text(
        place[0] + 2 / 72 * inch,
        place[1] + place[3] / 2,
        text,
        va='center',
        fontsize=points,
        color='white',
        bbox={'facecolor': ground, 'edgecolor': 'none', 'pad': 1.0 if points < LABEL_SIZE else 1.5},
    )


def class_color(label: int) -> Color:
    """The color of a class: saturated, dark enough for white letters; neighbors differ most."""
    hue = (0.6 + label * (math.sqrt(5) - 1) / 2) % 1
    rgb = colorsys.hsv_to_rgb(hue, 0.85, 0.75)
    share = min(1, MAX_LUMINANCE / luminance(rgb)) ** (1 / GAMMA)
    return rgb[0] * share, rgb[1] * share, rgb[2] * share


def luminance(rgb: Sequence[float]) -> float:
    """The luminance of an sRGB color, 0 to 1, with the transfer curve approximated by a power."""
    weights = (0.2126, 0.7152, 0.0722)
    return sum(w * c**GAMMA for w, c in zip(weights, rgb, strict=True))


def metric_words(name: str) -> str:
    """`weight_decay` -> `Weight decay`, `images_per_sec` -> `Images/s`, `1_8` -> `1–8`."""
    text = re.sub(r'(?<=\d)_(?=\d)', '–', name).replace('_', ' ').strip()
    text = ' '.join(METRIC_WORDS.get(word.lower(), word) for word in text.split()).replace(
        ' per ', '/'
    )
    return text if text[:3] in ('chr', 'kNN') else text[:1].upper() + text[1:]


def title(metric: str) -> str:
    """`val/perplexity` -> `Perplexity (val)`."""
    prefix, _, key = metric.rpartition('/')
    return f'{metric_words(key)} ({prefix})' if prefix else metric_words(key)


def unit(metric: str) -> str:
    """The unit of a metric: `test_bleu/bleu_1_8` -> `bleu`; its own name if none is known."""
    key = metric.rpartition('/')[2].lower()
    found = [part.rstrip('0123456789') for part in key.split('_')]
    return next((part for part in reversed(found) if part in UNITS), key)


def short_key_names(keys: Sequence[str]) -> list[str]:
    """Short names of config keys: their last parts, or the whole keys where these collide."""
    last = [key.rpartition('.')[2] for key in keys]
    return [
        metric_words(x) if last.count(x) == 1 else key for key, x in zip(keys, last, strict=True)
    ]


def set_formula(text: Text) -> None:
    """Draw text between dollar signs as TeX math, which is off by default."""
    _formulas.add(text)


def _draw_literally(figure: Figure) -> None:
    """Draw names of classes, files and runs without TeX or control characters."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(text in _formulas)
        text.set_text(visible(text.get_text()))


def check_format(path: str | paths.Path, flag: str) -> None:
    """Raise UserError unless the file's suffix is a supported image format."""
    if paths.Path(path).suffix.lower().removeprefix('.') not in FORMATS:
        raise UserError(f'{flag} {str(path)!r}: the name must end in .' + ', .'.join(FORMATS))


def save(figure: Figure, path: str | paths.Path, dpi: int = 150) -> paths.Path:
    """Write a figure in the format of the path's suffix; the folder is made if missing.

    Raises:
      OSError: if it cannot be written; no partial file is left.
    """
    path = paths.path(path)
    paths.make_folder(path.parent)
    _draw_literally(figure)
    picture = io.BytesIO()
    kind = path.suffix.lower().removeprefix('.')
    figure.savefig(picture, format=kind, dpi=dpi, facecolor='white')
    paths.write_atomic(path, picture.getvalue())
    return path


def pixels(figure: Figure, dpi: int = 100) -> UInt8[np.ndarray, 'Y X 3']:
    """Render a figure on white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    _draw_literally(figure)
    figure.set(dpi=dpi, facecolor='white')
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def svg(figure: Figure) -> bytes:
    """Render a figure as SVG without a background; the same figure has the same bytes."""
    import matplotlib

    _draw_literally(figure)
    for axes in figure.axes:
        axes.set_facecolor('none')
    drawn = io.BytesIO()
    with matplotlib.rc_context({'svg.hashsalt': 'vit_jax'}):
        figure.savefig(drawn, format='svg', facecolor='none', metadata={'Date': None})
    return drawn.getvalue()
