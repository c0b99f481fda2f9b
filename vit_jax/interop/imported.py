"""A model as it is read from a file, and as it is written to one."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

# In the `extra` of a family: height and width of the images to come, where the user gives them.
GIVEN_SIZE = 'image size given by the user'


@dataclasses.dataclass(frozen=True)
class ImportedModel:
    """What a checkpoint holds, of another code base or of a run, in this package's terms.

    Attributes:
      params: nested float32 numpy arrays under this package's names, blocks unrolled.
      model: all keywords of `config.model`, with its name.
      image_size: height and width in pixels that the parameters were made for; None where nothing
        tells, or they fit images of any size.
      source: where it comes from, a phrase for people.
      class_names: one for each output of the head; empty where nothing tells them.
      task: all keywords of `config.task`, with its name: what the model does.
      transforms: what makes its inputs of image files, of a run those of its first evaluation;
        empty for images cropped to `image_size`.
      notes: what had to be assumed, a line each.
      collections: other Flax collections by name, such as `batch_stats`.
    """

    params: dict[str, Any]
    model: dict[str, Any]
    image_size: tuple[int, int] | None
    source: str
    class_names: tuple[str, ...] = ()
    task: dict[str, Any] = dataclasses.field(default_factory=lambda: {'name': 'classify'})
    transforms: str = ''
    notes: tuple[str, ...] = ()
    collections: dict[str, Any] = dataclasses.field(default_factory=dict)

    def with_notes(self, *notes: str) -> ImportedModel:
        """The same with more notes."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))


class Written(NamedTuple):
    """What is to be in the files of another code base.

    Attributes:
      arrays: by the names there.
      config: of config.json; None if the form has none.
      notes: what the files cannot say of the model, a line each.
      preprocessor: of preprocessor_config.json; None if the form has none.
    """

    arrays: dict[str, np.ndarray]
    config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    preprocessor: dict[str, Any] | None = None
