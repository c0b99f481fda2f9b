"""Agreement of the processes of a job on config, code and data, so that all compute one run.

Each of them loads its own config, code and data. Where these differ, parameters drift apart
without any error, or one process waits for ever in a collective that the others do not enter.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

import vit_jax
from vit_jax.config import load as config_lib
from vit_jax.data.dataset import Dataset
from vit_jax.runtime import versions


def of_start(
    config: ConfigDict, stop_at: int | None, restart: bool, extend: bool
) -> dict[str, Any]:
    """The facts that are known before any data are opened: config and code."""
    resolved = json.loads(config_lib.to_json(config.copy_and_resolve_references()))
    return {
        **dict(_flat('config', resolved)),
        '--stop-at': stop_at,
        '--restart': restart,
        '--extend': extend,
        'the code of vit_jax': _code(),
        **versions.packages(),
    }


def of_data(data: Dataset) -> dict[str, Any]:
    """The facts of the training data."""
    facts = data.facts()
    return {
        'examples': facts.get('num_examples'),
        'classes': _digest(json.dumps(facts.get('class_names')).encode()),
        'vocabulary': facts.get('vocab'),
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(f'{name}.{key}', inner)


@functools.cache
def _code() -> str:
    """A digest of the package's Python files, which a version of a checkout says little about."""
    root = pathlib.Path(vit_jax.__file__).parent
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob('*.py'))
    return _digest(b''.join(name.encode() + path.read_bytes() for name, path in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
