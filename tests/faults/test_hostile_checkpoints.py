"""Checkpoints of other code bases, in every form, that are damaged or made to do harm."""

from __future__ import annotations

import io
import json
import os
import pathlib
import resource
import time
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import mutations, released
from helpers.messages import mentions

import vit_jax
from vit_jax.errors import UserError, one_line
from vit_jax.interop import files

pytestmark = [pytest.mark.fault(56), pytest.mark.usefixtures('one_device')]

SECONDS, MIB = 10, 400
TIMES = int(os.environ.get('FUZZ', '1'))  # as many files; `make faults` takes more


@pytest.fixture(autouse=True)
def bounded():
    """The files of a test fill no memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MIB * 1024


def message(path: pathlib.Path) -> str:
    """The error of a file that is refused, one line that a terminal can show; empty if it loads."""
    start, found = time.monotonic(), ''
    try:
        vit_jax.load(path)
    except UserError as error:
        found = str(error)
    assert found == one_line(found)
    assert time.monotonic() - start < SECONDS
    return found


def changed(path: pathlib.Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    'form',
    [  # a model of masks holds a detector
        pytest.param(form, marks=[pytest.mark.long] * form.startswith('detr '))
        for form in released.FORMS
    ],
)
def test_mutants(form, tmp_path):
    place = released.write(form, tmp_path / 'made')
    weights = place if place.is_file() else place / 'model.safetensors'
    (flat, _), content, refusals = files.read_arrays(weights), weights.read_bytes(), 0
    write: Callable[..., None] = files.write_npz if place.is_file() else files.write_safetensors
    configs = {} if place.is_file() else {f: f.read_text() for f in place.glob('*.json')}
    for seed in range(2 * TIMES):
        for kind in ('bytes', 'arrays', *configs):
            if kind == 'bytes':
                weights.write_bytes(mutations.mutate_bytes(content, seed))
            elif kind == 'arrays':
                write(weights, mutations.mutate_arrays(flat, seed))
            else:
                odd = mutations.SIZES, mutations.NUMBERS
                kind.write_text(mutations.mutate_json(configs[kind], seed, *odd))
            refusals += bool(message(place))
            weights.write_bytes(content)
            for file, text in configs.items():
                file.write_text(text)
    assert refusals


def archive(path: pathlib.Path, header: bytes = b'', **member: Any) -> pathlib.Path:
    """An .npz whose array has this header; `member` are fields of its entry in the archive."""
    words = header or b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}"
    info = zipfile.ZipInfo('x.npy')
    with zipfile.ZipFile(path, 'w') as made:
        made.writestr(
            info, b'\x93NUMPY\x01\0' + len(words).to_bytes(2, 'little') + words + b'\0' * 4
        )
        for key, value in member.items():
            setattr(made.getinfo('x.npy'), key, value)
    return path


@pytest.mark.parametrize(
    ('header', 'member'),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,", {}),  # TokenError
        (b'(' * 9000, {}),  # RecursionError or MemoryError
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", {}),
        (b"{'descr': [], 'fortran_order': False, 'shape': (2**70,)}", {}),
        (b'\xff\xfe', {}),
        (b'', {'compress_type': 97}),  # NotImplementedError
        (b'', {'flag_bits': 1}),  # encrypted: RuntimeError
    ],
)
def test_archives(tmp_path, header, member):
    assert 'cannot be read' in message(archive(tmp_path / 'a.npz', header, **member))


def test_members_that_are_no_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / 'a.npz', 'w') as made:
        made.writestr('x.npy', 'words')  # NumPy returns its bytes
    assert mentions(message(tmp_path / 'a.npz'), 'x', 'array')


def test_archives_that_unpack_to_far_more(tmp_path):
    zeros = io.BytesIO()
    np.lib.format.write_array(zeros, np.zeros(2**27, bool))
    with zipfile.ZipFile(tmp_path / 'a.npz', 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        made.writestr('x.npy', zeros.getvalue())
    del zeros
    assert 'unpacks to' in message(tmp_path / 'a.npz')


@pytest.mark.parametrize('name', ['config.json', 'preprocessor_config.json'])
@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('[' * 100_000, 'nested too deeply'),
        ('{"a": ' * 100_000, 'nested too deeply'),
        ('\x1b[2J', 'not valid JSON'),
        ('{"a": ' + '9' * 5000 + '}', 'not valid JSON'),
        (' ' * (2**24 + 1), 'more than 16 MiB'),
    ],
)
def test_json(tmp_path, name, text, words):
    place = released.write('vit transformers', tmp_path / 'made')
    (place / name).write_text(text)
    assert words in message(place)


@pytest.mark.parametrize(
    ('form', 'fields', 'words'),
    [
        ('vit', {'image_size': -16}, 'cannot have -16 x -16 pixels'),
        ('swin', {'image_size': -16}, 'cannot have -16 x -16 pixels'),
        ('swin', {'image_size': 10**6}, 'cannot have 1000000 x 1000000 pixels'),
        ('vit', {'layer_norm_eps': float('nan')}, ('layer', 'norms')),
        ('vit', {'layer_norm_eps': -1}, 'layer norms add -1'),
        ('vit', {'id2label': {'50000000': 'a'}}, 'names class 50000000'),
        ('swin', {'id2label': {'1000000000000': 'a'}}, 'names class 1000000000000'),
        ('detr', {'id2label': {'-1': 'a'}}, 'names class -1'),
        ('vit', {'hidden_act': 'a\x1b[2J\n'}, 'hidden_act'),
        ('vit', {'model_type': 'a\x1b[2J\n'}, 'config.json'),
    ],
)
def test_configs(tmp_path, form, fields, words):
    place = released.write(f'{form} transformers', tmp_path / 'made')
    changed(place / 'config.json', **fields)
    assert mentions(message(place), words)


def test_millions_of_scanned_blocks(tmp_path):
    place = released.write('big_vision', tmp_path / 'made')
    flat, _ = files.read_arrays(place)
    norm = 'Transformer/encoderblock/LayerNorm_0/scale'
    files.write_npz(place, flat | {norm: np.zeros((10**6, 1), np.float32)})
    assert 'more than 1000 blocks' in message(place)


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('model.encoder.layers.1000000000.fc1.bias', ('block', '1000000000')),
        ('backbone.0.body.layer99999999.0.conv1.weight', ('block', '99999998')),
        ('x\x1b[2J\ny', ('called', 'x\\u001b[2J\\ny')),
    ],
)
def test_names_of_arrays(tmp_path, name, words):
    place = released.write('detr transformers', tmp_path / 'made')
    flat, config = files.read_arrays(place)
    files.write_safetensors(place, flat | {name: np.zeros((1, 1, 1, 1), np.float32)}, config)
    assert mentions(message(place), words)
