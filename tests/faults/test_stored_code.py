"""A run folder from anybody runs nobody's code: `--allow` says whose it may be."""

import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.config.origin import dotted_names, require_allowed
from vit_jax.errors import UserError

pytestmark = pytest.mark.fault(38)

DIGITS = 'experiments/vit/digits.py:smoke'


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that the package `stranger`, which is on the path, writes when it is imported."""
    file, package = tmp_path / 'imported', tmp_path / 'code' / 'stranger'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text(f'open({str(file)!r}, "w").close()\n')
    monkeypatch.syspath_prepend(package.parent)
    yield file
    for name in [name for name in sys.modules if name.partition('.')[0] == 'stranger']:
        del sys.modules[name]


@pytest.fixture
def tampered(smoke_run, tmp_path):
    """`tampered(KEY, VALUE)`: a copy of a run in which both stored configs have another value."""

    def make(key, value):
        folder = shutil.copytree(smoke_run, tmp_path / 'run')
        rewrite(folder / 'config.json', lambda config: put(config, key, value))
        for step in (folder / 'checkpoints').iterdir():
            rewrite(step / 'meta/metadata', lambda meta: put(meta['config'], key, value))
            rewrite(step / 'manifest.json', lambda content, step=step: sign(content, step))
        return folder

    return make


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def put(config, key, value):
    *groups, leaf = key.split('.')
    for group in groups:
        config = config.setdefault(group, {})
    config[leaf] = value


def sign(manifest, step):
    data = (step / 'meta/metadata').read_bytes()
    fingerprint = f'sha256 {hashlib.sha256(data).hexdigest()}, {len(data)} bytes'
    manifest['files']['meta/metadata'] = fingerprint


def refused(words, capsys):
    """The one line by which a command ends."""
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ''
    (line,) = shown.err.splitlines()
    return line


@pytest.mark.parametrize(
    'words',
    [
        ('evaluate', '--workdir', 'RUN'),
        ('evaluate', '--checkpoint', 'RUN', '--source', 'digits', '--split', 'test'),
        ('predict', '--workdir', 'RUN', 'PHOTO'),
        ('predict', '--workdir', 'RUN', '--help'),
        ('attention', '--workdir', 'RUN', '--out', 'OUT.png', 'PHOTO'),
        ('translate', '--workdir', 'RUN', 'Ein Hund.'),
        ('inspect', '--workdir', 'RUN'),
        ('inspect', '--checkpoint', 'RUN'),
        ('convert', 'RUN', 'OUT.npz'),
        ('scaling', 'collect', 'RUN'),
        ('scaling', 'report', 'RUN', '--output', 'OUT'),
        ('train', '--config', DIGITS, '--workdir', 'OUT', '--config.init.from=RUN'),
    ],
    ids=' '.join,
)
@pytest.mark.parametrize(
    ('key', 'value', 'module'),
    [
        ('model.name', 'stranger.models.vit', 'stranger'),
        ('evals.test.transforms', "os.system('touch IMPORTED')", 'os'),
    ],
)
def test_no_command_imports_what_a_run_folder_names(
    words, key, value, module, tampered, mark, tmp_path, repo, monkeypatch, capsys
):
    monkeypatch.chdir(repo)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / 'photo.png')
    places = {
        'RUN': tampered(key, value.replace('IMPORTED', str(mark))),
        'OUT': tmp_path / 'out',
        'PHOTO': tmp_path / 'photo.png',
    }
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    line = refused(words, capsys)
    assert f'config.{key} in ' in line
    assert str(tmp_path / 'run') in line
    assert mentions(line, '--allow', module)
    assert not mark.exists()
    assert not list(tmp_path.glob('out*'))


@pytest.mark.parametrize('key', ['model.name', 'task.name', 'data.transforms'])
def test_resuming_compares_with_what_a_run_folder_names_and_imports_nothing(
    key, tampered, mark, repo, monkeypatch, capsys
):
    monkeypatch.chdir(repo)
    folder = tampered(key, 'stranger.vit')
    line = refused(['train', '--config', DIGITS, '--workdir', folder], capsys)
    assert str(folder) in line and f'config.{key.partition(".")[0]} ' in line
    assert not mark.exists()


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('task.name', 'stranger.tasks.classify'),
        ('data.source', 'stranger.digits:here'),
        ('data.source', 'digits*1+stranger.digits:here*2'),
        ('data.transforms', 'flip|stranger.solarize(3)'),
        ('evals.test.source', 'stranger.digits'),
        ('evals.test.evaluator', 'stranger.measure'),
        ('init.from', 'stranger.swin:weights.npz'),
    ],
)
def test_every_place_that_a_name_can_stand_in(key, value, tampered, mark, capsys):
    folder = tampered(key, value)
    line = refused(['evaluate', '--workdir', folder], capsys)
    assert f'config.{key} in {folder}/config.json names' in line
    assert not mark.exists()


@pytest.mark.slow
def test_what_is_allowed_is_imported_and_said_once(tampered, mark, capsys):
    (mark.parent / 'code/stranger/vit.py').write_text('from vit_jax.models.vit import Model\n')
    words = ['--workdir', str(tampered('model.name', 'stranger.vit')), '--allow', 'stranger']
    assert cli.main(['evaluate', *words, '--json']) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)['test/accuracy'] > 0
    assert shown.err.count('stranger') == 1
    assert mark.exists()


def test_pictures_beside_a_task_need_to_be_allowed_too(tampered, mark, capsys):
    folder = tampered('task.name', 'tasks.classify')
    words = ['predict', '--workdir', folder, '--allow', 'tasks', 'a.png']
    assert cli.main(list(map(str, words))) == 2
    assert mentions(capsys.readouterr().err, "'viz.classify'", 'vit_jax')


@pytest.mark.parametrize('name', ['', 'my-lab', 'my_lab.', 'my_lab/models'])
def test_a_flag_that_is_no_module(name, capsys):
    line = refused(['evaluate', '--workdir', 'a', f'--allow={name}'], capsys)
    assert mentions(line, '--allow', f'{name!r}', 'module')


@pytest.mark.parametrize('allowed', ['my_lab', 'my_lab.models', 'my_lab.models.foo'])
def test_a_module_allows_what_is_in_it(allowed):
    require_allowed({'model': {'name': 'my_lab.models.foo'}}, [allowed], 'a')


@pytest.mark.parametrize('allowed', ['my', 'my_lab.model', 'my_lab.models.foo.bar', 'models'])
def test_and_nothing_else(allowed):
    with pytest.raises(UserError, match='--allow my_lab'):
        require_allowed({'model': {'name': 'my_lab.models.foo'}}, [allowed], 'a')


@pytest.mark.parametrize(
    'text',
    ["__import__('os').system('x')", 'a if os.system else b', '[os.system][0](1)', '(a|os.x)(1)'],
)
def test_transforms_that_are_more_than_names(text):
    with pytest.raises(UserError):
        require_allowed({'data': {'transforms': text}}, [], 'a')


def test_names_of_the_package_need_no_flag(smoke_run):
    assert not list(dotted_names(json.loads((smoke_run / 'config.json').read_text())))
    require_allowed({'model': {'name': 'vit_jax.models.vit'}}, [], 'a')
