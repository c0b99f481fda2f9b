"""Files in half precision, and whether `convert` writes them as they were."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from vit_jax import __main__ as cli
from vit_jax.interop import files, hub
from vit_jax.interop.trained import TrainedModel

CONFIGS = ('config.json', hub.OPEN_CLIP)
UNKNOWN = {'of_another_version': {'b': [1, None], 'a': 0.1}}


def anew(imported: TrainedModel) -> TrainedModel:
    """The model without its file, so that the function of WRITERS writes it."""
    return dataclasses.replace(imported, origin='')


def halved(place: pathlib.Path) -> None:
    """Change the numbers of a file to both half precisions, and add an unknown key to its config.

    They are written by other code than `files`.
    """
    flat, _ = files.read_stored(place)
    kinds = np.float16, ml_dtypes.bfloat16, np.float32
    halves = {
        name: array.astype(kinds[i % 3]) if array.dtype == np.float32 else array
        for i, (name, array) in enumerate(flat.items())
    }
    if place.suffix == '.npz':
        np.savez(place, **halves)
        return
    package = pytest.importorskip('safetensors.numpy')
    (weights,) = place.glob('*.safetensors')
    package.save_file(halves, weights, metadata={'format': 'pt'})
    for config in (place / name for name in CONFIGS if (place / name).exists()):
        config.write_text(json.dumps(UNKNOWN | json.loads(config.read_text())))


def assert_comes_back(place: pathlib.Path, prefix: str = '') -> None:
    """Convert a file to the same form, which `prefix` may name, after `halved`."""
    halved(place)
    again = place.with_name(f'again{place.suffix}')
    assert cli.main(['convert', str(place), f'{prefix}{again}']) == 0
    assert_same(place, again)


def assert_same(place: pathlib.Path, again: pathlib.Path) -> None:
    """Compare two files, and the configs beside them, byte by byte."""
    stored, written = (files.read_stored(path)[0] for path in (place, again))
    assert stored.keys() == written.keys()
    for name, array in stored.items():
        assert array.dtype == written[name].dtype
        assert array.shape == written[name].shape
        assert array.tobytes() == written[name].tobytes(), name
    if place.is_dir():
        beside = [name for name in hub.BESIDE if (place / name).exists()]
        assert {path.name for path in again.iterdir()} == {path.name for path in place.iterdir()}
        for name in beside:
            assert (place / name).read_bytes() == (again / name).read_bytes()
