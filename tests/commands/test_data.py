"""`data`: what is in the data, how fast it is read, and what a batch looks like."""

import itertools
import json
import re
import time

import numpy as np
import pytest
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.data import native, sources
from vit_jax.data.read_ahead import Loading
from vit_jax.profiling import pipeline
from vit_jax.runtime import environment


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(pipeline, 'SECONDS', 0.05)


def run(capsys, *argv):
    assert cli.main(['data', *map(str, argv)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    """Two classes of images, one of which is broken."""
    for name, count in (('cat', 9), ('dog', 21)):
        (tmp_path / 'train' / name).mkdir(parents=True)
        for i in range(count):
            image = np.full((8, 8, 3), 10 * i, np.uint8)
            Image.fromarray(image).save(tmp_path / 'train' / name / f'{i}.png')
    (tmp_path / 'train' / 'dog' / '7.png').write_bytes(b'no picture')
    return tmp_path


@pytest.mark.slow
def test_counts_and_rates_of_images(repo, capsys, tmp_path):
    config = f'{repo}/experiments/vit/digits.py:smoke'
    out = tmp_path / 'batch.png'
    argv = ['--config', config, '--config.batch_size=16', '--batches', 2, '--out', out]
    record = json.loads(run(capsys, *argv, '--json'))
    labels = sources.open_source('digits', 'train').labels()
    assert list(record['classes'].values()) == np.bincount(labels).tolist()
    assert record['images_per_sec'] > 0 and record['broken'] == []
    assert record['timed_sec'] >= 0.05
    assert record['slowest'] <= 1 <= record['fastest']
    width, height = Image.open(out).size
    assert width > height  # 16 examples in rows of eight


class Bursts:
    """Data whose two threads each make a batch in `STEP` seconds, with some ready beforehand."""

    STEP, ROWS = 0.02, 8

    def reading(self):
        return Loading(0, 2)

    def train_batches(self):
        time.sleep(0.1)  # the time in which the first `held` batches become ready
        for number in itertools.count():
            if number >= self.reading().held and number % 2 == 0:
                time.sleep(self.STEP)
            yield {'mask': np.ones(self.ROWS)}

    def count(self, batch):
        return {'images': len(batch['mask'])}


def test_batches_ready_beforehand_do_not_count():
    most = 2 * Bursts.ROWS / Bursts.STEP
    for batches in (2, 5, 60):
        throughput = pipeline.measure_throughput(Bursts(), batches)
        assert throughput.seconds >= 0.05
        assert 0.2 * most < throughput.per_sec['images'] <= most
        assert 0 < throughput.slowest <= 1 <= throughput.fastest
    cores = min(2, environment.available_cores())
    assert 0.2 * most < pipeline.per_core(Bursts()) * cores <= most
    assert pipeline.measure_throughput(Bursts(), 1).per_sec == {}


def test_broken_files_are_named(repo, folder, capsys):
    argv = ['--config', f'{repo}/experiments/vit/digits.py:smoke', '--batches', 1, '--read-all']
    argv += [f'--config.data.source=folder:{folder}', '--config.batch_size=4']
    out = run(capsys, *argv, '--config.data.transforms=resize(8)')
    assert '1 broken:' in out and 'dog/7.png' in out
    assert 'cat   9' in out and 'dog  21' in out


@pytest.mark.slow
def test_objects_are_drawn_and_counted_if_they_are_read(repo, capsys, tmp_path):
    argv = ['--config', f'{repo}/experiments/detr/scenes.py:smoke', '--batches', 1, '--json']
    argv += ['--config.data.split=train[:40]', '--out', tmp_path / 'scenes.png']
    assert json.loads(run(capsys, *argv))['classes'] == {}
    record = json.loads(run(capsys, *argv, '--read-all'))
    assert sum(record['classes'].values()) > 40
    assert (tmp_path / 'scenes.png').stat().st_size > 0


def test_sentences_are_shown_as_text(repo, capsys, tmp_path):
    config = f'{repo}/experiments/translate/synthetic.py:smoke'
    out = tmp_path / 'text.svg'
    assert 'tokens/s' in run(capsys, '--config', config, '--batches', 2, '--out', out)
    assert out.stat().st_size > 0


def test_mistakes_are_one_line(repo, capsys):
    config = f'{repo}/experiments/vit/digits.py:smoke'
    for argv in ([], ['--config', config, '--batches', '0'], ['--config', config, '--out', 'a.x']):
        assert cli.main(['data', *argv]) == 2
    assert capsys.readouterr().err.count('error: ') == 3


@pytest.mark.slow
def test_stages_of_an_example_are_timed(repo, folder, tmp_path, capsys, monkeypatch):
    config = [
        f'--config={repo}/experiments/vit/digits.py',
        f'--config.data.source=folder:{folder}',
        '--config.data.split=train',
        '--config.data.transforms=inception_crop(8)|flip',
        '--config.batch_size=8',
    ]
    picture = tmp_path / 'stages.png'
    lines = run(capsys, *config, '--bench', '--out', picture).splitlines()
    stages = ['stage', 'read', 'decode', 'inception_crop(8)', 'flip', 'batch', 'copy']
    assert [line.split('  ')[0] for line in lines[:7]] == stages
    assert re.fullmatch(r'[\d,]+ examples/s .*\d+', lines[7])
    assert picture.stat().st_size > 5000
    for compiled in (True, False):
        monkeypatch.setattr(native, 'has_windows', lambda has=compiled: has)
        notes = run(capsys, *config, '--bench').splitlines()[8:]
        assert [line.split()[0] for line in notes] == ['JPEG'][compiled:]
    record = json.loads(run(capsys, *config, '--bench', '--json'))
    assert list(record['stages_sec']) == stages[1:]
    assert record['per_core_per_sec'] == pytest.approx(1 / sum(record['stages_sec'].values()))
