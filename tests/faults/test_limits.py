"""What is beyond the limits of Python, of numbers or of the machine: one line, no traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import released

import vit_jax
from vit_jax.__main__ import limit_error, main
from vit_jax.data import vocabulary
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.runtime import memory, sharding
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
    'text', [ODD[0], *(pytest.param(text, marks=pytest.mark.long) for text in ODD[1:])]
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
    vocab = vocabulary.load_vocabulary(tmp_path / 'tokenizer.json')
    with pytest.raises(UserError, match=r'tokenizer\.json'):
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


# Messages of XLA on CPUs, on GPUs (two allocators) and on TPUs (compiling, running), and of NumPy.
ON_TPU = (
    'RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. '
    'Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.\n\nTotal hbm usage >= 22.47G:\n'
)
MESSAGES = (
    (
        'INTERNAL: Error dispatching computation: Out of memory allocating 1048576 bytes.',
        ['0.00098'],
    ),
    ('RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes.', ['16,384.0 GiB']),
    ('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.', ['64.0 GiB']),
    ('RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on', ['2.0 GiB']),
    (ON_TPU, ['21.9 GiB', '15.5 GiB']),
    (
        'RESOURCE_EXHAUSTED: Attempting to reserve 6.48G at the bottom of memory. That was not '
        'possible. There are 6.78G free, 0B reserved, and 3.33G reservable.',
        ['6.5 GiB', '6.8 GiB'],
    ),
    (
        'Unable to allocate 4.00 PiB for an array with shape (1125899906842624,)',
        ['4,194,304.0 GiB'],
    ),
)


@pytest.mark.fault(144)
@pytest.mark.parametrize(('text', 'amounts'), MESSAGES)
def test_the_memory_that_a_message_names(text, amounts):
    assert memory.is_exhausted((MemoryError if 'array' in text else RuntimeError)(text))
    assert [part for part in amounts if part not in memory.sizes(text)] == []
    assert memory.sizes(text).count('GiB') == len(amounts)


@pytest.mark.parametrize(
    'text',
    [
        "RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded",
        'RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M vmem.',
    ],
)
def test_what_a_smaller_batch_does_not_mend(text):
    assert not memory.is_exhausted(RuntimeError(text))


@pytest.mark.slow
@pytest.mark.fault(144)
def test_a_run_that_does_not_fit_is_refused(repo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(repo)
    words = ['train', 'vit/digits:smoke', '--config.model.mlp_dim=10000000000000']
    assert main([*words, '--workdir', str(tmp_path / 'run')]) == 2
    (line,) = (text for text in capsys.readouterr().err.splitlines() if text.startswith('error: '))
    assert 'GiB' in line and 'config.batch_size' in line and 'preflight' in line
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
@pytest.mark.fault(144)
@pytest.mark.parametrize(('call', 'code'), [(1, 2), (9, 1)])
def test_memory_that_is_exhausted_in_a_run(repo, tmp_path, monkeypatch, capsys, call, code):
    """Launchers start it again only if it has trained; the run resumes."""
    monkeypatch.chdir(repo)
    calls, feed = [], sharding.Jit.feed

    def put(self, batch):
        calls.append(None)
        if len(calls) == call:
            raise jax.errors.JaxRuntimeError(ON_TPU)
        return feed(self, batch)

    monkeypatch.setattr(sharding.Jit, 'feed', put)
    words = ['train', 'tests/helpers/linear.py', '--config.every.eval=20 steps']
    words += ['--config.every.checkpoint=5 steps', '--workdir', str(tmp_path / 'run')]
    assert main(words) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert '21.9 GiB' in line and '15.5 GiB' in line and 'config.step.accum_steps' in line
    assert (tmp_path / 'run').exists() == (code == 1)
    assert main(words) == 0
