"""What is beyond the limits of Python, of numbers or of the machine: one line, no traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import released

import vit_jax
from vit_jax.__main__ import limit_error, main
from vit_jax.data import vocabulary
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.storage import paths

pytestmark = [pytest.mark.fault(128), pytest.mark.usefixtures('one_device')]

DEEP, LONG = '[' * 200_000 + ']' * 200_000, '9' * 400
ODD = ('[' * 100 + ']' * 100, DEEP, DEEP[:200_000], LONG, '-' + LONG, '1e999', 'Infinity', '-1e400')


@pytest.mark.parametrize('text', ODD[:5])
def test_json(text):
    with pytest.raises(ValueError, match=r'nested too deeply|integer of 40|Expecting'):
        paths.parse_json(text)
    with pytest.raises(ValueError, match=r'nested too deeply|integer of 40|Expecting'):
        paths.parse_json(f'{{"a": {text}}}'.encode())
    assert paths.parse_json('[' * 50 + ']' * 50) and paths.parse_json('12345678901234567890')


@pytest.mark.slow
@pytest.mark.parametrize(
    'text', [*ODD[:4], *(pytest.param(text, marks=pytest.mark.long) for text in ODD[4:])]
)
def test_small_files_of_a_run(smoke_run, tmp_path, capsys, text):
    """Each is one line, or is left out with a warning."""
    run = shutil.copytree(smoke_run, tmp_path / 'run')
    for name, content, *commands in (
        ('config.json', f'{{"model": {text}}}', ['inspect', '--workdir']),
        ('metrics.jsonl', f'{{"step": {text}, "a": {text}}}\n', ['scaling', 'collect'], ['report']),
        ('metrics.jsonl', f'{{"step": 1, "a": {text}}}\n', ['scaling', 'collect'], ['report']),
        ('times.jsonl', f'{{"start": {text}, "step": 0}}\n', ['goodput']),
        ('result.json', f'{{"test/loss": {text}}}', ['scaling', 'collect'], ['report']),
    ):
        before = (run / name).read_bytes()
        (run / name).write_text(content)
        for command in commands:
            flags = ['--out', str(tmp_path / 'a.html')] if command == ['report'] else []
            assert main([*command, str(run), *flags]) in (0, 2), (name, command)
            errors = capsys.readouterr().err
            assert errors.count('error: ') <= 1 and 'Traceback' not in errors
        (run / name).write_bytes(before)
    manifest = run / 'checkpoints' / '20' / 'manifest.json'
    manifest.write_text(f'{{"step": {text}, "files": {text}}}')
    assert main(['inspect', '--verify', str(run)]) == 1


@pytest.mark.parametrize('text', ODD)
@pytest.mark.parametrize('place', ['bbox', 'id', 'width', 'category_id', 'area', 'iscrowd'])
def test_coco(tmp_path, text, place):
    box = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [0, 0, 4, 4], 'area': 4}
    about = {
        'images': [{'id': 1, 'width': 8, 'height': 8, 'file_name': '1.png'}],
        'categories': [{'id': 1, 'name': 'a'}],
        'annotations': [box],
    }
    (tmp_path / 'train').mkdir()
    (tmp_path / 'train' / '1.png').write_bytes(b'')
    one = about['images'][0] if place == 'width' else box
    one[place] = ['X'] * 4 if place == 'bbox' else 'X'
    content = json.dumps(about).replace('"X"', text)
    (tmp_path / 'instances_train.json').write_text(content)
    with contextlib.suppress(UserError):  # and nothing else
        assert len(open_source(f'coco:{tmp_path}', 'train')) == 1


@pytest.mark.parametrize('text', ODD)
@pytest.mark.parametrize('key', ['image_size', 'num_hidden_layers', 'id2label'])
def test_configs_of_checkpoints(tmp_path, text, key):
    place = released.write('vit transformers', tmp_path / 'made')
    config = json.loads((place / 'config.json').read_text()) | {key: 'X'}
    (place / 'config.json').write_text(json.dumps(config).replace('"X"', text))
    with pytest.raises(UserError):
        vit_jax.load(place)


def test_a_pattern_that_never_ends(tmp_path):
    tokenizers = pytest.importorskip('tokenizers')
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({'<unk>': 0, '</s>': 1}, '<unk>'))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single='$A </s>', special_tokens=[('</s>', 1)]
    )
    pattern = tokenizers.Regex('(?:a|a|aa)*$')
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, 'isolated')
    made.save(str(tmp_path / 'tokenizer.json'))
    vocab = vocabulary.load(tmp_path / 'tokenizer.json')
    with pytest.raises(UserError, match=r'by its tokenizer\.json: cannot be read'):
        vocab.encode('a' * 60 + 'b')


@pytest.mark.process
@pytest.mark.parametrize('mib', [900, pytest.param(1200, marks=pytest.mark.long)])
def test_too_little_memory_is_one_line(tmp_path, repo, mib):
    """Whatever asks for it: a thread, an array or a library."""
    np.savez(tmp_path / 'a.npz', a=np.zeros(2**28, np.float32))
    command = f'{sys.executable} -m vit_jax inspect --checkpoint {tmp_path}/a.npz'
    done = subprocess.run(
        ['bash', '-c', f'ulimit -v {mib * 1024}; exec {command}'],
        cwd=repo,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (1, 2), done.stderr
    assert 'Traceback' not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith('error: ')], done.stderr


@pytest.mark.parametrize(
    ('error', 'words'),
    [
        (MemoryError(), 'memory is exhausted (MemoryError)'),
        (RuntimeError("can't start new thread"), 'memory is exhausted'),
        (OSError(12, 'Cannot allocate memory'), 'memory is exhausted'),
        (RuntimeError('RESOURCE_EXHAUSTED: 9 GiB'), 'memory is exhausted'),
        (OverflowError('int too large'), 'OverflowError: int too large (test_limits.py:'),
        (RecursionError('depth'), 'RecursionError: depth (test_limits.py:'),
        (ValueError('of our own'), ''),
    ],
)
def test_the_last_handler(error, words):
    with pytest.raises(type(error)) as raised:
        raise error
    line = limit_error(raised.value)
    assert line.startswith(words)
    assert bool(line) == bool(words)
