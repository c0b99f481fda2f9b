"""Data that are damaged, malicious, wrong, or that never come."""

import io
import os
import pathlib
import re
import resource
import shutil
import struct
import subprocess
import time
import zlib

import numpy as np
import pytest
from helpers import forked
from helpers.messages import mentions, says
from helpers.runs import undrawn  # noqa: F401
from helpers.xla import xla_flags
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.data import images
from vit_jax.storage import run_folder

CONFIG = 'tests/helpers/linear.py'
# Digits, some of which are as the path of the source says.
ODD = """
import threading
from vit_jax.data.sources import digits

class Source(digits.Source):
    def __init__(self, path, split):
        super().__init__('', split)
        self._label = path

    def __getitem__(self, index):
        record = super().__getitem__(index)
        if index % 20 == 7:
            record['label'] = int(self._label) if self._label else threading.Event().wait()
        return record
"""


@pytest.fixture
def lab(tmp_path, repo, monkeypatch) -> pathlib.Path:
    """A folder on the path with a source of one's own; the work is done at the root."""
    (tmp_path / 'lab' / 'odd_lab').mkdir(parents=True)
    (tmp_path / 'lab' / 'odd_lab' / 'digits.py').write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path / 'lab')
    monkeypatch.chdir(repo)
    return tmp_path / 'lab'


@pytest.fixture
def photos(tmp_path, repo, monkeypatch) -> pathlib.Path:
    """Two classes with twenty JPEGs each; the work is done at the root."""
    rng = np.random.default_rng(0)
    for name in ('cat', 'dog'):
        (tmp_path / 'photos' / name).mkdir(parents=True)
        for i in range(20):
            image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
            image.save(tmp_path / 'photos' / name / f'{i:02}.jpg')
    monkeypatch.chdir(repo)
    return tmp_path / 'photos'


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def train_words(folder: pathlib.Path, source: str, **others: object) -> list[str]:
    values = {'data.source': source, 'data.transforms': '', 'data.cache': False, **others}
    flags = [f'--config.{key}={value}' for key, value in values.items()]
    return ['train', '--config', CONFIG, *flags, '--workdir', str(folder)]


def on_photos(folder: pathlib.Path, photos: pathlib.Path) -> list[str]:
    source = f'folder:{photos}'
    evaluation = {'evals.test.source': source, 'evals.test.split': 'train', 'every.eval': '5'}
    few = {'total': '5 steps', 'batch_size': 16}
    return train_words(folder, source, **evaluation, **few)


@pytest.mark.fault(28)
@pytest.mark.parametrize('label', [10, -1])
def test_a_label_that_is_no_class_is_named_with_its_record(lab, tmp_path, capsys, label):
    assert main(train_words(tmp_path / 'run', f'odd_lab.digits:{label}')) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'label {label} is outside of 0..9' in line
    assert not (tmp_path / 'run').exists()


