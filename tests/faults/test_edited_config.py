"""A config.json that was edited after training: the checkpoints hold the true config."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from helpers.messages import says
from helpers.runs import in_checkpoint, linear
from PIL import Image

import vit_jax
from vit_jax.__main__ import main
from vit_jax.errors import UserError

pytestmark = pytest.mark.usefixtures('one_device')

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(GOLDEN / 'run_vit', tmp_path / 'run')


@pytest.fixture
def image(tmp_path):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / 'a.png')
    return tmp_path / 'a.png'


def edit(run, change):
    config = json.loads((run / 'config.json').read_text())
    change(config)
    (run / 'config.json').write_text(json.dumps(config))


def put(section, **values):
    return lambda config: config[section].update(values)


def refused(capsys, *words):
    """The one line of a command that was refused."""
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


COMMANDS = {
    'evaluate': ('--workdir', 'RUN'),
    'predict': ('--workdir', 'RUN', 'IMAGE'),
    'attention': ('--workdir', 'RUN', 'IMAGE', '--out', 'OUT.png'),
    'convert': ('RUN/checkpoints/2', 'OUT.npz'),
    'inspect': ('--checkpoint', 'RUN'),
    'train': ('--config', 'vit/digits:smoke', '--config.init.from=RUN', '--workdir', 'OUT'),
}


@pytest.mark.fault(112)
@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_that_reads_weights_names_the_key_and_both_values(
    run, image, tmp_path, capsys, command
):
    edit(run, put('model', posemb='none'))
    places = {'RUN': str(run), 'IMAGE': str(image), 'OUT': str(tmp_path / 'out')}
    words = COMMANDS[command]
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    line = refused(capsys, command, *words)
    assert f"{run}/config.json: config.model.positions.embed is 'none', but 'sincos2d' in" in line
    assert str(run / 'checkpoints' / '2') in line
    assert not list(tmp_path.glob('out*'))


@pytest.mark.fault(112)
@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (put('model', num_heads=4), 'config.model.num_heads is 4, but 2'),
        (put('model', gelu='erf'), "config.model.block.gelu is 'erf', but 'tanh'"),
        (put('model', name='hybrid'), "config.model.name is 'hybrid', but 'vit'"),
        (put('task', value_range=[0, 1]), 'config.task.value_range is (0, 1), but (-1.0, 1.0)'),
        (lambda c: c.update(seed=3), 'config.seed is 3, but 0'),
        (
            lambda c: c['evals']['test'].update(transforms='central_crop(4)'),
            "config.evals.test.transforms is 'central_crop(4)', but ''",
        ),
        (
            lambda c: c.update(evals={'new': c['evals']['test'] | {'transforms': 'flip'}}),
            "config.evals.new.transforms is 'flip', but ''",
        ),
        (lambda c: c.update(evals={}), "config.data.transforms is 'pad_and_crop(1)', but ''"),
    ],
)
def test_edits_that_change_the_function_or_its_inputs(run, capsys, change, words):
    edit(run, change)
    assert words in refused(capsys, 'evaluate', '--workdir', run)
    with pytest.raises(UserError, match=r'config\.json'):
        vit_jax.load(run)


@pytest.mark.fault(112)
@pytest.mark.parametrize(('name', 'command'), [('run_reverse', 'translate'), ('run_coltran', None)])
def test_runs_that_translate_and_colorize(tmp_path, image, capsys, name, command):
    run = shutil.copytree(GOLDEN / name, tmp_path / 'run')
    edit(run, put('model', num_heads=1))
    words = ['translate', '--workdir', run, '1 2']
    if command is None:
        words = ['colorize', '--workdir', run, image, '--out', tmp_path / 'out.png']
    assert 'config.model.num_heads is 1, but 2' in refused(capsys, *words)


@pytest.mark.slow
@pytest.mark.fault(112)
def test_harmless_edits_stay_possible(run, capsys):
    def change(config):
        config['model'] |= {'attention': 'xla', 'dropout': 0.5}
        config['task'] |= {'mixup': 0.9}
        config['optim'] |= {'lr': 7.0}
        config['evals'] |= {'more': config['evals']['test'] | {'split': 'test[:4]'}}

    expected = json.loads((run / 'result.json').read_text())['test/loss']
    edit(run, change)
    assert main(['evaluate', '--workdir', str(run), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['test/loss'] == pytest.approx(expected, abs=1e-5)
    assert 'more/loss' in found


@pytest.mark.fault(112)
def test_without_the_file_or_with_a_checkpoint_that_has_no_config(run):
    whole = vit_jax.load(run)[0]
    in_checkpoint(run, lambda meta: meta.pop('config'))
    assert vit_jax.load(run)[0] == whole
    edit(run, put('model', posemb='none'))
    assert vit_jax.load(run)[0].positions.embed == 'none'
    (run / 'config.json').unlink()
    with pytest.raises(UserError, match=r'config\.json.*checkpoint'):
        vit_jax.load(run)


@pytest.mark.fault(112)
def test_a_run_does_not_go_on_as_another_function_even_if_its_file_says_so(tmp_path, capsys):
    words = linear(tmp_path / 'run')
    assert main([*words, '--stop-at=1']) == 75
    edit(tmp_path / 'run', put('task', value_range=[0, 1]))
    capsys.readouterr()
    line = refused(capsys, *words, '--config.task.value_range=(0,1)')
    assert says(line, 'config.task.value_range is (0, 1),', '(-1.0, 1.0)')
