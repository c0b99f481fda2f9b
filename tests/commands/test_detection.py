"""A detector by the commands that show what it has learned."""

from __future__ import annotations

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.evaluators.coco_ap import METRICS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run that was stored."""
    stored = pathlib.Path(__file__).parents[1] / 'golden' / 'run_detr'
    return shutil.copytree(stored, tmp_path_factory.mktemp('detection') / 'run')


@pytest.fixture(scope='module')
def photo(tmp_path_factory):
    """A file of 24 x 36 pixels, which the model sees as 21 x 32 of 32 x 32."""
    path = tmp_path_factory.mktemp('photos') / 'photo.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 36, 3), np.uint8)).save(path)
    return str(path)


def test_predict(run, photo, tmp_path, capsys):
    argv = ['predict', '--workdir', str(run), '--threshold', '0', photo]
    assert cli.main([*argv, '--json', '--out', str(tmp_path / 'boxes.png')]) == 0
    out, err = capsys.readouterr()
    (image,) = json.loads(out.splitlines()[-1])['images']
    assert mentions(err.splitlines()[-1], 'category_id', '0')
    predictions = image['predictions']
    assert len(predictions) == 7
    assert [prediction['score'] for prediction in predictions] == sorted(
        (o['score'] for o in predictions), reverse=True
    )
    for prediction in predictions:
        x, y, width, height = prediction['bbox']
        assert min(x, y, width, height) >= 0
        assert x + width <= 36.01 and y + height <= 24.01
        assert prediction['class'] == str(prediction['category_id'])
    assert (tmp_path / 'boxes.png').read_bytes().startswith(b'\x89PNG')
    assert cli.main(argv) == 0
    assert 'bbox' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'says'),
    [
        ([], '1 layers x 2 heads, 8 x 8 patches'),
        (['--map', 'encoder', '--query', '2,3'], '1 layers x 2 heads, 8 x 8 patches'),
        pytest.param(['--query', '5', '--layer', '0'], '1 layers', marks=pytest.mark.long),
    ],
)
def test_attention(run, photo, tmp_path, capsys, flags, says):
    out = tmp_path / 'map.png'
    assert cli.main(['attention', '--workdir', str(run), photo, '--out', str(out), *flags]) == 0
    assert says in capsys.readouterr().out
    assert Image.open(out).size > (500, 300)


def test_a_report_has_the_average_precision_of_each_class(run, tmp_path, capsys):
    picture, table = tmp_path / 'classes.png', tmp_path / 'classes.csv'
    argv = ['evaluate', '--workdir', str(run), '--report', str(picture), '--threshold', '0.1']
    assert cli.main([*argv, '--json', '--table', str(table)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [row for row in record['classes']['rows'] if row['objects']]
    assert np.mean([row['AP'] for row in rows]) == pytest.approx(record['ap/AP'])
    assert np.mean([row['AP50'] for row in rows]) == pytest.approx(record['ap/AP50'])
    assert picture.stat().st_size > 0
    matrix = np.array(record['classes']['matrix'])
    assert matrix[:-1].sum() == sum(row['objects'] for row in rows)
    assert matrix[-1].any(), 'not a single prediction counts'
    written = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row['AP']) for row in written if row['AP']] == [row['AP'] for row in rows]
    assert written[0].keys() == {'class', 'objects', 'AP', 'AP50', 'precision', 'recall'}
    assert cli.main(argv) == 0
    table = capsys.readouterr().out
    assert 'AP50' in table and all(row['class'] in table for row in rows)


@pytest.mark.parametrize(
    ('flags', 'key'),
    [
        (['--threshold', '0.3'], '--report'),
        (['--table', 'a.csv', '--threshold', '2'], '--threshold'),
        (['--table', 'a.txt'], '.csv'),
    ],
)
def test_mistakes_of_reports_are_refused_before_the_work(run, tmp_path, capsys, flags, key):
    flags = [str(tmp_path / word) if '.csv' in word or '.txt' in word else word for word in flags]
    assert cli.main(['evaluate', '--workdir', str(run), *flags]) == 2
    assert key in capsys.readouterr().err


def test_evaluate_gives_all_that_can_be_measured(run, capsys):
    """Images of 32 x 32 pixels have small objects only."""
    assert cli.main(['evaluate', '--workdir', str(run), '--json']) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    stored = json.loads((run / 'result.json').read_text())
    expected = {k: value for k, value in stored.items() if value != -1}  # of sizes without objects
    assert {k: record[k] for k in expected} == pytest.approx(expected, rel=1e-4)
    names = {key.removeprefix('ap/') for key in expected if key.startswith('ap/')}
    assert set(METRICS) - names == {
        f'{x}_{size}' for x in ('AP', 'AR') for size in ('medium', 'large')
    }
    assert cli.main(['evaluate', '--workdir', str(run), '--image-size', '32']) == 2
    assert 'config.evals.ap.sizes' in capsys.readouterr().err
