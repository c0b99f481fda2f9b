"""Visualization of generated captions and their attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.ops.search import EOS
from vit_jax.viz import batch, siglip
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Viz(siglip.Viz):
    """Show the caption of each image or, for texts of the flags, the most probable ones."""

    columns: tuple[str, ...] | None = ('caption', 'score')  # type: ignore[assignment]
    bar: str | None = None  # type: ignore[assignment]

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Let the task choose among the texts of the flags, if there are any.

        Raises:
          UserError: if a text is empty or repeated.
        """
        flags = context.flags
        if flags.texts is None and flags.classes is None:
            return task
        assert context.encode is not None
        self._texts = siglip.read_texts(flags)
        self.columns, self.bar = ('text', 'probability', 'log_likelihood'), 'probability'
        rows = [context.encode(task.caption, text).tolist() for text in self._texts]
        return dataclasses.replace(task, prompts=tuple(map(tuple, rows)))

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the caption with its score, or texts with their probabilities."""
        if 'likelihood' not in prediction:
            return [
                {
                    'caption': self._caption(prediction, context),
                    'score': float(prediction['score']),
                }
            ]
        scores = prediction['likelihood'].astype(np.float64)
        odds = np.exp(scores - scores.max())
        order = (-scores).argsort(kind='stable')[: context.flags.top]
        return [
            {
                'text': self._texts[i],
                'probability': float(odds[i] / odds.sum()),
                'log_likelihood': float(scores[i]),
            }
            for i in order.tolist()
        ]

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw the images, with names and captions above."""
        rows = [self.rows(p, x, context)[0] for p, x in zip(predictions, photos, strict=True)]
        captions = [row.get('caption', row.get('text')) for row in rows]
        titles = [f'{x.path.name}\n{text}' for x, text in zip(photos, captions, strict=True)]
        return batch.draw_images([photo.image for photo in photos], titles)

    def queries(self, outputs: Mapping[str, Any], context: Context) -> dict[int, str] | None:
        """Return the positions of the first caption up to its end, with predicted tokens."""
        if 'logits' not in outputs or context.vocab is None:
            return None
        ids = np.asarray(outputs['logits'])[0].argmax(-1)
        ends = np.flatnonzero(ids == EOS)
        ids = ids[: ends[0] + 1] if len(ends) else ids
        return dict(enumerate(context.vocab.pieces(ids)))

    def _caption(self, prediction: Fields, context: Context) -> str:
        if context.vocab is None:
            raise UserError('the checkpoint has no vocabulary for texts')
        return context.vocab.decode(prediction['tokens'])
