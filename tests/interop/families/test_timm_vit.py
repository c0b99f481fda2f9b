"""ViTs of timm: its names on top of transformers' computation, and its attention pooling."""

import functools
import re
from importlib import resources

import numpy as np
import pytest
from helpers import timm_architectures, transformers_vit
from helpers.messages import mentions
from helpers.transformers_models import theirs
from helpers.transformers_vit import ours

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')
pytest.importorskip('safetensors')

WIDTH, HEADS, DEPTH = 16, 4, 2
CONFIG = {'architecture': 'vit_small', 'model_args': {'num_heads': HEADS}}
# transformers' names, version 5, and timm's.
NAMES = {
    r'vit\.embeddings\.cls_token': 'cls_token',
    r'vit\.embeddings\.position_embeddings': 'pos_embed',
    r'vit\.embeddings\.patch_embeddings\.projection': 'patch_embed.proj',
    r'vit\.layers\.(\d+)\.layernorm_before': r'blocks.\1.norm1',
    r'vit\.layers\.(\d+)\.attention\.o_proj': r'blocks.\1.attn.proj',
    r'vit\.layers\.(\d+)\.attention\.(q|k|v)_proj': r'blocks.\1.attn.\2',
    r'vit\.layers\.(\d+)\.layernorm_after': r'blocks.\1.norm2',
    r'vit\.layers\.(\d+)\.mlp': r'blocks.\1.mlp',
    r'vit\.layernorm': 'norm',
    r'classifier': 'head',
}


def reference(**fields):
    return transformers_vit.reference(layer_norm_eps=1e-6, **fields)


def timm_state(model):
    """Arrays by timm's names, with queries, keys and values in one projection."""
    flat = {}
    for name, tensor in model.state_dict().items():
        for old, new in NAMES.items():
            name = re.sub(f'^{old}', new, name)
        flat[name] = tensor.numpy()
    for i in range(DEPTH):
        for leaf in ('weight', 'bias'):
            parts = [flat.pop(f'blocks.{i}.attn.{part}.{leaf}', None) for part in 'qkv']
            if parts[0] is not None:
                flat[f'blocks.{i}.attn.qkv.{leaf}'] = np.concatenate(parts)
    return flat


def read(tmp_path, flat, config=CONFIG):
    files.write_safetensors(tmp_path, flat, config)
    return interop.read(tmp_path)


@pytest.mark.parametrize('qkv_bias', [True, False])
def test_logits(qkv_bias, tmp_path, images):
    model, batch = reference(qkv_bias=qkv_bias), images(2, 12, 12, 3)
    flat = timm_state(model)
    assert ('blocks.1.attn.qkv.bias' in flat) == qkv_bias
    imported = read(tmp_path, flat)
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=1e-5
    )
    assert imported.image_size == (12, 12)
    assert (imported.source, imported.model_config['gelu'], imported.model_config['norm_eps']) == (
        'timm ViT',
        'erf',
        1e-6,
    )


def test_images_of_another_size(tmp_path):
    """Positions are resized by antialiased interpolation, as in timm's `resample_abs_pos_embed`."""
    model = reference()
    imported = read(tmp_path, timm_state(model))
    _, variables = vit_jax.load(tmp_path, image_size=(8, 20))
    table = variables['params']['pos_embed']
    grid = torch.from_numpy(imported.params['pos_embed'][:, 1:]).reshape(1, 3, 3, WIDTH)
    expected = torch.nn.functional.interpolate(
        grid.permute(0, 3, 1, 2), size=(2, 5), mode='bicubic', antialias=True
    )
    np.testing.assert_allclose(
        table[0, 1:], expected.permute(0, 2, 3, 1).reshape(10, WIDTH), atol=1e-5
    )


def test_layer_scale_stays(tmp_path, images):
    model, batch = reference(), images(2, 12, 12, 3)
    flat, gammas = timm_state(model), np.random.default_rng(0).normal(size=(DEPTH, 2, WIDTH))
    scaled = {}
    for i in range(DEPTH):
        for scale, layer in enumerate((f'blocks.{i}.attn.proj', f'blocks.{i}.mlp.fc2')):
            gamma = gammas[i, scale].astype(np.float32)
            scaled[f'blocks.{i}.ls{scale + 1}.gamma'] = gamma
            # The same function with the scale apart.
            for leaf in ('weight', 'bias'):
                scaled[f'{layer}.{leaf}'] = (flat[f'{layer}.{leaf}'].T / gamma).T
    imported = read(tmp_path, flat | scaled)
    assert imported.model.block.layer_scale is not None
    np.testing.assert_array_equal(
        imported.params['encoder']['block_1']['layer_scale2'], scaled['blocks.1.ls2.gamma']
    )
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=2e-5
    )


