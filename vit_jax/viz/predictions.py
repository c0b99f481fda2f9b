"""What `predict` shows, and where it finds who shows it.

What a task `foo` predicts is shown by the module `vit_jax.viz.foo`, what the task
`my_lab.tasks.foo` of a user predicts by `my_lab.viz.foo`. Such a module has

    rows(prediction, photo, context)        the lines of the table and of the JSON, a dict each

and may have

    draw(predictions, photos, context)      the figure that `--out` writes, and that
                                            writers get of a run's examples
    add_flags(parser)                       further flags, whose values are in `context.flags`
    adapt_model(model, flags)               the model that predicts, where flags change it
    adapt_task(task, flags)                 the task that predicts, likewise
    queries(outputs, class_names)           {number: name} of the queries of a decoder that
                                            `attention` draws; None for all
    image(prediction, photo)                the picture [Y X 3] of one file that `--out FOLDER`
                                            writes for each of them
    seen(picture)                           what the model sees of a picture [H W 3] in bytes, where
                                            that is less; `attention` draws its maps on it
    WHOLE                                   true if the model is to see whole files, squeezed to its
                                            size, not what the transforms of the run cut out
    COLUMNS                                 the keys that the table shows; by default every one
    BAR                                     a key of values in [0, 1], of which it draws bars

What the command `data` shows of examples is added by further functions, see `batch`. A prediction
is {name: array} of one image, as the task's `predict` names them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import pathlib
import zlib
from types import ModuleType

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.viz import figures


@dataclasses.dataclass(frozen=True)
class Photo:
    """An image file, and what the model gets of it.

    Attributes:
      path: of the file.
      original: its pixels [Y, X, C].
      fields: what a batch has of it, above all `image` [H, W, C].
      note: what was done to it, for people.
      affine: A in (x', y') = A (x, y, 1), from pixels of the original to those of `image`; None
        if a transform does not tell where its pixels come from.
    """

    path: pathlib.Path
    original: UInt8[np.ndarray, 'Y X C']
    fields: dict[str, np.ndarray]
    note: str
    affine: Float[np.ndarray, '2 3'] | None = None

    @property
    def image(self) -> np.ndarray:
        """What the model sees [H, W, C]."""
        return self.fields['image']

    @property
    def number(self) -> int:
        """Of the pixels of the file, so that what is drawn for it depends on nothing else."""
        return zlib.crc32(self.original.tobytes()) >> 1  # of 31 bits, as an index has

    @property
    def seen(self) -> tuple[int, int]:
        """Height and width in pixels of `image` without its padding, which is right and below."""
        if 'pixel_mask' not in self.fields:
            return self.image.shape[0], self.image.shape[1]
        mask = self.fields['pixel_mask']
        return int(mask[:, 0].sum()), int(mask[0].sum())

    def view(self, side: int) -> UInt8[np.ndarray, 'Y X 3']:
        """What the model sees, with the detail of the file, its shorter side at least `side`.

        The height and width are one multiple of the model's. Where the transforms do not tell
        where pixels come from, it is the model's image, enlarged.
        """
        height, width = self.image.shape[:2]
        factor = max(1, -(-side // min(height, width)))
        if self.affine is None:
            return figures.as_picture(self.image, side)
        inverse = np.linalg.inv(self.affine[:, :2])
        spacing = float(np.sqrt(abs(np.linalg.det(inverse)))) / factor  # pixels of the file
        reduced = max(1, int(spacing + 1e-6))  # rounding must not make 3 of 4
        file = Image.fromarray(figures.as_picture(self.original)).reduce(reduced)
        linear, start = inverse / factor / reduced, -inverse @ self.affine[:, 2] / reduced
        # Pixels that are larger in the picture than in the file stay visible as such.
        resample = Image.Resampling.NEAREST if spacing < 0.5 else Image.Resampling.BICUBIC
        data = np.column_stack([linear, start]).ravel().tolist()
        size = (factor * width, factor * height)
        return np.asarray(file.transform(size, Image.Transform.AFFINE, data, resample))

    def to_original(self, points: Float[np.ndarray, '*N 2']) -> Float[np.ndarray, '*N 2']:
        """Points (x, y) of what the model sees as points of the file, both in pixels.

        Raises:
          UserError: if the transforms of the run do not tell.
        """
        linear, shift = self._map()
        return (points - shift) @ np.linalg.inv(linear).T

    def from_original(self, points: Float[np.ndarray, '*N 2']) -> Float[np.ndarray, '*N 2']:
        """The inverse of `to_original`; raises as it does."""
        linear, shift = self._map()
        return points @ linear.T + shift

    def _map(self) -> tuple[Float[np.ndarray, '2 2'], Float[np.ndarray, '2']]:
        if self.affine is None:
            raise UserError(
                f'{self.path}: the transforms of this run do not tell where pixels come from; '
                'let them take the record, and move its points'
            )
        return self.affine[:, :2], self.affine[:, 2]


@dataclasses.dataclass(frozen=True)
class Context:
    """What all images of a call have in common.

    Attributes:
      class_names: of the run's data; empty where they had none.
      flags: of the command, those of the task's module among them.
    """

    class_names: tuple[str, ...]
    flags: argparse.Namespace

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where the data has no names."""
        return self.class_names[label] if label < len(self.class_names) else f'class {label}'


def module_of(task: str) -> ModuleType:
    """The module that shows what a task predicts.

    Args:
      task: `config.task.name`.

    Raises:
      UserError: if there is none, or it has no `rows`.
    """
    path, module = module_path(task), find(task)
    if module is None:
        raise UserError(
            f'there is no module {path!r} to show what task {task!r} predicts; '
            'for sentences, use translate'
        )
    if not hasattr(module, 'rows'):
        raise UserError(f'the module {path!r} does not show what task {task!r} predicts: no rows()')
    return module


def find(task: str) -> ModuleType | None:
    """`module_of`, but None if there is none, and it may lack `rows`."""
    try:
        path = module_path(task)
        found = importlib.util.find_spec(path) is not None
    except (ModuleNotFoundError, UserError):
        found = False
    return importlib.import_module(path) if found else None


def module_path(task: str) -> str:
    """The name of the module that `module_of` imports; raises UserError if it can have none."""
    package, _, name = task.rpartition('.')
    if not package:
        return f'vit_jax.viz.{name}'
    home, _, room = package.rpartition('.')
    if room != 'tasks':
        raise UserError(
            f'task {task!r}: predictions are shown for tasks in a package of the name tasks, as '
            "'my_lab.tasks.foo', by a module beside it, 'my_lab.viz.foo'"
        )
    return f'{home}.viz.{name}' if home else f'viz.{name}'
