"""Runs of adapters: what they save, that they resume exactly, and the models that they make."""

import re
import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util
from helpers.messages import mentions

import vit_jax
from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config.load import from_dict
from vit_jax.errors import UserError
from vit_jax.interop import files, peft
from vit_jax.interop.families import vision_transformer
from vit_jax.models import vit
from vit_jax.trainer import train
from vit_jax.tree_paths import param_paths

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compiled_once')]


MODEL = dict(patch_size=2, width=16, depth=1, num_heads=2, mlp_dim=24, num_classes=10, pool='cls')


def config_of(file):
    return from_dict(
        dict(
            seed=0,
            total='2 steps',
            batch_size=16,
            model=dict(name='vit', **MODEL),
            task=dict(name='classify'),
            evals={},
            data=dict(source='digits', split='train[:64]', cache=True, workers=0),
            init={'from': str(file)},
            lora=dict(rank=2, alpha=4.0, layers=('(query|value)/kernel', 'mlp/fc1')),
            optim=dict(name='adam', lr=0.1),
            step={},
            every=dict(log='1', checkpoint='1'),
            checkpoint={},
            parallel={},
        )
    )


def write_base(path):
    """A file of vision_transformer with random weights that fits the config."""
    images = jax.ShapeDtypeStruct((1, 8, 8, 1), np.float32)
    shapes = jax.eval_shape(vit.Model(**MODEL).init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)
    files.write_npz(path, vision_transformer.write(params, {'name': 'vit', **MODEL}))


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    file = tmp_path_factory.mktemp('lora') / 'base.npz'
    write_base(file)
    return file


@pytest.fixture(scope='module')
def run(base):
    folder = base.parent / 'run'
    train.train(config_of(base), folder, devices=jax.devices()[:1])
    return folder


def saved(folder):
    return param_paths(checkpointer.load_variables(folder / 'checkpoints')[1]['params'])


def test_a_run_saves_what_it_trains_alone(run, base):
    own = saved(run)
    assert {path.partition('/')[0] for path in own if '/lora/' not in path} == {'head'}
    assert len(own) == 2 + 3 * 2
    now = param_paths(vit_jax.load(run)[1]['params'])
    before = param_paths(vit_jax.load(base)[1]['params'])
    assert now.keys() == before.keys()
    block = 'encoder/block_0'
    adapted = {f'{block}/attention/qkv/kernel', f'{block}/mlp/fc1/kernel'}
    changed = {path for path in now if (np.asarray(now[path]) != before[path]).any()}
    assert changed == {*adapted, 'head/kernel', 'head/bias'}
    np.testing.assert_array_equal(
        now[f'{block}/attention/qkv/kernel'][:, 1], before[f'{block}/attention/qkv/kernel'][:, 1]
    )


OWN = {  # method: options, and the parameters of the complete model that change
    'ia3': ({}, 'attention/qkv/(kernel|bias)|mlp/fc2/kernel'),
    'vera': ({'rank': 4}, 'attention/qkv/kernel'),
    'bitfit': ({}, 'bias$'),
    'prompts': ({}, 'register_tokens'),
}


@pytest.mark.long
@pytest.mark.parametrize('method', OWN)
def test_other_methods_train_load_and_convert(method, base, tmp_path):
    options, pattern = OWN[method]
    config = config_of(base)
    with config.unlocked():
        config.lora = {'method': method, **options}
        if method == 'prompts':
            config.model.registers = 2
    train.train(config, tmp_path / 'run', devices=jax.devices()[:1])
    now = param_paths(vit_jax.load(tmp_path / 'run')[1]['params'])
    before = param_paths(vit_jax.load(base)[1]['params'])
    changed = {p for p in now if p not in before or (np.asarray(now[p]) != before[p]).any()}
    assert all(re.search(pattern, path) or path.startswith('head/') for path in changed)
    assert any(re.search(pattern, path) for path in changed if not path.startswith('head/'))
    assert main(['convert', str(tmp_path / 'run'), f'peft:{tmp_path / "adapters"}']) == 2
    if method != 'prompts':
        assert main(['convert', str(tmp_path / 'run'), str(tmp_path / 'whole.npz')]) == 0
        there = param_paths(vit_jax.load(tmp_path / 'whole.npz')[1]['params'])
        for path, values in now.items():
            np.testing.assert_array_equal(there[path], values, err_msg=path)


def test_a_stopped_run_resumes_exactly(run, base, tmp_path):
    with pytest.raises(train.Preempted):
        train.train(config_of(base), tmp_path / 'run', devices=jax.devices()[:1], stop_at=1)
    train.train(config_of(base), tmp_path / 'run', devices=jax.devices()[:1])
    for path, leaf in saved(run).items():
        np.testing.assert_array_equal(saved(tmp_path / 'run')[path], leaf, err_msg=path)


def test_another_checkpoint_is_refused(run, base, tmp_path):
    shutil.copytree(run, tmp_path / 'run')
    content = base.read_bytes()
    arrays = dict(np.load(base))
    arrays['cls'] = arrays['cls'] + 1
    try:
        files.write_npz(base, arrays)
        with pytest.raises(UserError, match=r'config.init.from.*: .*weights'):
            vit_jax.load(tmp_path / 'run')
        (tmp_path / 'run' / 'result.json').unlink()
        with pytest.raises(UserError, match=r'config.init.from.*: .*weights'):
            train.train(config_of(base), tmp_path / 'run', devices=jax.devices()[:1])
    finally:
        base.write_bytes(content)


def test_adapters_for_peft_make_the_same_model(run, base, tmp_path, capsys):
    """Names and shapes are those of `peft`, see `tests/interop/test_peft.py`."""
    assert main(['convert', str(base), str(tmp_path / 'base')]) == 0
    assert main(['convert', str(run), f'peft:{tmp_path / "adapters"}']) == 0
    assert mentions(capsys.readouterr().out, 'converted', 'folder')
    told = tmp_path / 'adapters' / peft.CONFIG
    told.write_text(told.read_text().replace(str(base), str(tmp_path / 'base')))
    arrays, _ = files.read_stored(f'{tmp_path}/adapters/{peft.WEIGHTS}')
    layer = 'base_model.model.vit.layers.0.attention.q_proj'
    assert arrays[f'{layer}.lora_A.weight'].shape == (2, 16)
    assert arrays[f'{layer}.lora_B.weight'].shape == (16, 2)
    (_, ours), (_, theirs) = vit_jax.load(run), vit_jax.load(tmp_path / 'adapters')
    expected = traverse_util.flatten_dict(ours['params'], sep='/')
    for path, leaf in traverse_util.flatten_dict(theirs['params'], sep='/').items():
        np.testing.assert_allclose(leaf, expected[path], atol=1e-6, err_msg=path)


def test_a_part_of_a_checkpoint_is_not_enough(base, tmp_path):
    config = config_of(base)
    config.init.select = 'encoder'
    with pytest.raises(UserError, match=r'lacks cls_token, .* config.lora.train'):
        train.train(config, tmp_path / 'run', devices=jax.devices()[:1])
    assert not (tmp_path / 'run').exists()