@pytest.mark.parametrize('said', [True, False])
def test_a_class_token_without_a_position(said, tmp_path, images):
    model, batch = reference(), images(2, 12, 12, 3)
    with torch.no_grad():
        model.vit.embeddings.position_embeddings[:, 0] = 0
    flat = timm_state(model)
    flat['pos_embed'] = flat['pos_embed'][:, 1:]
    arguments = {'num_heads': HEADS} | ({'no_embed_class': True} if said else {})
    imported = read(tmp_path, flat, {'model_args': arguments})
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=1e-5
    )


def test_images_are_in_the_range_of_all_models(tmp_path, images):
    """x in [-1, 1] here is (x + 1) / 2 in [0, 1], of which timm subtracts the mean of ImageNet."""
    model, batch = reference(), images(2, 12, 12, 3)
    colors = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}
    imported = read(tmp_path, timm_state(model), CONFIG | {'pretrained_cfg': colors})
    normalized = ((batch + 1) / 2 - np.array(colors['mean'])) / np.array(colors['std'])
    expected = theirs(model, np.asarray(normalized, np.float32)).logits
    np.testing.assert_allclose(ours(imported, batch)['logits'], expected, atol=5e-5)


def test_mean_over_tokens(tmp_path, images, perturbed):
    """A model without a class token and with its norm before the mean."""
    flat = timm_state(reference())
    del flat['cls_token']
    flat['pos_embed'] = flat['pos_embed'][:, 1:]
    imported = read(tmp_path, flat, CONFIG | {'global_pool': 'avg'})
    outputs = ours(imported, images(2, 12, 12, 3))
    assert imported.model_config['pool'] == 'gap'
    mean = outputs['tokens'].mean(1) @ flat['head.weight'].T + flat['head.bias']
    np.testing.assert_allclose(outputs['logits'], mean, atol=1e-5)


