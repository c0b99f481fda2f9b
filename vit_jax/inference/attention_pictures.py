"""Pictures of attention maps: over an image, or between the tokens of two sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError
from vit_jax.inference.attention import choose_stack, sentence_axes, stacked
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.viz import alignment, attention
from vit_jax.viz.predictions import Photo

SIDE = 448  # pixels of the shorter side of a picture, at least


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which of the maps of a model are drawn.

    Attributes:
      stack: a regular expression that their names begin with; '' for the last stack of layers.
      layer: of the stack; -1 is the last.
      head: of the layer, where not all are drawn; None for their mean.
      query: who looks in an image: (row, column) of a patch or (number,) of a query; () for the
        class token, or the mean over all where there is none; None likewise, but for each of the
        queries of a decoder by itself.
    """

    stack: str = ''
    layer: int = -1
    head: int | None = None
    query: tuple[int, ...] | None = None


def of_photo(
    photo: Photo,
    outputs: Mapping[str, Any],
    maps: Sequence[AttentionMap],
    viz: Any,
    class_names: Sequence[str],
    choice: Choice = Choice(),
) -> tuple[Figure, str]:
    """What is looked at in an image, and a line about it.

    Args:
      photo: the image.
      outputs: of the model, for a batch that begins with it.
      maps: of the same batch, at least one.
      viz: the module that shows the predictions of the task, see `vit_jax.viz.predictions`; None
        for none.
      class_names: of the data; empty where they have none.
      choice: of the maps.

    Raises:
      UserError: if there is no such map, layer, head or query, or it does not look at the image.
    """
    stack = choose_stack(maps, choice.stack)
    weights, last = stacked(stack), stack[-1]
    if len(last.key_grid) != 2:
        raise UserError(f'{last.name} does not look at the image: choose another with --map')
    picture, note = photo.view(SIDE), photo.note
    if (seen := getattr(viz, 'seen', None)) is not None:
        picture = seen(picture)
        note += ', seen in grey' if not np.ptp(picture, axis=-1).any() else ''
    factor = picture.shape[0] // photo.image.shape[0]
    options: dict[str, Any] = {
        'layer': choice.layer,
        'title': f'{caption(photo.path.name, outputs, class_names)} ({note})',
        'seen': tuple(factor * side for side in photo.seen),
    }
    if len(last.query_grid) == 1 and choice.query is None:
        queries = getattr(viz, 'queries', None)
        names = queries and queries(outputs, class_names)
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
    """The file's name, and what the model takes it for."""
    logits = np.asarray(outputs.get('logits', ()))
    if logits.ndim != 2 or len(class_names) != logits.shape[1]:
        return name
    return f'{name}: {class_names[int(logits[0].argmax())]}'


def of_sentences(
    source: np.ndarray,
    target: np.ndarray,
    maps: Sequence[AttentionMap],
    vocab: Tokenizer,
    name: str,
    choice: Choice = Choice(),
) -> tuple[Figure, str]:
    """Which words look at which in a pair of sentences, or in one of them, and a line about it.

    Args:
      source: ids [n].
      target: ids [m].
      maps: of a batch that holds this pair alone, at least one.
      vocab: what the ids stand for.
      name: of the model.
      choice: of the maps.

    Raises:
      UserError: if there is no such map, layer or head.
    """
    stack = choose_stack(maps, choice.stack)
    weights = stacked(stack)
    chosen, words = attention.of_layer(weights, choice.layer, choice.head)
    (who, rows), (whom, columns) = sentence_axes(stack[-1], source, target)
    kind = 'self-attention' if whom.startswith(who) else 'attention'
    figure = alignment.draw(
        chosen,
        vocab.pieces(rows),
        vocab.pieces(columns),
        names=(who, whom),
        title=f'{name}: {kind}, {words}',
    )
    depth, heads = weights.shape[:2]
    line = f'{depth} layers x {heads} heads, {len(rows)} x {len(columns)} tokens'
    return figure, line if who == 'source' else f'{line}; {vocab.decode(target)}'
