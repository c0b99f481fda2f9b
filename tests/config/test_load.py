"""A config is checked before anything is built, and a mistake names the nearest valid word."""

import pathlib

import pytest
from helpers.messages import mentions, says
from ml_collections import ConfigDict

from vit_jax.__main__ import main
from vit_jax.config import load, recipes
from vit_jax.config.load import validate
from vit_jax.config.run import Step
from vit_jax.errors import UserError

DIGITS = 'experiments/vit/digits.py'


@pytest.fixture(autouse=True)
def in_repo(repo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)


@pytest.mark.parametrize(
    ('override', 'words'),
    [
        ('modle.name=vit', "did you mean 'model'"),
        ('model.widht=3', "did you mean 'width'"),
        ('optim.schedule.wramup=3', "did you mean 'warmup'"),
        ('optim.schedule.peak=3', ('config.optim.schedule', "'peak'")),
        ('model.name=vitt', "did you mean 'vit'"),
        ('task.name=clasify', "did you mean 'classify'"),
        ('task.loss_name=sotfmax', "did you mean 'softmax'"),
        ('model.dtype=bfloat17', "did you mean 'bfloat16'"),
        ('parallel=8', 'is a group'),
        ('seed.x=8', 'config.seed'),
        ('total', 'give a value'),
        ('batch_size=abc', 'expected int'),
        ('batch_size=1.5', 'expected int'),
        ('data.cache=maybe', 'expected bool'),
        ('batch_size=0', 'at least 1'),
        ('model.num_heads=5', ('num_heads', '5')),
        ('step.accum_steps=0', 'at least 1'),
        ('optim.lr=nan', 'finite'),
        ('optim.weight_decay=inf', 'finite'),
        ('total=0', 'positive'),
        ('total=-3 epochs', 'write '),
        ('total=3 fortnights', 'write '),
        ('every.log=', 'positive'),
        ('model.patch_size=0', 'at least 1'),
        ('model.width=-4', 'at least 1'),
        ('model.num_heads=0', 'at least 1'),
        ('model.depth=-1', 'at least 0'),
        ('step.ema_decay=1.5', 'in [0, 1)'),
        ('data.threads=-1', ('config.data.threads=-1', '0')),
        ('data.workers=-2', 'at least 0'),
        ('evals.test.batch_size=0', ('config.evals.test.batch_size=0', '1')),
        ('evals.test.stall_seconds=-0.5', 'at least 0'),
    ],
)
def test_mistakes_are_one_line(override: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        load.model_and_task(load.load(DIGITS, [override]))
    assert mentions(str(error.value), words)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'name', ['vit/digits', 'vit/digits.py', 'experiments/vit/digits', 'experiments/vit/digits.py']
)
def test_experiments_of_the_package_go_by_their_names(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load.load(f'{name}:smoke') == load.load(f'{DIGITS}:smoke')
    with pytest.raises(UserError, match="did you mean 'vit/digits'") as error:
        load.load('vit/digts')
    assert 'list experiments' in str(error.value)
    for outside in ('../config/load', '../__main__', str(tmp_path / 'vit/digits')):
        with pytest.raises(UserError, match='no file'):
            load.load(outside)


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'vit').mkdir()
    (tmp_path / 'vit' / 'digits').write_text('x = 1\n')
    with pytest.raises(UserError, match='end'):
        load.load('vit/digits')


def test_files_that_are_no_config(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match='no file'):
        load.load('experiments/vit/digit.py')
    (tmp_path / 'empty.py').write_text('x = 1\n')
    with pytest.raises(UserError, match='get_config'):
        load.load(str(tmp_path / 'empty.py'))


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (f'{DIGITS}:smok', ("'smok'", "'smoke'")),
        (f'{DIGITS}:lionn', "did you mean 'lion'"),
        ('experiments/translate/multi30k.py:lstmm', "did you mean 'lstm'"),
        ('experiments/transfer/cifar10_heldout.py:vit,scrach', "did you mean 'scratch'"),
        ('experiments/vit/finetune.py:cifar11,B/16', "did you mean 'cifar10'"),
        ('experiments/vit/imagenet2012.py:C/16', "unknown ViT variant 'C'"),
    ],
)
def test_an_argument_that_a_config_does_not_take(spec, message, tmp_path, capsys):
    assert main(['train', '--config', spec, '--workdir', str(tmp_path / 'run')]) == 2
    error = capsys.readouterr().err
    assert mentions(error, message)
    assert error.count('\n') == 1


def test_arguments_beyond_the_examples_are_for_the_file_to_check() -> None:
    assert load.load('experiments/vit/finetune.py:cifar10,B/16').model.width == 768