def test_attention_pooling(tmp_path, images):
    flat = timm_state(reference())
    rng = np.random.default_rng(0)
    shapes = {
        'latent': (1, 1, WIDTH),
        'q.weight': (WIDTH, WIDTH),
        'q.bias': (WIDTH,),
        'kv.weight': (2 * WIDTH, WIDTH),
        'kv.bias': (2 * WIDTH,),
        'proj.weight': (WIDTH, WIDTH),
        'proj.bias': (WIDTH,),
        'norm.weight': (WIDTH,),
        'norm.bias': (WIDTH,),
        'mlp.fc1.weight': (24, WIDTH),
        'mlp.fc1.bias': (24,),
        'mlp.fc2.weight': (WIDTH, 24),
        'mlp.fc2.bias': (WIDTH,),
    }
    pool = {name: 0.3 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    del flat['cls_token']
    flat['pos_embed'] = flat['pos_embed'][:, 1:]
    imported = read(tmp_path, flat | {f'attn_pool.{name}': array for name, array in pool.items()})
    assert imported.model_config['pool'] == 'map'
    outputs = ours(imported, images(2, 12, 12, 3))

    p = {name: torch.from_numpy(array) for name, array in pool.items()}
    tokens = torch.from_numpy(np.array(outputs['tokens'])).transpose(0, 1)
    x, _ = torch.nn.functional.multi_head_attention_forward(
        p['latent'].expand(1, 2, -1),
        tokens,
        tokens,
        WIDTH,
        HEADS,
        torch.cat([p['q.weight'], p['kv.weight']]),
        torch.cat([p['q.bias'], p['kv.bias']]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=p['proj.weight'],
        out_proj_bias=p['proj.bias'],
    )
    y = torch.nn.functional.layer_norm(x, (WIDTH,), p['norm.weight'], p['norm.bias'], 1e-6)
    y = torch.nn.functional.gelu(y @ p['mlp.fc1.weight'].T + p['mlp.fc1.bias'])
    x = (x + y @ p['mlp.fc2.weight'].T + p['mlp.fc2.bias'])[0]
    np.testing.assert_allclose(outputs['pre_logits'], x, atol=1e-5)


@pytest.mark.parametrize(
    ('config', 'gelu'),
    [
        ({}, 'erf'),
        ({'architecture': 'vit_base_patch16_siglip_224'}, 'erf'),
        ({'architecture': 'vit_base_patch32_siglip_256.v2_webli'}, 'tanh'),
        ({'architecture': 'vit_small', 'model_args': {'act_layer': 'gelu_tanh'}}, 'tanh'),
    ],
)
def test_which_gelu(config, gelu, tmp_path):
    small = {'num_heads': HEADS, 'global_pool': 'token', 'class_token': True}
    config = {**config, 'model_args': {**small, **config.get('model_args', {})}}
    assert read(tmp_path, timm_state(reference()), config).model_config['gelu'] == gelu


@pytest.mark.parametrize(
    ('architecture', 'words'),
    [
        ('vit_base_patch16_18x2_224', "block_fn is 'ParallelThingsBlock'"),
        ('vit_dlittle_patch16_reg1_gap_256', "attn_layer is 'diff'"),
        ('test_vit3', 'pool_include_prefix is True'),
        ('vit_relpos_base_patch16_224', 'relative positions'),
        ('samvit_base_patch16', 'windows'),
        ('naflexvit_base_patch16_gap', r'does .* embeds.proj.weight .* NaFlexViT'),
    ],
)
def test_architectures_that_have_the_same_names(architecture, words, tmp_path):
    with pytest.raises(UserError, match=words):
        read(tmp_path, timm_state(reference()), {'architecture': architecture})


def test_the_epsilon_is_that_of_the_architecture(tmp_path):
    config = {'architecture': 'beit3_base_patch16_224', 'model_args': {'num_heads': HEADS}}
    flat = {re.sub('^norm', 'fc_norm', k): v for k, v in timm_state(reference()).items()}
    assert read(tmp_path, flat, config).model_config['norm_eps'] == 1e-5


def test_an_unknown_architecture_is_noted(tmp_path):
    (note, _) = read(tmp_path, timm_state(reference())).notes
    assert mentions(note, "'vit_small'", 'ViT') and '4 heads' in note


def test_the_table_of_architectures_is_that_of_timm():
    pytest.importorskip('timm')
    table = resources.files('vit_jax.interop.families') / 'timm_architectures.json'
    assert timm_architectures.text() == table.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('architecture', 'heads'),
    [
        ('vit_tiny_patch16_224', 3),
        ('vit_base_patch16_gap_224', 16),
        ('vit_large_patch16_224.x', 16),
    ],
)
def test_heads_are_those_of_the_architecture(architecture, heads, tmp_path, images):
    """Whatever the width: timm changes the one and keeps the other."""
    model, batch = reference(hidden_size=48, num_attention_heads=heads), images(1, 12, 12, 3)
    config = {'architecture': architecture, 'model_args': {'embed_dim': 48}, 'global_pool': 'token'}
    imported = read(tmp_path, timm_state(model), config)
    assert imported.model_config['num_heads'] == heads
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=2e-5
    )


def last_tokens(model, batch):
    """Those of the patches, before the final norm, whose arrays come with them."""
    body = functools.partial(model.vit, output_hidden_states=True)
    hidden = theirs(body, batch).hidden_states[-1]
    return hidden[:, 1:], (model.vit.layernorm.weight, model.vit.layernorm.bias)


@pytest.mark.parametrize('norm', ['norm', 'fc_norm'])
def test_mean_beside_a_class_token(norm, tmp_path, images):
    """`fc_norm` is timm's usual form, and that in which MAE's authors fine-tune."""
    model, batch = reference(), images(2, 12, 12, 3)
    patches, affine = last_tokens(model, batch)
    normed = torch.nn.functional.layer_norm
    with torch.no_grad():
        if norm == 'norm':
            mean = normed(patches, (WIDTH,), *affine, eps=1e-6).mean(1)
        else:
            mean = normed(patches.mean(1), (WIDTH,), *affine, eps=1e-6)
        expected = model.classifier(mean)
    flat = {re.sub('^norm', norm, name): array for name, array in timm_state(model).items()}
    imported = read(tmp_path, flat, CONFIG | {'global_pool': 'avg'})
    assert imported.model_config['pool'] == 'patches'
    assert imported.model_config['fc_norm'] == (norm == 'fc_norm')
    np.testing.assert_allclose(ours(imported, batch)['logits'], expected, atol=1e-5)


