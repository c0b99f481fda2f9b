"""Settings of runs: all of a config but the seed, as a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError
from vit_jax.scaling.seeds import SETTING
from vit_jax.storage import paths, run_folder


def digest(config: Mapping[str, Any]) -> str:
    """The first 12 digits of the SHA-256 of a config's JSON with sorted keys."""
    text = json.dumps(config, sort_keys=True, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def setting(config: Mapping[str, Any]) -> str:
    """The digest of a config without its seed; a branch counts by its trunk's config likewise."""
    kept = _seedless(config)
    branch = dict(config.get('branch') or {})
    if branch.get('from') and (trunk := _trunk(branch['from'])) is not None:
        # It may go on for other branches, and keep what these need.
        common = {key: trunk[key] for key in trunk if key not in ('total', 'checkpoint')}
        kept['branch'] = branch | {'from': digest(_seedless(common))}
    return digest(kept)


def _seedless(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != 'seed'}


def _trunk(folder: str) -> dict[str, Any] | None:
    """The config of a run that others branch from; None if it is gone or out of reach."""
    try:
        return run_folder.read_config(paths.path(folder))
    except UserError:
        return None


def shared(folders: Sequence[paths.Path]) -> list[dict[str, str]]:
    """For every run, its setting as `{'setting': digest}`; {} if no two runs share one."""
    configs = [run_folder.read_config(folder) or {} for folder in folders]
    found = [setting(config) for config in configs]
    seeds = [config.get('seed') for config in configs]
    pairs = set(zip(found, seeds, strict=True))
    if len(pairs) == len(set(found)):
        return [{} for _ in folders]
    return [{SETTING: one} for one in found]
