"""Names of classes, files and runs that a terminal would obey, or matplotlib take for TeX."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from helpers.xla import use_one_device
from PIL import Image

from vit_jax import errors
from vit_jax.__main__ import main
from vit_jax.errors import UserError

NAMES = ('$x_{$', '\x1b[2Jcat\nforged 1', '[b]:dog:[red]', '\u202etib \x9b1m')
RUN = '_$x_{$ \x1b]0;run\x07'
CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]')

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> pathlib.Path:
    """Images of 8 x 8 pixels in folders of such names."""
    folder = tmp_path_factory.mktemp('images')
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    for split in ('train', 'test'):
        for name in NAMES:
            (folder / split / name).mkdir(parents=True)
            for i, image in enumerate(pixels):
                Image.fromarray(image).save(folder / split / name / f'$a_{{$\x1b[31m{i}.png')
    return folder


def flags(repo: pathlib.Path, images: pathlib.Path) -> list[str]:
    changes = {'data.transforms': '', 'batch_size': 8, 'total': '2 steps', 'every.eval': '1'}
    changes |= {f'{name}.source': f'folder:{images}' for name in ('data', 'evals.test')}
    config = f'{repo}/tests/helpers/linear.py'
    return ['--config', config, *(f'--config.{key}={value}' for key, value in changes.items())]


@pytest.fixture(scope='module')
def run(repo, images, tmp_path_factory) -> pathlib.Path:
    """A finished run of such a name on such data; do not write to it."""
    folder = tmp_path_factory.mktemp('runs') / RUN
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        assert main(['train', *flags(repo, images), '--workdir', str(folder)]) == 0
    return folder


def photo(images: pathlib.Path) -> str:
    return str(next((images / 'test' / NAMES[1]).iterdir()))


def shown(capsys, *words: str, code: int = 0) -> str:
    """What a command prints, or its error, in which nothing is left for a terminal to obey."""
    capsys.readouterr()
    assert main(list(words)) == code
    out, errors = capsys.readouterr()
    assert not CONTROL.search(out + errors), out + errors
    return errors if code else out


@pytest.mark.fault(68)
def test_terminals_get_nothing_to_obey(repo, images, run, capsys):
    allow = ['--allow', 'helpers']
    model = ['--workdir', str(run), *allow]
    collected = shown(capsys, 'scaling', 'collect', *allow, str(run.parent))
    assert '\\u001b]0;run\\u0007' in collected
    assert '_$x_{$ \\u001b]0;run' in shown(capsys, 'compare', str(run))
    lines = shown(capsys, 'data', *flags(repo, images), '--batches=1').splitlines()
    assert '\\u001b[2Jcat\\nforged 1  4' in lines
    lines = shown(capsys, 'predict', *model, photo(images)).splitlines()
    assert lines[0].partition('$a')[0].endswith('\\u001b[2Jcat\\nforged 1/')
    assert {line.partition('   ')[0] for line in lines[2:6]} == {
        '$x_{$',
        '\\u001b[2Jcat\\nforged 1',
        '[b]:dog:[red]',
        '\\u202etib \\u009b1m',
    }
    (line,) = shown(capsys, 'predict', *model, 'a\x1b[31m\nb.png', code=2).splitlines()[1:]
    assert line.startswith('error: ')


@pytest.mark.fault(68)
def test_json_stays_exact(images, run, capsys):
    words = ['predict', '--workdir', str(run), '--allow', 'helpers', '--json', photo(images)]
    (found,) = json.loads(shown(capsys, *words))['images']
    assert found['image'] == photo(images)
    assert {row['class'] for row in found['predictions']} == set(NAMES)


@pytest.mark.slow
@pytest.mark.fault(69)
def test_dollar_signs_in_names_are_drawn(repo, images, run, tmp_path, capsys):
    model = ['--workdir', str(run), '--allow', 'helpers']
    other = shutil.copytree(run, tmp_path / '$y_{$')
    for i, words in enumerate(
        (
            ['data', *flags(repo, images), '--batches=1', '--out'],
            ['evaluate', *model, '--report'],
            ['compare', str(run), str(other), '--out'],
            ['predict', *model, photo(images), '--out'],
        )
    ):
        shown(capsys, *words, str(tmp_path / f'{i}.svg'))
        assert (tmp_path / f'{i}.svg').stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.fault(69)
@pytest.mark.usefixtures('drawn_curves')
def test_a_run_with_dollar_signs_in_its_name_draws_its_curves(repo, images, tmp_path):
    assert main(['train', *flags(repo, images), '--workdir', str(tmp_path / RUN)]) == 0
    assert (tmp_path / RUN / 'curves.png').stat().st_size > 1000


@pytest.mark.fault(110)
@pytest.mark.parametrize(
    ('text', 'shown'),
    [
        ('http://user:pw@host/a.npz: denied', 'http://***@host/a.npz: denied'),
        ("'https://token@host:80/x@y'", "'https://***@host:80/x@y'"),
        ('http://u:p@ss@host/', 'http://***@host/'),
        ('postgresql+psycopg://me:p/w@host/db', 'postgresql+psycopg://me:***@host/db'),
        ('postgresql://me@host/db?passfile=/a/b', 'postgresql://me@host/db?passfile=/a/b'),
        ('mysql://me@host, https://me@host', 'mysql://me@host, https://***@host'),
        ('s3://b/a?X-Amz-Signature=1f&x=2&token=3', 's3://b/a?X-Amz-Signature=***&x=2&token=***'),
        ('https://b.net/a?sv=1&sig=a%2Fb', 'https://b.net/a?sv=1&sig=***'),
        ('Illegal header value Bearer abc\n', 'Illegal header value Bearer ***\n'),
        ('401 for TOKENOFMINE at x', '401 for *** at x'),
        ('hf://google/vit@main, gs://b/a@b', 'hf://google/vit@main, gs://b/a@b'),
        ('me@host --key=value', 'me@host --key=value'),
    ],
)
def test_secrets_are_not_shown(monkeypatch, text, shown):
    monkeypatch.setenv('HF_TOKEN', 'TOKENOFMINE')
    assert errors.without_secrets(text) == shown
    assert errors.without_secrets(shown) == shown
    assert str(UserError(text)) == errors.one_line(shown)
