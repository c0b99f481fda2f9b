"""Pictures of attention maps over an image, or between the tokens of two sentences."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from vit_jax.errors import UserError, nearest
from vit_jax.nn.maps import AttentionMap, ParameterPictures
from vit_jax.ops.search import BOS
from vit_jax.viz import alignment, attention, figures
from vit_jax.viz.photo import Context, Photo, Vocabulary

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

SIDE = 448  # pixels of the shorter side of a picture, at least


@dataclasses.dataclass(frozen=True)
class MapSelection:
    """A choice of the maps of a model.

    Attributes:
      stack: a regular expression that their names begin with; '' for the last stack of layers.
      layer: of the stack; -1 is the last.
      head: of the layer, for pictures of a single map; None for the mean over heads.
      query: in an image, (row, column) of a patch or (index,) of a query; () for the class token,
        or the mean over all queries if there is none; None likewise, but with each query of a
        decoder in a map of its own.
    """

    stack: str = ''
    layer: int = -1
    head: int | None = None
    query: tuple[int, ...] | None = None


@runtime_checkable
class Viewer(Protocol):
    """The part of `base.Viz` that these pictures use."""

    def seen(self, picture: np.ndarray, /) -> np.ndarray: ...

    def queries(
        self, outputs: Mapping[str, Any], context: Context, /
    ) -> Mapping[int, str] | None: ...


def draw_on_photo(
    photo: Photo,
    outputs: Mapping[str, Any],
    maps: Sequence[AttentionMap],
    viz: Viewer,
    context: Context,
    choice: MapSelection = MapSelection(),
) -> tuple[Figure, str]:
    """A picture of the attention to an image, and a caption.

    Args:
      photo: the image.
      outputs: of the model, for a batch that begins with it.
      maps: of the same batch, at least one.
      viz: that of the task.
      context: of the data.
      choice: of the maps.

    Raises:
      UserError: if there is no such map, layer, head or query, or it does not look at the image.
    """
    stack = choose_stack(maps, choice.stack)
    weights, last = stack_weights(stack), stack[-1]
    if len(last.key_grid) != 2:
        raise UserError(f'{last.name} does not look at the image: choose another with --map')
    view, note = photo.view(SIDE), photo.note
    picture = viz.seen(view)
    if figures.has_colors(view) and not figures.has_colors(picture):
        note += ', seen in gray'
    factor = picture.shape[0] // photo.image.shape[0]
    options: dict[str, Any] = {
        'layer': choice.layer,
        'title': f'{caption(photo.path.name, outputs, context.class_names)} ({note})',
        'seen': tuple(factor * side for side in photo.seen),
    }
    if len(last.query_grid) == 1 and choice.query is None:
        names = viz.queries(outputs, context)
        figure = attention.draw_queries(
            picture, weights, last.key_grid, head=choice.head, names=names, **options
        )
    elif choice.head is not None:
        raise UserError(f'--head {choice.head}: the heads of the layer are all drawn')
    else:
        figure = attention.draw_layers(
            picture,
            weights,
            last.query_grid,
            last.key_grid,
            query=choice.query or None,
            to_itself=last.to_itself,
            **options,
        )
    depth, heads = weights.shape[:2]
    size = ' x '.join(map(str, last.key_grid))
    return figure, f'{depth} layers x {heads} heads, {size} patches; {note}'


def caption(name: str, outputs: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """The file's name, and the predicted class."""
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
    choice: MapSelection = MapSelection(),
) -> tuple[Figure, str]:
    """A picture of the attention between two sentences or within one, and a caption.

    Args:
      source: ids [n].
      target: ids [m].
      maps: of a batch that holds this pair alone, at least one.
      vocab: decodes the ids.
      name: of the model.
      choice: of the maps.

    Raises:
      UserError: if there is no such map, layer or head.
    """
    stack = choose_stack(maps, choice.stack)
    weights = stack_weights(stack)
    chosen, words = attention.layer_weights(weights, choice.layer, choice.head)
    (who, rows), (whom, columns) = sentence_axes(stack[-1], source, target)
    kind = 'self-attention' if whom.startswith(who) else 'attention'
    figure = alignment.draw_token_map(
        chosen,
        vocab.pieces(rows),
        vocab.pieces(columns),
        names=(who, whom),
        title=f'{name}: {kind}, {words}',
    )
    depth, heads = weights.shape[:2]
    line = f'{depth} layers x {heads} heads, {len(rows)} x {len(columns)} tokens'
    return figure, line if who == 'source' else f'{line}; {vocab.decode(target)}'


