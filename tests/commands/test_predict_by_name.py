"""`predict` of a task that the package does not know: its module shows what it predicts."""

import json
import sys
from unittest.mock import ANY

import jax
import numpy as np
import pytest
from helpers.messages import mentions, says
from ml_collections import ConfigDict
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.config.load import to_json
from vit_jax.inference import load
from vit_jax.models import vit

TASK = """
import dataclasses
import jax
import jax.numpy as jnp
from vit_jax.nn.stochastic import example_keys
from vit_jax.tasks import base

@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    rngs = ('noise',)

    def inputs(self, batch):
        return (jnp.asarray(batch['image'], jnp.float32),)

    def loss(self, outputs, batch):
        return {}

    def predict(self, apply, batch):
        tokens = apply(*self.inputs(batch))['tokens']
        brightness = batch['image'].mean((1, 2, 3))
        return {'brightness': brightness, 'tokens': tokens, 'noise': apply(method=draw)}


def draw(model):
    return jax.vmap(jax.random.uniform)(example_keys(model.make_rng('noise'), 1))
"""
VIZ = """
from matplotlib.figure import Figure

from vit_jax.viz import base

class Viz(base.Viz):
    columns = ('at', 'brightness')

    def add_flags(self, parser):
        parser.add_argument('--threshold', type=float, default=0.5)

    def rows(self, prediction, photo, context):
        brightness = float(prediction['brightness']) / 255
        if brightness < context.flags.threshold:
            return []
        noise = float(prediction['noise'])
        return [{'brightness': brightness, 'at': photo.original.shape, 'noise': noise}]

    def draw(self, predictions, photos, context):
        figure = Figure(figsize=(2, 1))
        figure.suptitle(f'{len(photos)} images above {context.flags.threshold}')
        return figure
"""
DEFAULTS = """
from vit_jax.viz import base

class Viz(base.Viz):
    pass
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A package of the user's with a task and the module that shows what it predicts."""
    for room, text in (('tasks', TASK), ('viz', VIZ)):
        folder = tmp_path / 'toy_lab' / room
        folder.mkdir(parents=True)
        (folder / 'glow.py').write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / 'toy_lab'
    for name in [name for name in sys.modules if name.split('.')[0] == 'toy_lab']:
        del sys.modules[name]


@pytest.fixture
def run(lab, tmp_path, monkeypatch):
    """A folder with the config of a run, and in place of a checkpoint random weights."""
    data = dict(source='digits', split='test', transforms="resize(8)|keep('image', 'label')")
    fields = dict(patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=2)
    config = ConfigDict(
        dict(task=dict(name='toy_lab.tasks.glow'), model=dict(name='vit', **fields), data=data)
    )
    config.batch_size, config.evals = 8, {}
    folder = tmp_path / 'run'
    folder.mkdir()
    (folder / 'config.json').write_text(to_json(config))
    model = vit.Model(**fields)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))
    meta = {'image': {'channels': 1, 'size': None}}
    monkeypatch.setattr(load.checkpointer, 'load_mean', lambda *args: (3, variables, meta))
    return folder


@pytest.fixture
def photos(tmp_path):
    for name, gray in (('bright', 204), ('dark', 51)):
        Image.new('L', (30, 20), gray).save(tmp_path / f'{name}.png')
    return [str(tmp_path / f'{name}.png') for name in ('bright', 'dark')]


@pytest.mark.slow
def test_its_flags_choose_its_rows(run, photos, capsys):
    argv = ['predict', '--allow', 'toy_lab', '--workdir', str(run), *photos]
    assert cli.main([*argv, '--threshold', '0.3', '--json']) == 0
    bright, dark = json.loads(capsys.readouterr().out)['images']
    assert bright['predictions'] == [
        {'brightness': pytest.approx(0.8), 'at': [20, 30, 1], 'noise': ANY}
    ]
    assert dark['predictions'] == []
    assert cli.main([*argv, '--threshold', '0.1']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if '20, 30' in line] == [
        ['20,', '30,', '1', '0.8000'],
        ['20,', '30,', '1', '0.2000'],
    ]