def test_a_function_without_a_parameter(tmp_path: pathlib.Path) -> None:
    file = tmp_path / 'plain.py'
    file.write_text(
        'from experiments.vit import digits\ndef get_config():\n    return digits.get_config()\n'
    )
    assert load.load(str(file)).model.width == 96
    with pytest.raises(UserError, match=r'argument.*smoke'):
        load.load(f'{file}:smoke')


RECIPE = """
from typing import Literal
from ml_collections import ConfigDict

def get_config(variant='S/16', epochs: int = 90, fast=False, lr=0.1,
               data: Literal['i1k', 'i21k'] = 'i1k', labels: Literal[1, 10] = 1):
    return ConfigDict(dict(locals(), total='9 steps'))

def smoke(config):
    config.total = f'2 steps of {config.epochs}'
"""


def test_arguments_of_a_recipe_have_names_and_the_types_of_their_defaults(tmp_path) -> None:
    (tmp_path / 'recipe.py').write_text(RECIPE)

    def given(text):
        config = recipes.run_file(f'{tmp_path}/recipe.py{text}', 'get_config', '--config')
        return config.to_dict()

    default = given('')
    assert default == dict(
        variant='S/16', epochs=90, fast=False, lr=0.1, data='i1k', labels=1, total='9 steps'
    )
    assert given(':B/16,epochs=300,lr=1e-3') == default | dict(variant='B/16', epochs=300, lr=1e-3)
    assert given(':variant=B/16,fast') == given(':fast=true,B/16') != given(':B/16,fast=False')
    assert given(':labels=10,data=i21k') == default | dict(labels=10, data='i21k')
    assert given(':smoke,epochs=7') == default | dict(epochs=7, total='2 steps of 7')
    for text, words in {
        ':epoch=7': ("'epoch'", "'epochs'"),
        ':epochs=many': ('epochs=many', 'whole number'),
        ':fast=perhaps': ('true', 'false'),
        ':B/16,fst': ("'fst'", "'fast'"),
        ':B/16,B/32': 'variant=S/16, epochs=90, fast=False, lr=0.1, data=i1k|i21k',
        ':data=i22k': ("'i22k'", "'i21k'"),
        ':labels=5': ("'5'", '1, 10'),
        ':epochs=1,epochs=2': ('two', 'epochs'),
    }.items():
        with pytest.raises(UserError) as error:
            given(text)
        assert mentions(str(error.value), f'recipe.py{text}: ', words)


SWEEP = """
import dataclasses
from vit_jax.sweeps.space import Sweep

MODELS = ('S/16', 'B/16', 'L/16')

def get_sweep(models: tuple[str, ...] = MODELS, fast=False):
    points = [{'model.name': name} for name in models]
    return Sweep('a.py:fast' if fast else 'a.py', 'val/loss', points=points)

def smoke_sweep(sweep):
    return dataclasses.replace(sweep, points=sweep.points[:1])
"""


def test_a_sweep_takes_several_words_and_becomes_small(tmp_path) -> None:
    (tmp_path / 'sweep.py').write_text(SWEEP)

    def given(text):
        sweep = recipes.run_file(f'{tmp_path}/sweep.py{text}', 'get_sweep', 'create')
        return sweep.config, [point['model.name'] for point in sweep.points]

    assert given('') == ('a.py', ['S/16', 'B/16', 'L/16'])
    assert given(':L/16,fast,models=S/16') == ('a.py:fast', ['L/16', 'S/16'])
    assert given(':smoke') == ('a.py:smoke', ['S/16'])
    assert given(':smoke,fast,B/16') == ('a.py:fast,smoke', ['B/16'])
    for text in (':M/16', ':models=M/16', ':S/16,M/16'):
        with pytest.raises(UserError, match="unknown models 'M/16'"):
            given(text)


def test_a_recipe_without_arguments_may_have_a_small_size(tmp_path) -> None:
    text = 'def get_config():\n    return {}\n\ndef smoke(config):\n    config.update(total=2)\n'
    (tmp_path / 'recipe.py').write_text(text)
    assert recipes.run_file(f'{tmp_path}/recipe.py:smoke', 'get_config', '--config') == {'total': 2}
    with pytest.raises(UserError, match="did you mean 'smoke'"):
        recipes.run_file(f'{tmp_path}/recipe.py:smok', 'get_config', '--config')


