"""Pictures of attention over an image or between sentences, and of learned parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError, nearest
from vit_jax.nn.maps import AttentionMap, ParameterPictures
from vit_jax.ops.search import BOS
from vit_jax.viz import attention, figures
from vit_jax.viz.photo import Context, Photo, Vocabulary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


SIDE = 448  # minimum pixels of a picture's shorter side
SPACE = '\u2581'  # SentencePiece's mark for the space before a word
TOKEN_CELL, TOKEN_MARGIN = 0.24, 1.6  # inches per token, and for labels
PAGE_WIDTH, MAX_COLUMNS = 9.0, 12  # inches; pictures side by side
HEADING = 0.35  # inches


@dataclasses.dataclass(frozen=True)
class MapSelection:
    """Selection of attention maps to draw.

    Attributes:
      stack: Regular expression for the start of their names; '' for the last stack of layers.
      layer: Layer of the stack; -1 is the last.
      head: Head of the layer, for pictures of a single map; None for the mean over heads.
      query: Place: (row, column) of a patch or (index,) of a query; () for the class token,
        or without one the mean over all queries; None for the same, but for decoders one map per
        query.
    """

    stack: str = ''
    layer: int = -1
    head: int | None = None
    query: tuple[int, ...] | None = None


def draw_on_photo(
    photo: Photo,
    outputs: Mapping[str, Any],
    maps: Sequence[AttentionMap],
    viz: Any,
    context: Context,
    selection: MapSelection = MapSelection(),
) -> tuple[Figure, str]:
    """Draw the attention to an image; return the figure and a caption.

    Args:
      photo: Image to draw.
      outputs: Model outputs for a batch that begins with the image.
      maps: Attention maps of the same batch, at least one.
      viz: `Viz` of the task.
      context: Context of the data.
      selection: Maps to draw.

    Raises:
      UserError: if the map, layer, head or query is missing, or the map does not cover the image.
    """
    stack = choose_stack(maps, selection.stack)
    weights, last = stack_weights(stack), stack[-1]
    if len(last.key_grid) != 2:
        raise UserError(f'{last.name} does not attend to the image: choose another with --map')
    view, note = photo.view(SIDE), photo.note
    picture = viz.seen(view)
    if figures.has_colors(view) and not figures.has_colors(picture):
        note += ', seen in gray'
    if photo.image.ndim > 3:
        note += ', its first window'
    factor = picture.shape[0] // photo.image.shape[-3]
    options: dict[str, Any] = {
        'layer': selection.layer,
        'title': f'{caption(photo.path.name, outputs, context.class_names)} ({note})',
        'real_size': tuple(factor * side for side in photo.seen),
    }
    if len(last.query_grid) == 1 and selection.query is None:
        names = viz.queries(outputs, context)
        figure = attention.draw_queries(
            picture, weights, last.key_grid, head=selection.head, names=names, **options
        )
    elif selection.head is not None:
        raise UserError(f'--head {selection.head}: all heads of the layer are drawn: omit it')
    else:
        figure = attention.draw_layers(
            picture,
            weights,
            last.query_grid,
            last.key_grid,
            query=selection.query or None,
            to_itself=last.to_itself,
            **options,
        )
    depth, heads = weights.shape[:2]
    size = ' x '.join(map(str, reversed(last.key_grid)))
    return figure, f'{depth} layers x {heads} heads, {size} patches; {note}'


def caption(name: str, outputs: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """Return the file's name and the predicted class."""
    logits = np.asarray(outputs.get('logits', ()))
    if logits.ndim != 2 or len(class_names) != logits.shape[1]:
        return name
    return f'{name}: {class_names[int(logits[0].argmax())]}'


