"""Recall of the right text for an image among all texts, and of the right image for a text.

Recall at k is the share of images that have one of their own texts among the k nearest, and the
other way round, as on Flickr30k and COCO (Karpathy and Fei-Fei, 2015, arXiv:1412.2306).
"""

from __future__ import annotations

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays

ROWS = 1024  # queries at once: bounds the memory for similarities


class Evaluator(base.Evaluator):
    """`text_recall_K` for images, and `image_recall_K` for texts.

    Equal texts count as one text, and examples with the same `image_id`, if the data have it, as
    one image. So an image may have several texts, and a text several images.

    Args:
      ks: numbers of nearest neighbors.
      text: the field of the data that holds the ids of the texts.
    """

    predictions = ('features', 'text')

    def __init__(self, ks: tuple[int, ...] = (1, 5, 10), text: str = 'caption'):
        if not ks or min(ks) < 1:
            raise UserError(f'ks={tuple(ks)}: give numbers from 1 on')
        self.ks, self.text = tuple(ks), text
        self.start()

    def names(self) -> tuple[str, ...]:
        return tuple(f'{side}_recall_{k}' for side in ('text', 'image') for k in self.ks)

    def start(self) -> None:
        self._rows: list[tuple[np.ndarray, ...]] = []

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError without embeddings of both, or without texts in the data."""
        needed = (('features', predictions), ('text', predictions), (self.text, batch))
        for name, arrays in needed:
            if name not in arrays:
                raise UserError(f'images are matched with their texts, but there is no {name!r}')
        which = batch.get('image_id', batch['index'])
        self._rows.append((predictions['features'], predictions['text'], batch[self.text], which))

    def result(self) -> dict[str, float]:
        images, texts, ids, which = (np.concatenate(x) for x in zip(*self._rows, strict=True))
        self.start()  # embeddings are large: they are not kept until the next pass
        if not (np.isfinite(images).all() and np.isfinite(texts).all()):
            return dict.fromkeys(self.names(), math.nan)
        _, first_image, image_of = np.unique(which, return_index=True, return_inverse=True)
        _, first_text, text_of = np.unique(ids, axis=0, return_index=True, return_inverse=True)
        matches = np.zeros((len(first_image), len(first_text)), bool)
        matches[image_of.ravel(), text_of.ravel()] = True
        images, texts = images[first_image], texts[first_text]
        found = recalls(images, texts, matches, self.ks), recalls(texts, images, matches.T, self.ks)
        return dict(zip(self.names(), [share for side in found for share in side], strict=True))


def recalls(
    queries: np.ndarray, candidates: np.ndarray, matches: np.ndarray, ks: tuple[int, ...]
) -> list[float]:
    """For each k the share of queries [N E] with a match among the k nearest candidates [M E].

    Args:
      queries, candidates: embeddings of length 1.
      matches: which of them match, [N M].
      ks: numbers of nearest neighbors.
    """
    ranks: list[np.ndarray] = []
    for start in range(0, len(queries), ROWS):
        part = slice(start, start + ROWS)
        ranks.append(base.ranks(queries[part] @ candidates.T, matches[part]))
    return [float((np.concatenate(ranks) < k).mean()) for k in ks]
