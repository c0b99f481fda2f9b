"""Local files of checkpoints that are elsewhere."""

from __future__ import annotations

import pathlib
import re

from vit_jax.interop import hub

_REPOSITORY = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?')


def local(path: str) -> str:
    """The local file or folder of a checkpoint; one on the Hub is downloaded.

    Raises:
      UserError: see `hub.fetch`.
    """
    return hub.fetch(path) if hub.matches(path) else path


def hint(path: str) -> str:
    """The end of the message that there is no such path: the nearest one that there may be."""
    if _REPOSITORY.fullmatch(path) and not pathlib.Path(path).parent.exists():
        return f'; on the Hugging Face Hub it would be {hub.SCHEME}{path}'
    return ''
