"""References to models, as users write them on command lines, in Python and in configs.

RUN                     newest checkpoint of a run folder
RUN@STEP, RUN@best      another one, also written RUN/checkpoints/STEP and RUN/checkpoints/best
FILE, FOLDER, URL       checkpoint of any project, such as hf://google/vit-base-patch16-224
augreg/NAME             name of `list checkpoints`
FAMILY:FILE             checkpoint of a family of your own, such as my_lab.swin:FILE
FILE:vision             one of two towers; FILE:teacher, one of several models
FILE.npz:img            part of an .npz file
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vit_jax.errors import UserError
from vit_jax.storage import paths, run_folder

BEST: Literal['best'] = 'best'  # in place of a step's number
Step = int | Literal['best'] | None

TOWERS = ('vision', 'text')  # of a checkpoint with two
# Names that training scripts put in front of the parameters of a model.
AVERAGES = (
    *('teacher', 'model_ema', 'ema_model', 'ema', 'state_dict_ema', 'ema_state_dict'),
    *('target_encoder', 'momentum_encoder'),
)
STUDENTS = ('student', 'base_encoder')
WRAPPERS = (
    *(*AVERAGES, *STUDENTS, 'state_dict', 'model', 'module', '_orig_mod', 'backbone', 'encoder'),
    *('model_state_dict', 'model_state', 'net', 'network', 'params', 'weights'),
)
PARTS = (*TOWERS, *WRAPPERS)
# The bucket of a name of `list checkpoints`, by its first folder.
BUCKETS = {
    **dict.fromkeys(('augreg', 'imagenet21k', 'imagenet21k+imagenet2012', 'sam'), 'vit_models'),
    **dict.fromkeys(('flexivit', 'siglip', 'siglip2', 'zoo'), 'big_vision'),
    'distill': 'bit_models',
}
# A family and a path; not a URL such as gs://...
_FAMILY = re.compile(r'([^\W\d]\w*(?:\.[^\W\d]\w*)*):(?!//)(.+)')
_STEP = re.compile(rf'{BEST}|\d+')
_NPZ_PART = re.compile(r'(.*\.npz):([^:]+)')


class RunCheckpoint(NamedTuple):
    """Checkpoint of a run.

    Attributes:
      folder: Folder with all checkpoints of the run.
      step: Step, or 'best'; None for the newest.
    """

    folder: paths.Path
    step: Step


@dataclass(frozen=True)
class ModelRef:
    """Reference to a model; accepted wherever a path of a model is.

    Attributes:
      text: Reference as the user writes it.
      family: Family of checkpoints in front of the path; empty if the arrays decide.
      file: Run, file, folder, URL or released name.
      part: Tower or model behind the path; empty for all.
    """

    text: str
    family: str
    file: str
    part: str

    @classmethod
    def parse(cls, reference: str | os.PathLike[str]) -> ModelRef:
        """Parse a reference without looking at the disk; a `ModelRef` stays as it is."""
        if isinstance(reference, ModelRef):
            return reference
        text = os.fspath(reference)
        match = _FAMILY.fullmatch(text)
        has_family = match and not match[1].endswith('.npz') and match[2] not in PARTS
        family, place = (match[1], match[2]) if match and has_family else ('', text)
        file, colon, part = place.rpartition(':')
        # Parts of an .npz file may have the names of wrappers.
        parts = TOWERS if file.endswith('.npz') else PARTS
        if not (colon and file and part in parts):
            file, part = place, ''
        return cls(text, family, file, part)

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text

    @property
    def place(self) -> str:
        """Reference without its family."""
        return f'{self.file}:{self.part}' if self.part else self.file

    @property
    def named_step(self) -> Step:
        """Step behind an @, whether there is such a run or not; None without one."""
        name, _, step = self.text.rpartition('@')
        return _parse_step(step) if name and _STEP.fullmatch(step) else None

    def locate(self) -> tuple[str, str]:
        """Return the file, folder or URL to read, and the part of an .npz file; empty for all.

        The name of a release means its URL.
        """
        name, colon, part = self.file.partition(':')
        bucket = BUCKETS.get(name.partition('/')[0])
        url = self.file
        if bucket and '/' in name and not (os.path.exists(url) or os.path.exists(name)):
            url = f'gs://{bucket}/{name.removesuffix(".npz")}.npz{colon}{part}'
        match = _NPZ_PART.fullmatch(url)
        return (match[1], match[2].strip('/')) if match else (url, '')

    def exists(self) -> bool:
        """Return whether there is such a file or folder; true for a URL."""
        url, _ = self.locate()
        return '://' in url or os.path.exists(url)

    def find_run(self, step: Step = None) -> RunCheckpoint | None:
        """Look for the run with this checkpoint; None if the reference is not to a run.

        Args:
          step: Step of a flag or key; None if it names none.

        Raises:
          UserError: if object storage cannot be reached, the run has no such step, or both the
            reference and `step` name one, and not the same.
        """
        reference = _find_run(paths.path(self.text))
        if reference is None or reference.step is None:
            return reference and reference._replace(step=step)
        if step not in (None, reference.step):
            raise UserError(
                f'{self} names step {reference.step}, but step {step} is requested; give one'
            )
        return reference


def _find_run(path: paths.Path) -> RunCheckpoint | None:
    if paths.is_remote(path) and path.name.partition(':')[0].endswith(('.npz', '.safetensors')):
        return None  # a file; a cached copy needs no network
    with paths.reaching(path):
        if (path / run_folder.CHECKPOINTS).is_dir():
            return RunCheckpoint(path / run_folder.CHECKPOINTS, None)
        parent = path.parent
        if _STEP.fullmatch(path.name) and (
            parent.name == run_folder.CHECKPOINTS or run_folder.finished_steps(parent)
        ):
            return RunCheckpoint(parent, _parse_step(path.name))
        if run_folder.finished_steps(path):
            return RunCheckpoint(path, None)
    name, separator, step = path.name.rpartition('@')
    run = _find_run(path.parent / name) if name and separator else None
    if run is None or run.step is not None:
        return None
    if not _STEP.fullmatch(step):
        finished = ', '.join(map(str, run_folder.finished_steps(run.folder))) or 'none'
        raise UserError(
            f'{path}: {step!r} is neither a step nor {BEST!r} (finished steps: {finished})'
        )
    return RunCheckpoint(run.folder, _parse_step(step))


def _parse_step(text: str) -> Step:
    return BEST if text == BEST else int(text)