def choose_stack(maps: Sequence[AttentionMap], pattern: str = '') -> list[AttentionMap]:
    """The maps of one stack of layers, whose names differ only in numbers.

    Args:
      maps: of a model, in the order of its layers.
      pattern: a regular expression that the names begin with, `decoder/.*cross`. If it matches
        several stacks, the last is taken, which in a decoder attends to the input.

    Raises:
      UserError: if no name begins so.
    """
    chosen = [m for m in maps if matches_start(pattern, m.name)]
    if not chosen:
        raise UserError(nearest('attention map', pattern, {stack_name(m) for m in maps}))
    last = chosen[-1]
    alike = (stack_name(last), *last[2:])
    return [m for m in chosen if (stack_name(m), *m[2:]) == alike]


def matches_start(pattern: str, name: str) -> bool:
    """Whether a name begins with a regular expression; raise UserError if that is invalid."""
    try:
        return re.match(pattern, name) is not None
    except re.error as e:
        raise UserError(f'{pattern!r} is not a regular expression: {e}') from e


def stack_name(attention_map: AttentionMap) -> str:
    """Strip numbers of layers: `decoder/block_3/cross` -> `decoder/block/cross`."""
    return re.sub(r'_\d+(?=/|$)', '', attention_map.name)


def stack_weights(maps: Sequence[AttentionMap]) -> np.ndarray:
    """The weights [L H Q K] of a stack for the first example of the batch."""
    return np.stack([np.asarray(m.weights)[0] for m in maps])


def sentence_axes(
    attention_map: AttentionMap, source: np.ndarray, target: np.ndarray
) -> tuple[tuple[str, np.ndarray], tuple[str, np.ndarray]]:
    """(name, ids) of the queries, and of the keys, in a translation.

    Args:
      attention_map: of an encoder-decoder, whose names give the sides.
      source: ids [n].
      target: ids [m]. The row of a token is that of the decoder before it reads the token.
    """
    if attention_map.name.startswith('encoder'):
        return ('source', source), ('source', source)
    if attention_map.name.endswith('cross'):
        return ('target', target), ('source', source)
    return ('target', target), ('target before', np.append(np.int32(BOS), target[:-1]))


PAGE_WIDTH, MAX_COLUMNS = 9.0, 12  # inches; pictures side by side
HEADING = 0.35  # inches


def draw_parameters(
    parameters: Sequence[ParameterPictures], *, only: int | None = None, title: str = ''
) -> Figure:
    """Draw a section for each parameter, its pictures side by side.

    Numbers are blue below zero, white at zero and red above, on one scale for each parameter,
    given in its heading. RGB pictures are stretched to their own range.

    Args:
      parameters: at least one.
      only: the index of one picture of each parameter, from 0; None for all.
      title: printed above everything.

    Raises:
      UserError: if a parameter has no such picture.
    """
    if only is not None:
        parameters = [_single_picture(p, only) for p in parameters]
    columns = [p.columns or min(len(p.pictures), MAX_COLUMNS) for p in parameters]
    rows = [-(-len(p.pictures) // n) for p, n in zip(parameters, columns, strict=True)]
    # A few pictures do not fill the page.
    least = min(max(*columns, 3), 4)
    width, across = PAGE_WIDTH * least / 4, [max(n, least) for n in columns]
    heights = [n * width / m + HEADING for n, m in zip(rows, across, strict=True)]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights) + HEADING), layout='constrained')
    figure.suptitle(title, x=0.01, ha='left', fontsize=11, fontweight='bold', color=figures.INK)
    spec = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for i, parameter in enumerate(parameters):
        part = figure.add_subfigure(spec[i])
        _parameter_section(part, parameter, rows[i], columns[i], across[i], only or 0)
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
    pictures, each = parameter.pictures, parameter.each
    extent = float(np.abs(pictures).max())
    scale = f' (-{extent:.3g} to {extent:.3g})' if pictures.ndim == 3 else ''
    caption = f': {parameter.caption}' if parameter.caption else ''
    heading = f'{parameter.name}{caption}{scale}'
    part.suptitle(heading, x=0.01, ha='left', va='top', fontsize=9, color=figures.INK)
    for i, picture in enumerate(pictures):
        row, column = divmod(i, columns)
        axes = part.add_subplot(rows, across, row * across + column + 1)
        if picture.ndim == 2:
            axes.imshow(picture, cmap='RdBu_r', vmin=-extent, vmax=extent)
        else:
            axes.imshow(figures.as_picture(picture))
        axes.set_axis_off()
        if not parameter.columns:
            axes.set_title(f'{each} {first + i}', fontsize=7, color=figures.INK, pad=2)