@pytest.mark.fault(135)
@pytest.mark.parametrize('kind', ['folder', 'flat', 'selected', 'by a slice'])
def test_a_classifier_of_one_class_is_refused(photos, tmp_path, capsys, kind):
    (photos / 'dog').rename(tmp_path / 'dog')
    source, others = f'folder:{photos}', {}
    if kind == 'flat':
        source += '/cat'
    elif kind == 'selected':
        source, others = 'digits', {'data.classes': '(3,)'}
    elif kind == 'by a slice':
        others = {'data.split': 'train[:1 per class]'}
    assert main(train_words(tmp_path / 'run', source, **others)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ('photos/cat' if kind == 'flat' else 'examples are of class') in line
    assert ('photos/cat/all' if kind == 'flat' else 'one folder per class') in line
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
@pytest.mark.fault(136)
@pytest.mark.usefixtures('one_device')
def test_folders_without_images_are_no_classes_and_lacking_examples_are_said(
    photos, tmp_path, capsys, caplog
):
    for split in ('train', 'val'):
        shutil.copytree(photos, tmp_path / 'split' / split)
    (tmp_path / 'split' / 'train' / 'dog').rename(tmp_path / 'split' / 'val' / 'emu')
    (tmp_path / 'split' / 'train' / 'fox').symlink_to(photos / 'dog')
    (tmp_path / 'split' / 'train' / 'stray.txt').touch()
    for name in ('.git', 'empty', 'empty/inside', '__MACOSX'):
        (tmp_path / 'split' / 'train' / name).mkdir()
    (tmp_path / 'split' / '__MACOSX').mkdir()
    for place in ('train/__MACOSX', '__MACOSX'):
        (tmp_path / 'split' / place / '._00.jpg').write_bytes(b'no picture')
    words = on_photos(tmp_path / 'run', tmp_path / 'split')
    assert main([*words, '--config.evals.test.split=val']) == 0
    first, second = re.findall(r'^\d classes.*', capsys.readouterr().out, re.M)
    assert says(first, '4 classes', 'cat 20, dog 0, emu 0, fox 20')
    assert says(second, '2 classes', 'no example', 'dog, emu')
    meta = run_folder.read_meta(tmp_path / 'run' / 'checkpoints' / '5')
    assert meta['class_names'] == ['cat', 'dog', 'emu', 'fox']
    assert any(': .git, __MACOSX, empty' in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.fault(33, 34)
@pytest.mark.usefixtures('one_device')
def test_few_broken_images_are_named_and_counted(photos, tmp_path, caplog):
    for name in ('cat/03', 'dog/07'):
        cut(photos / f'{name}.jpg')
    assert main(on_photos(tmp_path / 'run', photos)) == 0
    named = [line for line in caplog.messages if ' of 40 records broken: ' in line]
    for name in ('cat/03', 'dog/07'):
        assert any(f'{photos}/{name}.jpg: ' in line for line in named)
    assert any(': 2 of 40 records broken: ' in line for line in named)


@pytest.mark.slow
@pytest.mark.fault(33, 34)
@pytest.mark.usefixtures('one_device')
def test_many_broken_images_end_the_run(photos, tmp_path, capsys):
    for i in range(11):
        cut(photos / 'cat' / f'{i:02}.jpg')
    assert main(on_photos(tmp_path / 'run', photos)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, '11', '40 records', '10')
    assert f'{photos}/cat/00.jpg: ' in line
    assert not (tmp_path / 'run').exists()


def bomb(side: int) -> bytes:
    """A PNG of some kilobytes, true to its header: `side`^2 black pixels of one bit."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))
        )

    pixels, squeeze = io.BytesIO(), zlib.compressobj(9)
    for _ in range(side):
        pixels.write(squeeze.compress(bytes(1 + side // 8)))
    pixels.write(squeeze.flush())
    header = struct.pack('>IIBBBBB', side, side, 1, 0, 0, 0, 0)
    body = chunk(b'IHDR', header) + chunk(b'IDAT', pixels.getvalue()) + chunk(b'IEND', b'')
    return b'\x89PNG\r\n\x1a\n' + body


@pytest.mark.fault(35)
@pytest.mark.filterwarnings('ignore:Image size')
@pytest.mark.parametrize('side', [8200, 12_000, 20_000])
def test_a_bomb_is_refused_before_it_is_decoded(smoke_run, tmp_path, capsys, side):
    (tmp_path / 'bomb.png').write_bytes(bomb(side))
    assert (tmp_path / 'bomb.png').stat().st_size < 60_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(['predict', '--workdir', str(smoke_run), str(tmp_path / 'bomb.png')]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'pixels' in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def progressive(side: int, scans: int, metadata: bytes = b'') -> bytes:
    """A gray progressive JPEG with zero coefficients, and scans of a few bytes."""

    def segment(kind: int, body: bytes) -> bytes:
        return bytes([0xFF, kind]) + struct.pack('>H', 2 + len(body)) + body

    def scan(first: int, last: int, size: int) -> bytes:
        return segment(0xDA, bytes([1, 1, 0, first, last, 0])) + bytes(size)

    blocks = (side // 8) ** 2
    codes = [bytes([kind, 1, *[0] * 15, value]) for kind, value in ((0, 0), (0x10, 0xE0))]
    frame = struct.pack('>BHHBBBB', 8, side, side, 1, 1, 0x11, 0)
    head = segment(0xE2, metadata) + segment(0xDB, bytes([0, *[1] * 64])) + segment(0xC2, frame)
    head += b''.join(segment(0xC4, code) for code in codes)
    run = -(-blocks // 2**14) * 15 // 8 + 1
    body = b''.join(scan(1 + i % 63, 1 + i % 63, run) for i in range(scans - 1))
    return b'\xff\xd8' + head + scan(0, 0, -(-blocks // 8)) + body + b'\xff\xd9'


@pytest.mark.fault(35)
def test_a_jpeg_of_thousands_of_scans_is_refused(smoke_run, tmp_path, capsys):
    """Each scan takes time for all pixels: 20,000 of them on 8,192^2 pixels took minutes."""
    scans = b'\xff\xda' * images.MAX_SCANS  # in metadata, and behind the image, they are none
    good = progressive(64, images.MAX_SCANS, metadata=scans) + scans
    assert images.decode_image(good, name='good').shape == (64, 64, 3)
    (tmp_path / 'many.jpg').write_bytes(progressive(8192, 20_000))
    start = time.process_time()
    assert main(['predict', '--workdir', str(smoke_run), str(tmp_path / 'many.jpg')]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'many.jpg' in line and 'scans' in line
    assert time.process_time() - start < 60


# The folder of modules comes before the command.
WITH_LAB = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from vit_jax.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
@pytest.mark.fault(36)
def test_data_that_never_come_end_the_run_with_all_stacks(lab, tmp_path):
    words = train_words(tmp_path / 'run', 'odd_lab.digits:', **{'data.stall_seconds': 1})
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    env = {**os.environ, 'XLA_FLAGS': xla_flags(devices=1)}
    with forked.start([lab, *words], env, code=WITH_LAB, **pipes) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert mentions(errors, '1', 'thread')
    assert 'odd_lab/digits.py' in errors