@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('a/b:c', 'a/b:c'),
        ('a/b:B/16,150ep,fast', 'a/b:B/16,epochs=150,fast'),
        ('bit/finetune:cifar10,R50x1', 'bit/finetune:cifar10,variant=R50x1'),
        (
            'colorization/coltran_upsamplers:spatial,cifar10',
            'colorization/coltran_upsamplers_cifar10:spatial',
        ),
        ('detr/bccd:scenes', 'detr/bccd:scenes'),
        ('detr/coco:DC5-R101,300ep', 'detr/coco:DC5-R101,epochs=300'),
        ('detr/coco_panoptic:boxes,R101', 'detr/coco_boxes:R101'),
        ('detr/finetune:', 'detr/own:'),
        ('detr/finetune:auto', 'detr/own:'),
        ('eomt/finetune:auto,448', 'eomt/own:size=448'),
        ('eomt/semantic:', 'eomt/ade20k:'),
        ('eomt/semantic:cityscapes,L,fast', 'eomt/cityscapes:L,fast'),
        ('eomt/semantic:smoke', 'eomt/ade20k:smoke'),
        ('jit/cifar10:epsilon/16', 'jit/cifar10:epsilon,patch=16'),
        ('jit/restore:small,digits', 'jit/restore:small,data=digits'),
        ('swin/imagenet:L,22k,384', 'swin/imagenet_finetune:L,i22k,size=384'),
        ('transfer/cifar10_dinov2:scratch,1%', 'transfer/cifar10_dinov2:scratch,labels=1%'),
        ('transfer/cifar10_heldout:bit,finetune', 'transfer/cifar10_heldout:bit'),
        ('mae/cifar10:pretrain', 'mae/cifar10:'),
        ('mae/cifar10:finetune,10%', 'mae/cifar10_finetune:labels=10%'),
        ('mae/cifar10:scratch,1%', 'mae/cifar10_finetune:scratch,labels=1%'),
        ('mae/cifar10:smoke-finetune', 'mae/cifar10_finetune:smoke'),
        ('mae/imagenet:L/16,probe', 'mae/imagenet_probe:L/16'),
        ('mixer/imagenet2012:B/16,60ep', 'mixer/imagenet2012:B/16,epochs=60'),
        ('scaling/cifar10:smoke-bit', 'scaling/cifar10:bit,smoke'),
        ('scaling/cifar10_isoflop:digits-cosine', 'scaling/cifar10_isoflop:digits'),
        ('scaling/cifar10_isoflop:target', 'scaling/cifar10_isoflop:target'),
        ('scaling/vit_compute:L/16,14,fast', 'scaling/vit_compute:L/16,epochs=14,fast'),
        ('scaling/zhai:B/16,1M,14M', 'scaling/zhai:B/16,images=1M,images=14M'),
        ('sweeps/digits:smoke-star', 'sweeps/digits:star,smoke'),
        ('vit/augreg:B/16,light1', 'vit/augreg:B/16,level=light1'),
        ('vit/augreg:i21k,S/16,medium2,fast', 'vit/augreg_i21k:S/16,level=medium2,fast'),
        ('vit/cifar10:gpu', 'vit/cifar10_gpu:'),
        ('vit/finetune:auto', 'vit/own:'),
        ('vit/finetune:auto,384,lora', 'vit/own:size=384,lora'),
        ('vit/finetune:pets,B/32,transfer', 'vit/transfer:pets,variant=B/32'),
        ('vit/finetune:pets,R50+B/16,map', 'vit/finetune:pets,variant=R50+B/16,pool=map'),
        ('vit/imagenet2012:B/16,300ep,fast', 'vit/imagenet2012:B/16,epochs=300,fast'),
        ('vit/imagenet2012:vit5,S/16,100ep', 'vit/vit5:S/16,epochs=100'),
        ('vit/imagenet2012:naflex,B/16', 'vit/naflex:B/16'),
        ('vit/imagenet2012:flexi,B/16', 'vit/flexivit:B/16'),
    ],
)
@pytest.mark.parametrize('form', ['{}', '{}.py', 'experiments/{}.py', '/clone/experiments/{}.py'])
def test_former_words_of_recipes_have_their_meaning(old, new, form) -> None:
    (before, words), (after, arguments) = (spec.split(':') for spec in (old, new))
    spec = f'{form.format(before)}:{words}'
    assert recipes.translate(spec) == (form.format(after), arguments)


def test_dotted_names_reach_outside_of_the_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'their_lab').mkdir()
    (tmp_path / 'their_lab' / 'tiny.py').write_text('from vit_jax.models.vit import Model\n')
    monkeypatch.syspath_prepend(tmp_path)
    config = load.load(DIGITS, ['model.name=their_lab.tiny'])
    assert load.model_and_task(config)[0].width == config.model.width
    with pytest.raises(UserError, match=r'their_lab\.absent'):
        load.load(DIGITS, ['model.name=their_lab.absent'])


def test_stored_config_builds_the_same_objects() -> None:
    config = load.load(DIGITS, ['model.num_classes=10'])
    again = load.from_json(load.to_json(config))
    assert again.to_dict() == config.to_dict()
    assert load.model_and_task(again) == load.model_and_task(config)


