"""The sections `init` and `branch`, which name the origin of a new run; both may be left out."""

from __future__ import annotations

import dataclasses
import os
import re

from vit_jax.errors import UserError, nearest

TOWERS = ('vision', 'text')  # of a checkpoint with two, named behind its path
POSEMBS = ('bilinear', 'bicubic', 'antialiased')


def split_family(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The family in front of a checkpoint's path (empty if there is none), and the path.

    `gs://...` is a URL, `FILE.npz:PART` a part of a file, `FILE:vision` one of two towers, and
    `./a:b` a file of that name.
    """
    text = os.fspath(path)
    match = re.fullmatch(r'([^\W\d]\w*(?:\.[^\W\d]\w*)*):(?!//)(.+)', text)
    if match is None or match[1].endswith('.npz') or match[2] in TOWERS:
        return '', text
    return match[1], match[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Init:
    """`config.init`: the parameters come from a checkpoint.

    Attributes:
      from_: a checkpoint of another code base (a file, a folder, a URL such as
        hf://google/vit-base-patch16-224, a name of `list checkpoints`) or a run folder; empty for
        none; None if the user has to name one.
      posemb: interpolation for resizing its position embedding: 'bilinear' (vision_transformer),
        'bicubic' (transformers) or 'antialiased' bicubic (timm); if empty, as by the code base that
        the checkpoint comes from.
      select: the parts to take from it, see `vit_jax.interop.select`; empty for all.
      classes: a file with the checkpoint's class for each class of the run, one number a line, from
        0; these rows of its head are taken. If empty, the head is kept if it has as many classes,
        else starts anew.
    """

    from_: str | None = ''
    posemb: str = ''
    select: str = ''
    classes: str = ''

    def __post_init__(self) -> None:
        if self.posemb and self.posemb not in POSEMBS:
            raise UserError('config.init.posemb: ' + nearest('method', self.posemb, POSEMBS))
        if self.classes and self.from_ == '':
            raise UserError(
                f'config.init.classes={self.classes}: nothing has these classes; name a '
                'checkpoint, as --config.init.from=FILE, or leave them out'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """`config.branch`: continue from the whole state of another run.

    Attributes:
      from_: a run folder; empty for none.
      step: one of its kept steps.
    """

    from_: str = ''
    step: int = 0
