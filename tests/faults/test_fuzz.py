"""Whatever a file holds, a command ends soon, with success or one line: mutated real files."""

from __future__ import annotations

import io
import json
import os
import pathlib
import resource
import shutil
import time
import traceback

import jax
import numpy as np
import pytest
from helpers.mutations import mutate_bytes, mutate_json
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.data import images
from vit_jax.data.records import BrokenRecord
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import vision_transformer
from vit_jax.models import vit

pytestmark = [pytest.mark.fault(56), pytest.mark.usefixtures('one_device')]

DIGITS = 'experiments/vit/digits.py:smoke'
SECONDS, MIB = 10, 400  # that a file of some kilobytes may take
TIMES = int(os.environ.get('FUZZ', '1'))  # as many files; `make faults` takes more


@pytest.fixture(autouse=True)
def bounded(repo, monkeypatch):
    """At the root of the repository; the memory of all cases of a test is bounded."""
    monkeypatch.chdir(repo)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MIB * 1024


class Cases:
    """Runs commands and gathers those that end otherwise than documented."""

    def __init__(self, capsys):
        self.capsys, self.faults, self.refused, self.count = capsys, [], 0, 0

    def command(self, seed: int, *words: object, codes: tuple[int, ...] = (0, 2)) -> None:
        start = time.monotonic()
        try:
            code = main([str(word) for word in words])
            lines = self.capsys.readouterr().err.splitlines()
            errors = [line for line in lines if line.startswith('error: ')]
            if code not in codes or len(errors) != (code == 2):
                self.faults.append((seed, words, code, lines))
            self.refused += code == 2
        except BaseException:
            self.faults.append((seed, words, traceback.format_exc(limit=-4)))
        self.count += 1
        if time.monotonic() - start > SECONDS:
            self.faults.append((seed, words, f'{time.monotonic() - start:.0f} s'))

    def check(self) -> None:
        """Fails if there were faults, or if nothing was ever refused."""
        shown = '\n\n'.join('\n'.join(map(str, fault)) for fault in self.faults)
        assert not self.faults, f'{len(self.faults)} of {self.count}:\n{shown}'
        assert self.refused


@pytest.fixture
def cases(capsys):
    return Cases(capsys)


@pytest.fixture
def run(smoke_run, tmp_path) -> pathlib.Path:
    """A copy of a finished run."""
    return pathlib.Path(shutil.copytree(smoke_run, tmp_path / 'run'))


@pytest.mark.parametrize('kind', images.FORMATS)
def test_images(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), kind)
    broken = 0
    for seed in range(300 * TIMES):
        start = time.monotonic()
        try:
            found = images.decode_image(mutate_bytes(buffer.getvalue(), seed), name='x')
            assert found.dtype == np.uint8 and found.size <= 3 * images.MAX_PIXELS
        except BrokenRecord:
            broken += 1
        assert time.monotonic() - start < SECONDS
    assert broken > 30


@pytest.mark.slow
@pytest.mark.parametrize('mutate', ['json', 'bytes'])
def test_the_config_of_a_run(run, cases, mutate):
    file = run / 'config.json'
    content = file.read_bytes()
    for seed in range(8 * TIMES):
        if mutate == 'json':
            file.write_text(mutate_json(content.decode(), seed))
        else:
            file.write_bytes(mutate_bytes(content, seed))
        command = ('inspect', 'train')[seed % 2]
        words = ['--config', DIGITS] if command == 'train' else []
        cases.command(seed, command, *words, '--workdir', run)
    cases.command(-1, 'inspect', '--workdir', run / 'absent')  # which is refused
    cases.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'command'),
    [
        ('metrics.jsonl', ['scaling', 'collect']),
        ('result.json', ['scaling', 'collect']),
        ('times.jsonl', ['goodput']),
    ],
)
def test_the_log_of_a_run(run, cases, name, command):
    file = run / name
    content = file.read_bytes()
    for seed in range(8 * TIMES):
        damaged = mutate_bytes(content, seed)
        if seed % 2:
            lines = [mutate_json(line, seed) for line in content.decode().splitlines()]
            damaged = '\n'.join(lines).encode()
        file.write_bytes(damaged)
        cases.command(seed, *command, run)
    file.unlink()
    cases.command(-1, *command, run / 'absent')
    cases.check()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['manifest.json', 'meta/metadata'])