MISTAKES = {
    'norm after the mean': (
        {'fc_norm.weight': np.ones(WIDTH)},
        {},
        'norm.weight .* is unknown|fc_norm.bias',
    ),
    'unknown': ({'blocks.0.attn.rel.weight': np.ones(4)}, {}, r'no part called blocks\.0\.attn'),
    'inner norm': (
        {'blocks.0.attn.norm.weight': np.ones(WIDTH)},
        {},
        r'blocks\.0\.attn\.norm\.bias .* is missing',
    ),
    'patch norm': ({'patch_embed.norm.weight': np.ones(WIDTH)}, {}, 'a norm of the embedded patch'),
    'pooled token': ({'attn_pool.latent': np.ones((1, 1, WIDTH))}, {}, 'attention pooling'),
    'distilled': ({'dist_token': np.ones((1, 1, WIDTH))}, {}, r'head_dist\.bias .* is missing'),
    'absent': ({'blocks.1.mlp.fc1.bias': None}, {}, r'blocks\.1\.mlp\.fc1\.bias \(.*\) is missing'),
    'thirds': (
        {'blocks.1.attn.qkv.weight': np.ones((47, 16))},
        {},
        r'cannot have shape \(47, 16\)',
    ),
    'scale': (
        {'blocks.1.ls1.gamma': np.ones(3)},
        {},
        r'blocks\.1\.ls1\.gamma has shape \(3,\) instead',
    ),
    'activation': (
        {},
        {'model_args': {'num_heads': HEADS, 'act_layer': 'relu'}},
        "act_layer 'relu'",
    ),
    'pool': (
        {},
        {'global_pool': 'map'},
        "global_pool 'map' of a model with a class token is not supported",
    ),
    'largest': ({'cls_token': None}, {'global_pool': 'max'}, "global_pool 'max' .* no class token"),
    'both': ({}, {'model_args': {'num_heads': 4, 'global_pool': 'avgmax'}}, "global_pool 'avgmax'"),
    'none': ({'cls_token': None}, {'global_pool': ''}, "global_pool ''"),
    'odd': ({}, {'global_pool': ['avg']}, 'global_pool'),
    'token': (
        {'cls_token': None},
        {'global_pool': 'token'},
        "global_pool 'token' .* no class token",
    ),
    'architecture': ({}, {'architecture': 'vit_own', 'model_args': {}}, "heads of a 'vit_own'"),
    'positions': ({'pos_embed': None}, {}, 'pos_embed is not in the file'),
    'one scale': (
        {'blocks.1.ls1.gamma': np.ones(WIDTH)},
        {},
        r'blocks\.0\.ls1\.gamma \(16,\) is missing',
    ),
    'heads': ({}, {'model_args': {}}, r'number of attention heads .* config\.json'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_mistakes(mistake, tmp_path):
    arrays, config, words = MISTAKES[mistake]
    flat = {k: v for k, v in (timm_state(reference()) | arrays).items() if v is not None}
    if 'cls_token' not in flat and 'pos_embed' in flat:
        flat['pos_embed'] = flat['pos_embed'][:, 1:]
    with pytest.raises(UserError, match=words) as error:
        read(tmp_path, flat, CONFIG | config)
    assert '\n' not in str(error.value)


def test_a_mistake_is_one_line_of_the_command(tmp_path, capsys):
    config = CONFIG | {'global_pool': 'max'}
    files.write_safetensors(tmp_path, timm_state(reference()), config)
    assert cli.main(['convert', str(tmp_path), str(tmp_path / 'out.npz')]) == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and "global_pool 'max'" in message
    assert not (tmp_path / 'out.npz').exists()


@pytest.mark.slow
@pytest.mark.parametrize('told', [{'img_size': [8, 20]}, {'no_embed_class': True}])
def test_positions_of_patches_that_are_no_square(told, tmp_path, images):
    """2 x 5 patches are no class token and 3 x 3 patches."""
    model, batch = reference(image_size=(8, 20)), images(2, 8, 20, 3)
    with torch.no_grad():
        model.vit.embeddings.position_embeddings[:, 0] = 0
    flat = timm_state(model)
    flat['pos_embed'] = flat['pos_embed'][:, 1:]
    config = {'model_args': {'num_heads': HEADS, **told}}
    files.write_safetensors(tmp_path, flat, config)
    imported = interop.read(tmp_path, image_size=(8, 20))
    assert imported.image_size == (8, 20)
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=1e-5
    )