@pytest.mark.parametrize(
    ('section', 'value', 'words'),
    [
        ('step', {'acum_steps': 2}, ('config.step', "'acum_steps'", "'accum_s")),
        ('step', {'accum_steps': 2.0}, 'config.step.accum_steps=2.0: expected int'),
        ('step', {'max_skips': -1}, ('config.step.max_skips=-1', '0')),
        ('model', {'name': 'vit', 'width': '96'}, "config.model.width='96': expected int"),
        ('model', {'name': 'vit', 'width': None}, 'config.model.width=None'),
        ('optim', {'name': 'adamm', 'lr': 1.0}, "did you mean 'adam'"),
        ('init', {'posemb': 'cubic'}, ('config.init.posemb', "'cubic'")),
        ('init', {'form': 'a.npz'}, "did you mean 'from'"),
        ('step', 3, 'config.step=3'),
        ('data', 3, 'config.data=3'),
        ('checkpoint', {'keep_lost': 2}, "did you mean 'keep_last'"),
        ('step', {'ema_decay': 1.0}, ('config.step.ema_decay=1.0', '[0, 1')),
        ('every', {'log': ''}, "config.every.log=''"),
        ('checkpoint', {'keep_every': '3 fortnights'}, "config.checkpoint.keep_every='3 fortni"),
        ('parallel', {'strategi': 'jit'}, "did you mean 'strategy'"),
        ('every', {'chekpoint': '1 epoch'}, "did you mean 'checkpoint'"),
        ('evals', {'test': 3}, 'config.evals.test=3'),
        ('optim', {'name': 'adam'}, ("'optim.lr'", '--config.optim.lr=3e-4')),
        ('optim', {'name': 'adam', 'lr': 1.0, 'schedule': 'cosine'}, ('group', 'keys')),
        ('model', {'width': 3}, ("'model.name'", '--config.model.name=vit')),
        ('batch_size', 'large', "config.batch_size='large'"),
        ('seed', 1.5, 'config.seed=1.5: expected int'),
    ],
)
def test_mistakes_in_a_file_are_one_line(section: str, value, words: str) -> None:
    config = ConfigDict(load.load(DIGITS).to_dict() | {section: value})
    with pytest.raises(UserError) as error:
        load.override(config, [])
    assert mentions(str(error.value), words)


def test_all_that_is_missing_is_named_at_once() -> None:
    given = {'model': {'name': 'vit'}, 'optim': {'name': 'sgd'}, 'data': {'source': 'digits'}}
    with pytest.raises(UserError) as error:
        load.override(ConfigDict(given), [])
    assert says(str(error.value), 'total', 'batch_size', 'task.name', 'data.split', 'optim.lr')


@pytest.mark.parametrize('section', ['model', 'task', 'data', 'optim'])
def test_a_section_that_is_missing_or_no_group(section: str) -> None:
    given = load.load(DIGITS).to_dict()
    del given[section]
    with pytest.raises(UserError, match=f"config: the keys? '{section}"):
        load.override(ConfigDict(given), [])
    with pytest.raises(UserError, match=f'config.{section}=3.*group'):
        load.override(ConfigDict(given | {section: 3}), [])


def test_a_misspelt_section_is_unknown_and_not_only_missing() -> None:
    with pytest.raises(UserError, match=r"unknown key 'modle'; .* 'model'"):
        load.override(ConfigDict({'modle': {'name': 'vit'}}), [])


def test_lists_count_as_tuples() -> None:
    parallel = {'rules': [['kernel$', [None, 'tensor']]]}
    validate(ConfigDict(load.load(DIGITS).to_dict() | {'parallel': parallel}))


def test_what_a_section_leaves_out_has_a_default() -> None:
    empty = {name: {} for name in ('every', 'step', 'checkpoint', 'parallel')}
    sparse = ConfigDict(load.load(DIGITS).to_dict() | empty)
    validate(sparse)
    assert load.to_run(sparse).step == Step()


def test_renamed_keys_still_load(tmp_path: pathlib.Path) -> None:
    before = load.load(DIGITS).to_dict()
    before['parallel'] = {'fsdp': 2, 'small': 100}
    stored = load.from_json(load.to_json(ConfigDict(before)))
    (tmp_path / 'old.py').write_text(
        f'from ml_collections import ConfigDict\ndef get_config(arg): return ConfigDict({before})'
    )
    written = load.load(f'{tmp_path}/old.py')
    flag = load.load(DIGITS, ['parallel.fsdp=2', 'parallel.small=100'])
    for config in (stored, written, flag):
        assert config.parallel.min_split_size == 100
        assert config.parallel.fsdp == 2
        assert 'small' not in config.parallel


def test_unknown_section_is_refused() -> None:
    config = load.load(DIGITS)
    with config.unlocked():
        config.optimizer = ConfigDict()
    with pytest.raises(UserError, match="did you mean 'optim'"):
        validate(config)
