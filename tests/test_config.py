"""A config is checked before anything is built, and a mistake names the nearest valid word."""

import pathlib

import pytest
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import durations
from vit_jax.errors import UserError

DIGITS = 'experiments/vit/digits.py'


@pytest.fixture(autouse=True)
def in_repo(repo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)


@pytest.mark.parametrize(
    ('override', 'path', 'value'),
    [
        ('batch_size=16', 'batch_size', 16),
        ('batch_size=1e3', 'batch_size', 1000),
        ('optim.lr=1', 'optim.lr', 1.0),
        ('total=7 epochs', 'total', '7 epochs'),
        ('model.num_classes=12', 'model.num_classes', 12),
        ('model.width=64', 'model.width', 64),
        ('task.value_range=(0.0, 1.0)', 'task.value_range', (0.0, 1.0)),
        ('data.cache=False', 'data.cache', False),
        ('evals.test.split=train[:10]', 'evals.test.split', 'train[:10]'),
        # Not in the file: the default of the constructor is what the flag replaces.
        ('model.dropout=0.25', 'model.dropout', 0.25),
        ('model.representation_size=8', 'model.representation_size', 8),
        ('model.scan=true', 'model.scan', True),
        ('optim.layer_decay=0.75', 'optim.layer_decay', 0.75),
        ('optim.freeze=("pos",)', 'optim.freeze', ('pos',)),
        ('optim.schedule.cooldown=5%', 'optim.schedule.cooldown', '5%'),
    ],
)
def test_override(override: str, path: str, value: object) -> None:
    node = config_lib.load(DIGITS, [override])
    for key in path.split('.'):
        node = node[key]
    assert node == value
    assert type(node) is type(value)


@pytest.mark.parametrize(
    ('override', 'words'),
    [
        ('modle.name=vit', "did you mean 'model'"),
        ('model.widht=3', "did you mean 'width'"),
        ('model.name=vitt', "did you mean 'vit'"),
        ('task.name=clasify', "did you mean 'classify'"),
        ('task.loss_name=sotfmax', "did you mean 'softmax'"),
        ('model.dtype=bfloat17', "did you mean 'bfloat16'"),
        ('parallel=8', 'is a group'),
        ('seed.x=8', 'config.seed is a value'),
        ('total', 'give a value'),
        ('batch_size=abc', 'expected int'),
        ('batch_size=1.5', 'expected int'),
        ('data.cache=maybe', 'expected bool'),
        ('batch_size=0', 'at least 1'),
        ('step.accum_steps=0', 'at least 1'),
        ('optim.lr=nan', 'finite'),
        ('optim.weight_decay=inf', 'finite'),
        ('total=0', 'positive'),
        ('total=-3 epochs', 'write '),
        ('total=3 fortnights', 'write '),
        ('every.log=', 'positive'),
    ],
)
def test_mistakes_are_one_line(override: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        config_lib.build(config_lib.load(DIGITS, [override]))
    assert words in str(error.value)
    assert '\n' not in str(error.value)


def test_files_that_are_no_config(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match='no file'):
        config_lib.load('experiments/vit/digit.py')
    (tmp_path / 'empty.py').write_text('x = 1\n')
    with pytest.raises(UserError, match='get_config'):
        config_lib.load(str(tmp_path / 'empty.py'))


def test_dotted_names_reach_outside_of_the_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'my_lab').mkdir()
    (tmp_path / 'my_lab' / 'tiny.py').write_text('from vit_jax.models.vit import Model\n')
    monkeypatch.syspath_prepend(tmp_path)
    config = config_lib.load(DIGITS, ['model.name=my_lab.tiny'])
    assert config_lib.build(config)[0].width == config.model.width
    with pytest.raises(UserError, match=r'my_lab\.absent'):
        config_lib.load(DIGITS, ['model.name=my_lab.absent'])


@pytest.mark.parametrize(
    ('text', 'steps'),
    [
        ('100', 100),
        ('100 steps', 100),
        ('3 epochs', 150),
        ('1 epoch', 50),
        ('0.1 epochs', 5),
        ('1e3 examples', 50),
        ('1 example', 1),
        ('10%', 20),
        ('', 0),
        ('0', 0),
        (40, 40),
    ],
)
def test_durations(text: str | int, steps: int) -> None:
    assert durations.Durations(20, 1000, total_steps=200).steps(text) == steps


def test_epochs_of_batches_that_are_not_equally_full() -> None:
    config = config_lib.load(DIGITS, ['total=3 epochs', 'batch_size=4096'])
    run = durations.of_run(config, 29_000 / 172, 29_000)
    assert run.total_steps == 3 * 172
    assert run.steps('29000 examples') == 172


def test_the_vocabulary_fills_the_size_of_the_model() -> None:
    config = config_lib.load(DIGITS, ['model.num_classes=10'])
    config_lib.fill_vocab_size(config, 8000)  # a model of images has none
    assert 'vocab_size' not in config.model
    with config.unlocked():
        config.model.vocab_size = None
    config_lib.fill_vocab_size(config, 0)
    assert config.model.vocab_size is None
    config_lib.fill_vocab_size(config, 8000)
    assert config.model.vocab_size == 8000
    with pytest.raises(UserError, match=r'vocab_size=8000: .* has 8001 ids'):
        config_lib.fill_vocab_size(config, 8001)


def test_the_total_is_no_share_of_itself() -> None:
    with pytest.raises(UserError, match='itself'):
        durations.Durations(20, 1000).steps('5%')


def test_stored_config_builds_the_same_objects() -> None:
    config = config_lib.load(DIGITS, ['model.num_classes=10'])
    again = config_lib.from_json(config_lib.to_json(config))
    assert again.to_dict() == config.to_dict()
    assert config_lib.build(again) == config_lib.build(config)


def test_classes_come_from_the_data() -> None:
    config = config_lib.load(DIGITS)
    config_lib.fill_num_classes(config, 10)
    assert config.model.num_classes == 10
    with pytest.raises(UserError, match='11 classes'):
        config_lib.fill_num_classes(config, 11)


def test_overrides_are_found_among_other_words() -> None:
    argv = ['--config.a=1', '--workdir', 'x', '--config', 'f.py', '--config.b', '2']
    assert config_lib.split_overrides(argv) == (
        ['a=1', 'b=2'],
        ['--workdir', 'x', '--config', 'f.py'],
    )


def test_unknown_section_is_refused() -> None:
    config = config_lib.load(DIGITS)
    with config.unlocked():
        config.optimiser = ConfigDict()
    with pytest.raises(UserError, match="did you mean 'optim'"):
        config_lib.validate(config)
