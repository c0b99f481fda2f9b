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
from vit_jax.data.batches import as_facts
from vit_jax.data.dataset import Dataset
from vit_jax.data.vocabulary import Vocabulary
from vit_jax.runtime import versions
from vit_jax.trainer.build import Training


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


def of_data(training: Training) -> dict[str, Any]:
    """The facts of the data of training and of all evaluations, by their places in the config."""
    facts = _facts('config.data', training.data)
    facts['config.data: batches'] = as_facts(training.data.shapes)
    for name, one in training.evaluations.items():
        where = f'config.evals.{name}'
        facts |= _facts(where, one.data)
        facts[f'{where}: batches'] = one.data.plan.eval_steps
        if one.fit is not None:
            facts |= _facts(f'{where}.fit', one.fit)
            facts[f'{where}.fit: batches'] = one.fit.plan.eval_steps
        if one.evaluator is not None:
            facts[f'{where}: files of its evaluator'] = one.evaluator.digest()
    return facts


def _facts(where: str, data: Dataset) -> dict[str, Any]:
    """The facts of a data set; a digest stands for what is long."""
    facts = {
        'examples': len(data.source),
        'classes': _digest(json.dumps(data.info.class_names).encode()),
        'vocabulary': data.vocab.digest if isinstance(data.vocab, Vocabulary) else None,
        'arrays': {name: [list(s.shape), s.dtype.name] for name, s in data.spec.items()},
        'names and labels': data.listing.examples,
        'sizes of files': data.listing.contents,
    }
    return {f'{where}: {name}': fact for name, fact in facts.items()}


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
