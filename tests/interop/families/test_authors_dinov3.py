"""DINOv3 in its authors' names: theirs on top of transformers' computation."""

import re

import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_models import perturbed
from helpers.transformers_vit import ours

from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

WIDTH, HEADS, DEPTH, SIZE = 32, 2, 2, 12
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
# transformers' names, and those of facebookresearch/dinov3.
NAMES = {
    r'embeddings\.(cls_token|mask_token)': r'\1',
    r'embeddings\.register_tokens': 'storage_tokens',
    r'embeddings\.patch_embeddings': 'patch_embed.proj',
    r'(model\.)?layer\.(\d+)\.attention\.o_proj': r'blocks.\2.attn.proj',
    r'(model\.)?layer\.(\d+)\.attention': r'blocks.\2.attn',
    r'(model\.)?layer\.(\d+)\.layer_scale(\d)\.lambda1': r'blocks.\2.ls\3.gamma',
    r'(model\.)?layer\.(\d+)\.(norm\d)': r'blocks.\2.\3',
}


def reference(**fields):
    """A model whose periods are rounded to bfloat16, as by the authors' training."""
    fields |= {'hidden_act': 'silu'} if fields.get('use_gated_mlp') else {}
    shape = {'hidden_size': WIDTH, 'num_hidden_layers': DEPTH, 'num_attention_heads': HEADS}
    config = transformers.DINOv3ViTConfig(
        **{**shape, 'intermediate_size': 48, 'patch_size': 4, 'num_register_tokens': 3, **fields}
    )
    model = perturbed(transformers.DINOv3ViTModel(config))
    table = model.rope_embeddings.inv_freq
    table.copy_(1 / (1 / table).bfloat16().float())
    return model


def authors(model):
    """The arrays by the authors' names, with joined projections and masked biases of keys."""
    flat = {}
    mlp = {'up_proj': 'fc1', 'down_proj': 'fc2'}
    if model.config.use_gated_mlp:
        mlp = {'gate_proj': 'w1', 'up_proj': 'w2', 'down_proj': 'w3'}
    for name, tensor in model.state_dict().items():
        for old, new in NAMES.items():
            name = re.sub(f'^{old}', new, name)
        name = re.sub(r'^(?:model\.)?layer\.(\d+)\.mlp\.(\w+)', r'blocks.\1.mlp.\2', name)
        for old, new in mlp.items():
            name = name.replace(f'mlp.{old}.', f'mlp.{new}.')
        flat[name] = tensor.numpy()
    for i in range(DEPTH):
        block = f'blocks.{i}.attn'
        for leaf in ('weight', 'bias'):
            parts = [flat.pop(f'{block}.{part}_proj.{leaf}', None) for part in 'qkv']
            parts = [np.full(WIDTH, 7, np.float32) if part is None else part for part in parts]
            flat[f'{block}.qkv.{leaf}'] = np.concatenate(parts)
        flat[f'{block}.qkv.bias_mask'] = np.repeat(np.float32([1, 0, 1]), WIDTH)
    flat['mask_token'] = flat['mask_token'][0]
    flat['rope_embed.periods'] = (1 / model.rope_embeddings.inv_freq).bfloat16().float().numpy()
    return flat


@pytest.fixture(scope='module')
def flat():
    return authors(reference())


def read(folder, flat):
    files.write_safetensors(folder / 'dinov3.safetensors', flat)
    return interop.read(folder / 'dinov3.safetensors', image_size=(SIZE, SIZE))


@pytest.mark.parity
@pytest.mark.parametrize(
    'gated', [pytest.param(False, marks=pytest.mark.long), True], ids=['mlp', 'gated']
)
def test_tokens(gated, tmp_path, images):
    model, batch = reference(use_gated_mlp=gated), images(2, SIZE, SIZE, 3)
    imported = read(tmp_path, authors(model))
    assert imported.model_config['no_bias'] == 'key'
    assert imported.model_config['positions'] == (
        "rope_dinov3(theta=100.0, rescale=2.0, periods='bfloat16')"
    )
    assert ['ImageNet' in note for note in imported.notes] == [True]
    pixels = ((np.asarray(batch) + 1) / 2 - MEAN) / STD
    with torch.no_grad():
        outputs = model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32)))
    expected = outputs.last_hidden_state.numpy()
    found, scale = ours(imported, batch), np.abs(expected).max()
    np.testing.assert_allclose(found['tokens'], expected, atol=1e-5 * scale, rtol=0)
    np.testing.assert_allclose(found['pre_logits'], outputs.pooler_output, atol=1e-5 * scale)


@pytest.mark.parametrize('gated', [False, True])
def test_what_is_read_is_written_again(gated, flat, tmp_path):
    """Bit for bit if it is the same model, else without what is masked or unused."""
    flat = authors(reference(use_gated_mlp=gated)) if gated else flat
    imported = read(tmp_path, flat | {'local_cls_norm.bias': np.ones(WIDTH, np.float32)})
    place, again = tmp_path / 'dinov3.safetensors', tmp_path / 'again.safetensors'
    assert cli.main(['convert', str(place), f'authors_dinov3:{again}']) == 0
    stored, written = (files.read_stored(path)[0] for path in (place, again))
    assert stored.keys() == written.keys()
    for name, array in stored.items():
        assert array.tobytes() == written[name].tobytes() and array.dtype == written[name].dtype
    interop.write(anew(imported), f'authors_dinov3:{tmp_path}/new.safetensors')
    new, _ = files.read_stored(tmp_path / 'new.safetensors')
    assert {name: array.shape for name, array in new.items()} == {
        name: array.shape for name, array in flat.items()
    }
    for name, array in new.items():
        unused = name == 'mask_token'
        masked = flat[f'{name}_mask'] if name.endswith('qkv.bias') else 1
        np.testing.assert_array_equal(array, 0 * flat[name] if unused else masked * flat[name])


def test_mean_and_std_are_kept_beside_the_arrays(flat, tmp_path):
    colors = {'mean': (0.43, 0.411, 0.296), 'std': (0.213, 0.156, 0.143)}
    imported = read(tmp_path, flat)
    of_satellites = imported.with_groups(task=imported.task_config | colors)
    interop.write(of_satellites, f'authors_dinov3:{tmp_path}/new/new.safetensors')
    again = interop.read(tmp_path / 'new' / 'new.safetensors')
    assert again.task_config == of_satellites.task_config
    assert not any('ImageNet' in note for note in again.notes)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'cls_norm.bias': np.ones(WIDTH)}, 'cls_norm.bias'),
        (
            {'blocks.1.attn.qkv.bias_mask': np.full(3 * WIDTH, np.nan)},
            'blocks.1.attn.qkv.bias_mask',
        ),
        ({'rope_embed.periods': np.array([2.0, 3, 4, 5])}, 'powers.*number'),
        ({'rope_embed.periods': np.ones(3)}, '3 periods.*32'),
        ({'blocks.0.other': np.ones(3)}, 'called.*blocks.0.other'),
    ],
)
def test_other_models_are_refused(change, message, flat, tmp_path):
    with pytest.raises(UserError, match=message):
        read(tmp_path, flat | {name: array.astype(np.float32) for name, array in change.items()})


def test_models_that_the_authors_lack_are_not_written(flat, tmp_path):
    imported = read(tmp_path, flat)
    other = imported.with_groups(model=imported.model_config | {'pool': 'gap'})
    with pytest.raises(UserError, match=r"DINOv3 .* 'gap'"):
        interop.write(other, f'authors_dinov3:{tmp_path}/new.safetensors')
