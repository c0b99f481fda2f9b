"""Arrays of a checkpoint that are not what their shapes say: refused before memory is asked for."""

import json
import os
import pathlib
import re
import shutil

import pytest
import tensorstore

from vit_jax.__main__ import main
from vit_jax.checkpoints import manifest

pytestmark = [pytest.mark.usefixtures('one_device'), pytest.mark.fault(64)]

STEP = 20


@pytest.fixture
def reshaped(smoke_run, tmp_path):
    """`reshaped(SHAPE)`: a copy of a run whose head declares another shape."""

    def make(shape: list[int]) -> pathlib.Path:
        folder = shutil.copytree(smoke_run, tmp_path / 'run')
        step = folder / 'checkpoints' / str(STEP)
        base = {'driver': 'file', 'path': f'{step}/variables/'}
        store = tensorstore.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
        for key in (b'params.head.kernel/.zarray', b'ema.head.kernel/.zarray'):
            zarray = json.loads(store.read(key).result().value)
            zarray |= {'shape': shape, 'chunks': [min(size, 64) for size in shape]}
            store.write(key, json.dumps(zarray).encode()).result()
        os.remove(step / 'manifest.json')
        manifest.write(step.parent, STEP)
        return folder

    return make


@pytest.mark.parametrize(
    ('shape', 'words'),
    [
        ([200000, 200000, 200000], ' 29,802,322 GiB'),
        # Of a chunk that is missing and one that is short, either may be met first.
        ([256, 256], r'cannot be read: (NOT_FOUND|FAILED_PRECONDITION): .*head\.kernel'),
    ],
)
def test_arrays_of_other_shapes_are_one_line(reshaped, capsys, shape, words):
    assert main(['evaluate', '--workdir', str(reshaped(shape))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(words, line)
    assert len(line) < 500


def test_a_run_does_not_resume_from_them(repo, reshaped, capsys):
    folder = reshaped([200000, 200000, 200000])
    (folder / 'result.json').unlink()
    config = f'{repo}/experiments/vit/digits.py:smoke'
    assert main(['train', '--config', config, '--workdir', str(folder)]) == 2
    assert 'params/head/kernel has shape (200000, 200000, 200000)' in capsys.readouterr().err