@pytest.mark.slow
def test_what_is_drawn_depends_on_the_seed_and_the_file(run, photos, capsys):
    drawn = []
    for seed, files in ((0, photos), (0, photos[::-1]), (1, photos)):
        flags = ['--threshold', '0', '--seed', str(seed), '--json']
        assert (
            cli.main(['predict', '--allow', 'toy_lab', '--workdir', str(run), *files, *flags]) == 0
        )
        images = json.loads(capsys.readouterr().out)['images']
        drawn.append([image['predictions'][0]['noise'] for image in images])
    assert drawn[0] == drawn[1][::-1]
    assert len({*drawn[0], *drawn[2]}) == 4


def test_its_picture(run, photos, tmp_path, capsys):
    out = tmp_path / 'new' / 'out.svg'
    assert (
        cli.main(
            ['predict', '--allow', 'toy_lab', '--workdir', str(run), *photos, '--out', str(out)]
        )
        == 0
    )
    assert str(out) in capsys.readouterr().out
    assert out.read_text().startswith('<?xml')


def test_a_picture_of_every_file(run, photos, tmp_path):
    argv = ['predict', '--allow', 'toy_lab', '--workdir', str(run), *photos]
    assert cli.main([*argv, '--out', str(tmp_path / 'pictures')]) == 0
    names = {path.name for path in (tmp_path / 'pictures').iterdir()}
    assert names == {'bright.png', 'dark.png'}


def test_defaults_show_any_task(lab, run, photos, tmp_path, capsys):
    (lab / 'viz' / 'glow.py').write_text(DEFAULTS)
    argv = ['predict', '--allow', 'toy_lab', '--workdir', str(run), '--json', *photos]
    assert cli.main([*argv, '--out', str(tmp_path / 'out.png')]) == 0
    bright, _ = json.loads(capsys.readouterr().out)['images']
    rows = {row['array']: row for row in bright['predictions']}
    assert rows['brightness'] == {
        **{'array': 'brightness', 'shape': []},
        **dict.fromkeys(('mean', 'min', 'max'), pytest.approx(204)),
    }
    assert rows['tokens']['shape'] == [5, 8]
    assert (tmp_path / 'out.png').read_bytes().startswith(b'\x89PNG')


def test_help_shows_the_flags_of_the_task(run, capsys):
    with pytest.raises(SystemExit):
        cli.main(['predict', '--allow', 'toy_lab', '--workdir', str(run), '--help'])
    output = capsys.readouterr().out
    assert '--threshold' in output and '--top' not in output


@pytest.mark.parametrize(
    ('change', 'argv', 'message'),
    [
        ({}, ['--top', '3'], "unknown flag '--top'"),
        ({}, ['--out', 'a.bmp'], 'must end in .png'),
        ({'viz/glow.py': 'def rows(*args): ...'}, [], ("'toy_lab.viz.glow'", 'Viz')),
        ({'viz/glow.py': None}, [], ('module', "'toy_lab.viz.glow'")),
        ({'tasks/glow.py': TASK.replace('predict', 'foresee')}, [], 'has no predictions'),
    ],
)
def test_mistakes_are_one_line(lab, run, photos, capsys, change, argv, message):
    for name, text in change.items():
        (lab / name).unlink()
        if text is not None:
            (lab / name).write_text(text)
    assert cli.main(['predict', '--allow', 'toy_lab', '--workdir', str(run), *photos, *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    *notes, line = captured.err.splitlines()
    assert not notes or says(notes, '--allow toy_lab')
    assert mentions(line, message)


def test_a_task_outside_of_a_package_of_tasks(lab, run, photos, capsys):
    text = (run / 'config.json').read_text()
    (run / 'config.json').write_text(text.replace('toy_lab.tasks.glow', 'toy_lab.glow'))
    assert cli.main(['predict', '--allow', 'toy_lab', '--workdir', str(run), *photos]) == 2
    assert mentions(capsys.readouterr().err, 'package', "'my_lab.tasks.foo'")
