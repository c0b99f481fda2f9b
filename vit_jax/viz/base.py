"""Base class of a task's visualization: predictions for files, and examples of the data.

`vit_jax/viz/<task>.py` derives a class `Viz` from this one. Every method has a default, so that a
task without such a module can be shown. `fields` and `prediction` are {name: array} of one example,
named as in a batch and in the result of the task's `predict`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.errors import UserError
from vit_jax.nn.maps import AttentionMap
from vit_jax.viz import attention_pictures, batch, figures
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = UInt8[np.ndarray, 'Y X 3']
LINES = 5  # maximum number of rows per image in the default picture
Texts = list[dict[str, str]]  # rows {column: text}


class Viz:
    """Visualization of a task in `predict`, `attention` and `data`, and during a run.

    Attributes:
      columns: Keys of `rows` that the table of `predict` shows; None for all.
      bar: Key with values in [0, 1] that the table draws as bars.
      coco: Keys of `rows` that a COCO result has besides `image_id`; empty if the task does not
        detect objects.
      whole: Whether the model sees whole files, resized to its input, instead of crops by the run's
        transforms.
      side: Width in inches of each of the `panels`.
    """

    columns: tuple[str, ...] | None = None
    bar: str | None = None
    coco: tuple[str, ...] = ()
    whole: bool = False
    side: float = batch.SIDE

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if 'look' in vars(cls):  # former name
            cls.draw_attention = vars(cls)['look']  # type: ignore[method-assign]

    # The command `predict`.

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add flags to `predict`; their values are in `context.flags`. None by default."""

    def adapt_model(self, model: Any, context: Context) -> Any:
        """Apply flags to the model."""
        del context
        return model

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Apply flags to the task; `context.encode` tokenizes their texts."""
        del context
        return task

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return rows of the table and the JSON; by default a summary of each array."""
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

    def note(self, prediction: Fields, context: Context) -> str:
        """Return the line that `predict` prints for an image without rows."""
        del prediction, context
        return 'nothing is predicted'

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw the picture of `--out FILE`: by default a row of `panels` per file, or images with
        their rows as text.
        """
        panels = [self.panels(*pair) for pair in zip(predictions, photos, strict=True)]
        if any(panels):
            return batch.draw_rows(panels, [photo.path.name for photo in photos], self.side)
        captions = []
        for prediction, photo in zip(predictions, photos, strict=True):
            rows = self.rows(prediction, photo, context)[:LINES]
            captions.append('\n'.join([photo.path.name, *map(self._line, rows)]))
        return batch.draw_images([photo.image for photo in photos], captions)

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return pictures of one file with titles; none by default."""
        del prediction, photo
        return []

    def _line(self, row: Mapping[str, Any]) -> str:
        values = [row.get(name) for name in self.columns or row]
        return '  '.join(f'{v:.3f}' if isinstance(v, float) else str(v) for v in values)

    def image(self, prediction: Fields, photo: Photo, context: Context) -> Picture:
        """Draw the picture of one file for `--out FOLDER`; by default `draw` of this file."""
        return figures.pixels(self.draw([prediction], [photo], context))

    # The command `attention`.

    def seen(self, picture: Picture) -> Picture:
        """Reduce a picture to what the model sees, such as its luminance; by default unchanged."""
        return picture

    def queries(self, outputs: Mapping[str, Any], context: Context) -> dict[int, str] | None:
        """Return the decoder queries to draw, {index: name}; None, the default, for all."""
        del outputs, context
        return None

    # The command `data`.

    def caption(self, fields: Fields, context: Context) -> str:
        """Return the caption of an example of the data; by default its texts."""
        return '; '.join(context.texts(fields).values())

    def mark(self, axes: Axes, fields: Fields, context: Context) -> None:
        """Draw the annotations of an example on its image; by default nothing."""

    def draw_batch(
        self, images: Sequence[np.ndarray] | None, examples: Sequence[Fields], context: Context
    ) -> Figure:
        """Draw the examples of a batch: by default images side by side, or a table of texts.

        Args:
          images: Input images [H W C] of the model; None if there are none.
          examples: Arrays of each example.
          context: Context of the data.

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
            raise UserError(f'the batch has {", ".join(examples[0])}, but neither images nor text')
        return batch.draw_texts(texts)

    # For a run that shows examples of its evaluation.

    def texts(self, prediction: Fields, fields: Fields, context: Context) -> dict[str, str]:
        """Return a row {column: text} for an example without an image; by default all its texts."""
        return {**context.texts(fields), **context.texts(prediction)}

    def show(
        self,
        predictions: Sequence[Fields],
        examples: Sequence[Photo | Fields],
        context: Context,
    ) -> Figure | Texts:
        """Draw a picture for the writers of a run, or return rows if examples have no images."""
        photos = [example for example in examples if isinstance(example, Photo)]
        if photos:
            return self.draw(predictions, photos, context)
        fields = [example for example in examples if not isinstance(example, Photo)]
        return [self.texts(p, f, context) for p, f in zip(predictions, fields, strict=True)]

    def draw_attention(
        self,
        example: Photo | Fields,
        outputs: Mapping[str, Any],
        maps: Sequence[AttentionMap],
        context: Context,
    ) -> Figure | None:
        """Draw the model's attention to an example; by default None without an image.

        Args:
          example: First example of `show`.
          outputs, maps: Model outputs and attention maps for a batch of only this example.
          context: Context of the data.
        """
        if not isinstance(example, Photo):
            return None
        figure, _ = attention_pictures.draw_on_photo(example, outputs, maps, self, context)
        return figure