def test_small_files_of_a_checkpoint(run, cases, name):
    file = run / 'checkpoints' / '20' / name
    content = file.read_text()
    for seed in range(6 * TIMES):
        file.write_text(mutate_json(content, seed))
        cases.command(seed, 'inspect', '--verify', run, codes=(0, 1))
        if name == 'meta/metadata':
            (run / 'config.json').unlink(missing_ok=True)  # which that of the checkpoint replaces
            cases.command(seed, 'inspect', '--workdir', run)
    cases.command(-1, 'inspect', '--verify', run / 'absent')
    cases.check()


@pytest.fixture
def foreign(tmp_path) -> str:
    """A small ViT as vision_transformer writes it."""
    model = {'num_classes': 5, 'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 24}
    model['num_heads'] = 2
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    shapes = jax.eval_shape(vit.Model(**model).init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    flat = vision_transformer.write(params, {'name': 'vit', **model})
    files.write_npz(tmp_path / 'foreign.npz', flat)
    return str(tmp_path / 'foreign.npz')


@pytest.mark.slow
@pytest.mark.parametrize('suffix', ['.npz', '.safetensors'])
def test_checkpoints_of_others(foreign, tmp_path, cases, suffix):
    assert main(['convert', foreign, str(tmp_path / f'whole{suffix}')]) == 0
    content = (tmp_path / f'whole{suffix}').read_bytes()
    head = 400 if suffix == '.safetensors' else len(content)  # where names and shapes are
    for seed in range(12 * TIMES):
        damaged = tmp_path / f'damaged{suffix}'
        where = head if seed % 2 else len(content)
        damaged.write_bytes(mutate_bytes(content[:where], seed) + content[where:])
        cases.command(seed, 'inspect', '--checkpoint', damaged)
    cases.check()


@pytest.mark.slow
def test_configs_beside_checkpoints_of_others(foreign, tmp_path, cases):
    folder = tmp_path / 'foreign'
    assert main(['convert', foreign, str(folder)]) == 0
    for file in sorted(folder.glob('*.json')):
        content = file.read_text()
        for seed in range(4 * TIMES):
            file.write_text(mutate_json(content, seed))
            cases.command(seed, 'inspect', '--checkpoint', folder)
        file.write_text(content)
    cases.check()


def test_text(tmp_path):
    pairs = [f'Ein Satz mit {i} Wörtern.\tA sentence of {i} words.' for i in range(30)]
    content, file, refused = '\n'.join(pairs).encode(), tmp_path / 'pairs.tsv', []
    for seed in range(200 * TIMES):
        file.write_bytes(mutate_bytes(content, seed))
        try:
            source = open_source(f'text:{file}', 'train')
            records = [source[i] for i in range(len(source))]
            assert all(record['source'] and record['target'] for record in records)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert not any('\n' in line or str(file) not in line for line in refused)


@pytest.mark.slow
@pytest.mark.parametrize(('storage', 'name'), [('journal', 'journal.log'), ('sqlite', 'sweep.db')])
def test_storages_of_sweeps(tmp_path, cases, storage, name):
    pytest.importorskip('optuna')
    from helpers.studies import make

    make(tmp_path, points=[{'seed': 0}, {'seed': 1}], storage=storage)
    file = tmp_path / name
    content = file.read_bytes()
    flags = ['--storage', f'sqlite:///{file}'] if storage == 'sqlite' else []
    for seed in range(8 * TIMES):
        file.write_bytes(mutate_bytes(content, seed))
        cases.command(seed, 'sweep', 'status', 'name', '--workdir', tmp_path, *flags)
    cases.check()


@pytest.mark.slow
def test_definitions_that_are_no_longer_python(tmp_path, cases):
    """What still compiles is another program, and not run."""
    content = pathlib.Path('experiments/sweeps/digits.py').read_bytes()
    for seed in range(40 * TIMES):
        file = tmp_path / f'sweep_{seed}.py'
        file.write_bytes(mutate_bytes(content, seed))
        try:
            compile(file.read_bytes(), file, 'exec')
        except (SyntaxError, ValueError):
            words = ['create', file, '--study', 'a', '--workdir', tmp_path / 'study']
            cases.command(seed, 'sweep', *words, codes=(2,))
    assert cases.count > 12
    cases.check()


def test_mutations_are_of_the_seed():
    content = json.dumps({'a': [1, {'b': 2}], 'c': 'd'})
    assert mutate_json(content, 3) == mutate_json(content, 3)
    assert len({mutate_bytes(content.encode(), seed) for seed in range(50)}) > 30
