"""Text retrieval for images, and image retrieval for texts.

Recall at k is the share of images with one of their texts among the k nearest, and vice versa, as
on Flickr30k and COCO (Karpathy and Fei-Fei, 2015, arXiv:1412.2306).
"""

from __future__ import annotations

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays

ROWS = 1024  # queries at a time, to limit the memory for similarities


class Evaluator(base.Evaluator):
    """`text_recall_K` for images, and `image_recall_K` for texts.

    Equal texts count as one text, and examples with the same `image_id`, if the data have it, as
    one image. So an image may have several texts, and a text several images.

    Args:
      ks: Numbers of nearest neighbors.
      text: Batch field with the token ids of the texts.
    """

    predictions = ('features', 'text')

    def __init__(self, ks: tuple[int, ...] = (1, 5, 10), text: str = 'caption'):
        if not ks or min(ks) < 1:
            raise UserError(f'ks={tuple(ks)}: must be numbers of at least 1')
        self.ks, self.text = tuple(ks), text
        self.start()

    def names(self) -> tuple[str, ...]:
        return tuple(f'{side}_recall_{k}' for side in ('text', 'image') for k in self.ks)

    def start(self) -> None:
        self._rows: list[tuple[np.ndarray, ...]] = []

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if there are no predicted embeddings, or no texts."""
        required = (('features', predictions), ('text', predictions), (self.text, batch))
        for name, arrays in required:
            if name not in arrays:
                raise UserError(f'retrieval compares images with texts, but there is no {name!r}')
        image_ids = batch.get('image_id', batch['index'])
        self._rows.append(
            (predictions['features'], predictions['text'], batch[self.text], image_ids)
        )

    def result(self) -> dict[str, float]:
        images, texts, ids, image_ids = (np.concatenate(x) for x in zip(*self._rows, strict=True))
        self.start()  # free the large embeddings
        if not (np.isfinite(images).all() and np.isfinite(texts).all()):
            return dict.fromkeys(self.names(), math.nan)
        _, first_image, image_of = np.unique(image_ids, return_index=True, return_inverse=True)
        _, first_text, text_of = np.unique(ids, axis=0, return_index=True, return_inverse=True)
        matches = np.zeros((len(first_image), len(first_text)), bool)
        matches[image_of.ravel(), text_of.ravel()] = True
        images, texts = images[first_image], texts[first_text]
        recall = (
            recalls(images, texts, matches, self.ks),
            recalls(texts, images, matches.T, self.ks),
        )
        return dict(zip(self.names(), [share for side in recall for share in side], strict=True))


def recalls(
    queries: np.ndarray, candidates: np.ndarray, matches: np.ndarray, ks: tuple[int, ...]
) -> list[float]:
    """Compute for each k the share of queries [N E] with a match among the k nearest candidates [M
    E].

    Args:
      queries, candidates: Embeddings of length 1.
      matches: [N M], whether a candidate matches the query.
      ks: Numbers of nearest neighbors.
    """
    ranks: list[np.ndarray] = []
    for start in range(0, len(queries), ROWS):
        part = slice(start, start + ROWS)
        ranks.append(base.ranks(queries[part] @ candidates.T, matches[part]))
    return [float((np.concatenate(ranks) < k).mean()) for k in ks]
