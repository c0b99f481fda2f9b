"""The base of what shows a task: its predictions for files, and examples of its data.

`vit_jax/viz/<task>.py` has a class `Viz` derived from this one. Every method has a default, so
that a task without a module of its own is shown too. `fields` and `prediction` are {name: array}
of one example, as a batch and the task's `predict` name them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vit_jax.errors import UserError
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.viz import attention_pictures, batch, figures
from vit_jax.viz.photo import Context, Fields, Photo

Picture = UInt8[np.ndarray, 'Y X 3']
LINES = 5  # rows of an image, at most, that the default picture has
Texts = list[dict[str, str]]  # rows of {column: text}


class Viz:
    """How a task is shown: by the commands `predict`, `attention` and `data`, and during a run.

    Attributes:
      columns: keys of `rows` that the table of `predict` has; None for all of them.
      bar: a key of values in [0, 1], of which the table draws bars.
      whole: whether the model sees whole files, squeezed to its size, instead of what the
        transforms of the run cut out.
    """

    columns: tuple[str, ...] | None = None
    bar: str | None = None
    whole: bool = False

    # The command `predict`.

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add flags to `predict`, whose values are in `context.flags`; none by default."""

    def adapt_model(self, model: Any, flags: argparse.Namespace) -> Any:
        """The model that predicts, where flags change it."""
        del flags
        return model

    def adapt_task(self, task: Any, flags: argparse.Namespace) -> Any:
        """The task that predicts, where flags change it."""
        del flags
        return task

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """The lines of the table and of the JSON; by default a summary of each array."""
        del photo, context
        return [
            {
                'array': name,
                'shape': list(values.shape),
                'mean': float(values.mean()),
                'min': float(values.min()),
                'max': float(values.max()),
            }
            for name, values in prediction.items()
            if values.size
        ]

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """The picture that `--out FILE` writes; by default images with their rows as text."""
        captions = []
        for prediction, photo in zip(predictions, photos, strict=True):
            found = self.rows(prediction, photo, context)[:LINES]
            captions.append('\n'.join([photo.path.name, *map(self._line, found)]))
        return batch.draw_images([photo.image for photo in photos], captions)

    def _line(self, row: Mapping[str, Any]) -> str:
        values = [row.get(name) for name in self.columns or row]
        return '  '.join(f'{v:.3f}' if isinstance(v, float) else str(v) for v in values)

    def image(self, prediction: Fields, photo: Photo, context: Context) -> Picture:
        """The picture of one file that `--out FOLDER` writes; by default `draw` of it alone."""
        return figures.pixels(self.draw([prediction], [photo], context))

    # The command `attention`.

    def seen(self, picture: Picture) -> Picture:
        """The part of a picture that the model sees, as its luminance; by default all of it."""
        return picture

    def queries(self, outputs: Mapping[str, Any], context: Context) -> dict[int, str] | None:
        """{number: name} of the queries of a decoder to draw; by default None, for all."""
        del outputs, context
        return None

    # The command `data`.

    def caption(self, fields: Fields, context: Context) -> str:
        """The line above an example of the data; by default its texts."""
        return '; '.join(context.texts(fields).values())

    def mark(self, axes: Axes, fields: Fields, context: Context) -> None:
        """Draw on the image of an example what the data say of it; by default nothing."""

    def draw_batch(
        self, images: Sequence[np.ndarray] | None, examples: Sequence[Fields], context: Context
    ) -> Figure:
        """The examples of a batch; by default images beside one another, or a table of texts.

        Args:
          images: that the model gets [H W C]; None if it gets none.
          examples: their arrays.
          context: of the data.

        Raises:
          UserError: if there are neither images nor texts.
        """
        if images is not None:
            captions = [self.caption(example, context) for example in examples]
            figure = batch.draw_images(images, captions)
            for axes, example in zip(figure.axes, examples, strict=False):
                self.mark(axes, example, context)
            return figure
        texts = [context.texts(example) for example in examples]
        if not all(texts):
            raise UserError(f'the batch has {", ".join(examples[0])}: neither images nor text')
        return batch.draw_texts(texts)

    # A run that shows examples of its evaluation.

    def texts(self, prediction: Fields, fields: Fields, context: Context) -> dict[str, str]:
        """The row {column: text} of an example without an image; by default all that is text."""
        return {**context.texts(fields), **context.texts(prediction)}

    def show(
        self,
        predictions: Sequence[Fields],
        examples: Sequence[Photo | Fields],
        context: Context,
    ) -> Figure | Texts:
        """What the writers of a run get: a picture of images, rows of anything else."""
        photos = [example for example in examples if isinstance(example, Photo)]
        if photos:
            return self.draw(predictions, photos, context)
        fields = [example for example in examples if not isinstance(example, Photo)]
        return [self.texts(p, f, context) for p, f in zip(predictions, fields, strict=True)]

    def look(
        self,
        example: Photo | Fields,
        outputs: Mapping[str, Any],
        maps: Sequence[AttentionMap],
        context: Context,
    ) -> Figure | None:
        """Where the model looks in an example; by default None without an image.

        Args:
          example: the first that `show` gets.
          outputs, maps: of the model, for a batch of this example alone.
          context: of the data.
        """
        if not isinstance(example, Photo):
            return None
        figure, _ = attention_pictures.of_photo(example, outputs, maps, self, context)
        return figure
