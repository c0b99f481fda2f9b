"""A user's texts as ids for a model of images and texts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.rng import example_rng
from vit_jax.data.transforms import of_texts_alone, parse_transforms
from vit_jax.interop.trained import TrainedModel


def encoder(trained: TrainedModel) -> Callable[[str, str], np.ndarray] | None:
    """A function (field, text) -> ids, by the transforms of the model's evaluation.

    It raises UserError for an empty text. None if the model has no vocabulary.
    """
    if trained.vocab is None:
        return None
    steps = parse_transforms(of_texts_alone(trained.transforms), trained.vocab)
    return lambda field, text: steps({field: text}, example_rng(0, 0))[field]
