"""Visualization of image-text matching: best texts of each image, and all similarities."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.errors import UserError, positive_number
from vit_jax.evaluators.zero_shot import as_words
from vit_jax.storage import paths
from vit_jax.viz import base, figures
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = 0.55  # inches: side of an image, and of a cell of the matrix
PROMPT = 'a photo of a {}'


class Viz(base.Viz):
    """Show the most similar texts of each image, and the matrix of similarities."""

    columns = ('text', 'probability', 'similarity')
    bar = 'probability'

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the texts, or the class names to build them from."""
        parser.add_argument('--texts', metavar='A;B', help='texts to match with each image')
        parser.add_argument('--classes', metavar='FILE', help='class names, one per line')
        parser.add_argument(
            '--prompts',
            metavar='TEMPLATE',
            default=PROMPT,
            help=f'text of a class, with {{}} for its name (default: {PROMPT!r})',
        )
        help_text = 'texts to show (default: 5)'
        parser.add_argument('--top', type=positive_number, default=5, metavar='K', help=help_text)

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Let the task match images with the texts of the flags.

        Raises:
          UserError: if texts or the vocabulary are missing, or a text is empty or repeated.
        """
        self._texts = read_texts(context.flags)
        if context.encode is None:
            raise UserError(
                'the checkpoint has no vocabulary for texts: put the tokenizer of its authors next '
                'to it, spiece.model or tokenizer.json'
            )
        rows = [context.encode(task.text, text).tolist() for text in self._texts]
        return dataclasses.replace(task, prompts=tuple(map(tuple, rows)))

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the most similar texts of an image, the best first."""
        if 'probs' not in prediction:
            return super().rows(prediction, photo, context)
        order = (-prediction['similarity']).argsort(kind='stable')[: context.flags.top]
        return [
            {
                'text': self._texts[i],
                'probability': float(prediction['probs'][i]),
                'similarity': float(prediction['similarity'][i]),
            }
            for i in order.tolist()
        ]

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw a matrix of images and texts, from the flags or the images' own captions."""
        images = [photo.image for photo in photos]
        if all('similarity' in p for p in predictions):
            return draw_similarity(
                images, self._texts, np.stack([p['similarity'] for p in predictions])
            )
        if not all('text' in p for p in predictions):
            return super().draw(predictions, photos, context)
        captions = [self.caption(photo.fields, context) for photo in photos]
        features, texts = (np.stack([p[k] for p in predictions]) for k in ('features', 'text'))
        return draw_similarity(images, captions, features @ texts.T)


def read_texts(flags: argparse.Namespace) -> list[str]:
    """Read the texts of the flags.

    Raises:
      UserError: if there are no texts, one is empty or repeated, or a class is a WordNet id.
    """
    if (flags.texts is None) == (flags.classes is None):
        raise UserError("set the texts with --texts 'A;B', or class names with --classes FILE")
    if flags.texts is not None:
        texts = [text.strip() for text in flags.texts.split(';')]
    else:
        if '{}' not in flags.prompts:
            raise UserError(f'--prompts {flags.prompts!r} has no {{}} for the class name')
        names = _read_class_names(flags.classes)
        words = as_words(names, f'--classes {flags.classes}', '--classes')
        texts = [flags.prompts.replace('{}', name) for name in words]
    if not all(texts):
        raise UserError('--texts: a text is empty')
    duplicates = [text for text, count in collections.Counter(texts).items() if count > 1]
    if duplicates:
        raise UserError(f'the text {duplicates[0]!r} occurs twice')
    return texts


def _read_class_names(path: str) -> list[str]:
    try:
        lines = paths.read_lines(paths.path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'--classes {path}: {error}') from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise UserError(f'--classes {path}: the file has no names')
    return names


def draw_similarity(
    images: Sequence[np.ndarray], texts: Sequence[str], similarity: np.ndarray
) -> Figure:
    """Draw the cosines [images, texts], images on the left, texts above, the best in bold."""
    rows, columns = similarity.shape
    text_height = 0.045 * max(map(len, texts))  # inches, for texts at 45 degrees
    size = (CELL * (columns + 1) + text_height + 0.4, CELL * rows + text_height + 0.2)
    figure = figures.new_figure(size, None)
    height = CELL * rows / size[1]
    left = CELL / size[0]
    axes = figure.add_axes((left + 0.02, 0.02, CELL * columns / size[0], height))
    axes.imshow(similarity, cmap='Blues', aspect='auto')
    axes.set_xticks(range(columns), texts, rotation=45, ha='left', fontsize=8)
    axes.xaxis.tick_top()
    axes.set_yticks([])
    axes.tick_params(length=0)
    middle = (similarity.min() + similarity.max()) / 2
    for (row, column), value in np.ndenumerate(similarity):
        is_best = value == similarity[row].max()
        color = 'white' if value > middle else figures.INK
        style: dict[str, Any] = {'color': color, 'weight': 'bold' if is_best else 'normal'}
        style |= {'ha': 'center', 'va': 'center', 'fontsize': 8}
        axes.text(column, row, f'{value:.2f}', **style)
    for row, image in enumerate(images):
        bottom = 0.02 + height * (rows - 1 - row) / rows
        box = (0.01, bottom + 0.004, left, height / rows - 0.008)
        figures.show_image(figure.add_axes(box), figures.as_picture(image), '')
    return figure