def draw_between_sentences(
    source: np.ndarray,
    target: np.ndarray,
    maps: Sequence[AttentionMap],
    vocab: Vocabulary,
    name: str,
    selection: MapSelection = MapSelection(),
) -> tuple[Figure, str]:
    """Draw the attention between two sentences or within one; return the figure and a caption.

    Args:
      source: Ids [n].
      target: Ids [m].
      maps: Attention maps of a batch with only this pair, at least one.
      vocab: Decoder of the ids.
      name: Name of the model.
      selection: Maps to draw.

    Raises:
      UserError: if the map, layer or head is missing.
    """
    stack = choose_stack(maps, selection.stack)
    weights = stack_weights(stack)
    layer_map, layer_title = attention.layer_weights(weights, selection.layer, selection.head)
    (query_side, rows), (key_side, columns) = sentence_axes(stack[-1], source, target)
    kind = 'self-attention' if key_side.startswith(query_side) else 'attention'
    figure = draw_token_map(
        layer_map,
        vocab.pieces(rows),
        vocab.pieces(columns),
        names=(query_side, key_side),
        title=f'{name}: {kind}, {layer_title}',
    )
    depth, heads = weights.shape[:2]
    line = f'{depth} layers x {heads} heads, {len(rows)} x {len(columns)} tokens'
    return figure, line if query_side == 'source' else f'{line}; {vocab.decode(target)}'


def sentence_axes(
    attention_map: AttentionMap, source: np.ndarray, target: np.ndarray
) -> tuple[tuple[str, np.ndarray], tuple[str, np.ndarray]]:
    """Return (name, ids) of the queries and of the keys in a translation.

    Args:
      attention_map: Attention map of an encoder-decoder; its name identifies the sides.
      source: Ids [n].
      target: Ids [m]. The row of a token belongs to the decoder before it reads the token.
    """
    if attention_map.name.startswith('encoder'):
        return ('source', source), ('source', source)
    if attention_map.name.endswith('cross'):
        return ('target', target), ('source', source)
    return ('target', target), ('target before', np.append(np.int32(BOS), target[:-1]))


def draw_token_map(
    weights: Float[np.ndarray, 'N M'],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    names: tuple[str, str],
    title: str = '',
) -> Figure:
    """Draw a map of weights, queries from top to bottom, keys from left to right.

    Args:
      weights: Weights, each row sums to one.
      rows: Pieces of the queries.
      columns: Pieces of the keys.
      names: Names of the two axes, rows first.
      title: Title above the map.
    """
    from matplotlib.colors import LinearSegmentedColormap

    size = len(columns) * TOKEN_CELL + TOKEN_MARGIN, len(rows) * TOKEN_CELL + TOKEN_MARGIN
    figure = figures.new_figure((max(size[0], 4.0), max(size[1], 2.5)))
    axes = figure.add_subplot()
    blues = LinearSegmentedColormap.from_list('weights', ['#ffffff', figures.COLORS[0], '#0b1f45'])
    # Uniform weights should look pale.
    top = max(0.5, float(weights.max()))
    image = axes.imshow(weights, cmap=blues, vmin=0, vmax=top, interpolation='nearest')
    _label_tokens(axes, rows, columns)
    axes.set_ylabel(names[0], color=figures.FAINT)
    axes.set_xlabel(names[1], color=figures.FAINT)
    axes.xaxis.set_label_position('top')
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=30, shrink=0.6)
    bar.ax.tick_params(labelsize=8, colors=figures.FAINT, length=0)
    bar.outline.set_visible(False)
    figures.heading(figure, title)
    return figure


