"""Trunks: runs at a rate that never falls, from which others branch off to cool down.

Their losses are not those of finished models, and do not belong into a law.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax.storage import paths, run_folder

_TO_THE_END = ('linear', 'cosine')  # schedules that fall without a cooldown


def reasons(folders: Sequence[paths.Path]) -> dict[paths.Path, str]:
    """A line for each run that is a trunk.

    A trunk has not cooled down, and other runs branch off from it or its config keeps steps for
    them. A branch may name the folder by the path that it had on another machine: then the run of
    the same name next to it counts.
    """
    configs = {folder: _config(folder) for folder in folders}
    origins = [place for folder, config in configs.items() for place in _origins(folder, config)]
    found = {}
    for folder, config in configs.items():
        branches = origins.count(paths.absolute(folder))
        kept = (config.get('checkpoint') or {}).get('keep_steps')
        if (branches or kept) and not cools_down(config):
            words = f'{branches} runs branch off from it' if branches else 'it keeps steps for them'
            found[folder] = f'{folder}: a trunk, whose learning rate does not fall: {words}'
    return found


def cools_down(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a run falls to the end."""
    schedule = (config.get('optim') or {}).get('schedule') or {}
    # A duration, as '500 steps', '5%' or 0: its unit does not matter.
    some = re.search('[1-9]', str(schedule.get('cooldown') or ''))
    return some is not None or schedule.get('name') in _TO_THE_END


def _config(folder: paths.Path) -> Mapping[str, Any]:
    """The config of a run; {} for a damaged one, which is named where its row is read."""
    try:
        return run_folder.read_config(folder) or {}
    except ValueError:
        return {}


def _origins(folder: paths.Path, config: Mapping[str, Any]) -> Iterator[paths.Path]:
    if name := (config.get('branch') or {}).get('from'):
        trunk = paths.absolute(name)
        beside = paths.absolute(folder).parent / trunk.name
        yield trunk if trunk == beside or not beside.exists() else beside
