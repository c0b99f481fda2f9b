"""Local files of checkpoints that are elsewhere."""

from __future__ import annotations

import contextlib
import pathlib
import re

from vit_jax.errors import UserError, in_full
from vit_jax.interop import hub, released
from vit_jax.storage import fetched, paths, servers

_REPOSITORY = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?')


def local(path: str) -> str:
    """The local file or folder of a checkpoint; what is elsewhere is downloaded once.

    Raises:
      UserError: if there is no such file, or it cannot be downloaded or kept.
    """
    if hub.matches(path):
        return hub.fetch(path)
    if '://' not in path or path.endswith(hub.PICKLES):
        return path
    try:
        return _fetch(in_full(path))
    except fetched.MissingFile as error:
        near = released.nearest(path)
        raise UserError(f'{error}; did you mean {near}?' if near else str(error)) from None


def hint(path: str) -> str:
    """The end of the message that there is no such path: the nearest one that there may be."""
    if near := released.nearest(path):
        return f'; did you mean {near}?'
    if _REPOSITORY.fullmatch(path) and not pathlib.Path(path).parent.exists():
        return f'; on the Hugging Face Hub it would be {hub.SCHEME}{path}'
    return ''


def _fetch(url: str) -> str:
    """The local copy of a file, with the configs beside it, or of a folder with weights."""
    above, _, name = url.rstrip('/').rpartition('/')
    if name.endswith('.npz'):
        return str(fetched.together(above, [name], [name]) / name)
    if name.endswith('.safetensors'):
        return str(fetched.together(above, [*hub.CONFIGS, name], [name]) / name)
    above, names = url.rstrip('/'), [*hub.CONFIGS, hub.INDEX]
    with contextlib.suppress(servers.Unreachable):  # there may be copies of shards
        single = fetched.together(above, [*hub.CONFIGS, hub.WEIGHTS], [])
        if (single / hub.WEIGHTS).is_file():  # as in `files`, whatever index is left beside it
            return str(single)
    if (index := fetched.together(above, names, []) / hub.INDEX).is_file():
        return str(fetched.together(above, [*names, *(s := _shards(index, above))], s))
    return str(fetched.together(above, [*hub.CONFIGS, hub.WEIGHTS], [hub.WEIGHTS]))


def _shards(index: pathlib.Path, url: str) -> list[str]:
    """The files that an index lists, all in its own folder."""
    try:
        shards = sorted(
            {str(name) for name in paths.parse_json(paths.read_bytes(index))['weight_map'].values()}
        )
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        raise UserError(f'{url}/{index.name}: there is no weight_map in it; get it again') from None
    for name in shards:
        if not paths.stays_inside(name) or '/' in name:
            raise UserError(f'{url}/{index.name}: {name!r} is outside of its folder')
    return shards