def _label_tokens(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Label both axes with the pieces, and draw lines between words."""
    style: dict[str, Any] = {'fontsize': 9, 'color': figures.INK}
    axes.set_yticks(range(len(rows)), [_piece_label(piece) for piece in rows], **style)
    axes.set_xticks(
        range(len(columns)), [_piece_label(piece) for piece in columns], rotation=90, **style
    )
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_yticks([i - 0.5 for i in _word_starts(rows)], minor=True)
    axes.set_xticks([i - 0.5 for i in _word_starts(columns)], minor=True)
    axes.grid(which='minor', color=figures.GRID, linewidth=1)
    axes.tick_params(which='minor', length=0)
    axes.spines[:].set_color(figures.GRID)


def _word_starts(pieces: Sequence[str]) -> list[int]:
    """Return the indices where words begin; the end of a sentence, `</s>`, counts as a word."""
    return [i for i, piece in enumerate(pieces) if piece[:1] in (SPACE, '<')]


def _piece_label(piece: str) -> str:
    """Return the label of a piece; an open box for a single space."""
    return piece.replace(SPACE, '') or '\u2423'


def choose_stack(maps: Sequence[AttentionMap], pattern: str = '') -> list[AttentionMap]:
    """Choose the maps of one stack of layers, whose names differ only in numbers.

    Args:
      maps: Attention maps of a model, in the order of its layers.
      pattern: Regular expression for the start of the names, such as `decoder/.*cross`. The last of
        several stacks is chosen, which in a decoder attends to the input.

    Raises:
      UserError: if no name matches.
    """
    matches = [m for m in maps if matches_start(pattern, m.name)]
    if not matches:
        raise UserError(nearest('attention map', pattern, {stack_name(m) for m in maps}))
    last = matches[-1]
    stack_key = (stack_name(last), *last[2:])
    return [m for m in matches if (stack_name(m), *m[2:]) == stack_key]


def matches_start(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the start of a name; raise UserError if it is invalid."""
    try:
        return re.match(pattern, name) is not None
    except re.error as e:
        raise UserError(f'{pattern!r} is not a regular expression: {e}') from e


def stack_name(attention_map: AttentionMap) -> str:
    """Strip layer numbers: `decoder/block_3/cross` -> `decoder/block/cross`."""
    return re.sub(r'_\d+(?=/|$)', '', attention_map.name)


def stack_weights(maps: Sequence[AttentionMap]) -> np.ndarray:
    """Stack the weights [L H Q K] for the first example of the batch."""
    return np.stack([np.asarray(m.weights)[0] for m in maps])


def draw_parameters(
    parameters: Sequence[ParameterPictures], *, index: int | None = None, title: str = ''
) -> Figure:
    """Draw a section per parameter, with its pictures side by side.

    Numbers are blue below zero, white at zero and red above, on one scale per parameter, shown in
    its heading. RGB pictures are stretched to their range.

    Args:
      parameters: Parameters, one or more.
      index: Index of one picture of each parameter, from 0; None for all.
      title: Title above everything.

    Raises:
      UserError: if a parameter has no such picture.
    """
    if index is not None:
        parameters = [_single_picture(p, index) for p in parameters]
    columns = [p.columns or min(len(p.pictures), MAX_COLUMNS) for p in parameters]
    rows = [-(-len(p.pictures) // n) for p, n in zip(parameters, columns, strict=True)]
    # A few pictures should not fill the page.
    min_columns = min(max(*columns, 3), 4)
    width, columns_across = PAGE_WIDTH * min_columns / 4, [max(n, min_columns) for n in columns]
    heights = [n * width / m + HEADING for n, m in zip(rows, columns_across, strict=True)]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights) + HEADING), layout='constrained')
    figures.heading(figure, title, fontweight='bold')
    spec = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for i, parameter in enumerate(parameters):
        part = figure.add_subfigure(spec[i])
        _parameter_section(part, parameter, rows[i], columns[i], columns_across[i], index or 0)
    return figure


def _single_picture(parameter: ParameterPictures, number: int) -> ParameterPictures:
    count = len(parameter.pictures)
    if not 0 <= number < count:
        raise UserError(
            f'there is no {parameter.each} {number}: {parameter.name} has {count}, 0 to {count - 1}'
        )
    return parameter._replace(pictures=parameter.pictures[number : number + 1], columns=0)


def _parameter_section(
    part: SubFigure, parameter: ParameterPictures, rows: int, columns: int, across: int, first: int
) -> None:
    pictures, picture_kind = parameter.pictures, parameter.each
    extent = float(np.abs(pictures).max())
    scale = f' (-{extent:.3g} to {extent:.3g})' if pictures.ndim == 3 else ''
    caption = f': {parameter.caption}' if parameter.caption else ''
    heading = f'{parameter.name}{caption}{scale}'
    figures.heading(part, heading, 9, va='top')
    for i, picture in enumerate(pictures):
        row, column = divmod(i, columns)
        axes = part.add_subplot(rows, across, row * across + column + 1)
        if picture.ndim == 2:
            axes.imshow(picture, cmap='RdBu_r', vmin=-extent, vmax=extent)
        else:
            axes.imshow(figures.as_picture(picture))
        axes.set_axis_off()
        if not parameter.columns:
            axes.set_title(f'{picture_kind} {first + i}', fontsize=7, color=figures.INK, pad=2)
