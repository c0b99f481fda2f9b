"""The parts of later ViTs: counts of the published models, parity with transformers, mistakes."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says
from helpers.pictures import count, drawn, images_like, shapes, spec
from helpers.targets import runs_on
from helpers.torch_vits import images_for, load_into

from vit_jax.config import objects
from vit_jax.errors import UserError, modules
from vit_jax.models import (
    cappa,
    detr,
    jit,
    mae,
    naflex,
    open_clip,
    rf_detr,
    swin,
    tips,
    vit_factorized,
)
from vit_jax.models.vit import Model, variant
from vit_jax.nn import options
from vit_jax.nn.attention_choice import Target
from vit_jax.nn.blocks import Block, BlockOptions
from vit_jax.tree_paths import path_name

TINY = {'patch_size': 4, 'width': 16, 'depth': 2, 'mlp_dim': 24, 'num_heads': 2}
DINOV2 = {'gelu': 'erf', 'layer_scale': 1e-5}
DINOV2_REGISTERS = {**DINOV2, 'registers': 4}
DINOV2_GIANT = {**DINOV2, 'width': 1536, 'depth': 40, 'num_heads': 24}
DINOV2_GIANT |= {'mlp': 'swiglu', 'mlp_dim': 4096, 'patch_size': 14}
DINOV3 = {'gelu': 'erf', 'norm_eps': 1e-5, 'layer_scale': 1e-5, 'registers': 4, 'no_bias': 'key'}
DINOV3 |= {'posemb': 'none', 'positions': 'rope_dinov3(rescale=2.0)'}
MEAN = {'pool': 'patches', 'fc_norm': True}
# The MLP's width is that of the authors' code: two thirds of four times the width.
EVA02 = {**MEAN, 'positions': 'rope(reference=16)', 'no_bias': 'key', 'patch_size': 14}
EVA02_S = {**EVA02, 'width': 384, 'num_heads': 6, 'mlp_dim': 1024, 'mlp': 'swiglu'}
EVA02_B = {**EVA02, 'width': 768, 'mlp_dim': 2048, 'mlp': 'swiglu(norm=True)'}
BEIT = {**MEAN, 'gelu': 'erf', 'norm_eps': 1e-12, 'layer_scale': 0.1, 'no_bias': 'key'}
BEIT |= {'posemb': 'none', 'positions': 'relative'}
CLIP = {'gelu': 'quick', 'norm_eps': 1e-5, 'norm_pre': True, 'no_bias': 'patch_embed|head'}

SIZES = {'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'image_size': 8}
SIZES |= {'patch_size': 4, 'attn_implementation': 'eager'}

# Keywords, image size, and the parameters of the published model without head or mask token.
PUBLISHED = {
    'DINOv2 S/14': ({**variant('S/14'), **DINOV2}, 518, 22_056_192),
    'DINOv2 B/14': ({**variant('B/14'), **DINOV2}, 518, 86_579_712),
    'DINOv2 L/14': ({**variant('L/14'), **DINOV2}, 518, 304_367_616),
    'DINOv2 g/14': (DINOV2_GIANT, 518, 1_136_479_232),
    'DINOv2 S/14 with registers': ({**variant('S/14'), **DINOV2_REGISTERS}, 518, 22_057_728),
    'DINOv3 S/16': ({**variant('S/16'), **DINOV3}, 224, 21_596_160),
    'DINOv3 S+/16': ({**variant('S/16'), **DINOV3, 'mlp': 'swiglu'}, 224, 28_692_480),
    'DINOv3 B/16': ({**variant('B/16'), **DINOV3}, 224, 85_659_648),
    'DINOv3 L/16': ({**variant('L/16'), **DINOV3}, 224, 303_128_576),
    'EVA-02 S/14': (EVA02_S, 224, 21_621_120),
    'EVA-02 B/14': (EVA02_B, 224, 85_758_720),
    'BEiT B/16': ({**variant('B/16'), **BEIT, 'num_classes': 1000}, 224, 86_530_984),
    'DeiT B/16, distilled': (
        {**variant('B/16'), 'pool': 'distilled', 'num_classes': 1000},
        *(224, 87_338_192),
    ),
    'CLIP B/16': ({**variant('B/16'), **CLIP}, 224, 85_799_424),
    'CLIP B/16 with its projection': (
        {**variant('B/16'), **CLIP, 'num_classes': 512},
        *(224, 86_192_640),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PUBLISHED)
def test_published_models_have_their_number_of_parameters(name):
    fields, size, number = PUBLISHED[name]
    assert count(shapes(Model(**fields, scan=True), (size, size))) == number


def output_of(model, params, images, **options):
    with jax.default_matmul_precision('highest'):
        apply = jax.jit(functools.partial(model.apply, **options))
        return jax.device_get(apply({'params': params}, images))


DINO_NAMES = [
    (r'^(cls_token|mask_token|register_tokens)$', r'embeddings/\1'),
    (r'^pos_embed$', 'embeddings/position_embeddings'),
    (r'^patch_embed', 'embeddings/patch_embeddings/projection'),
    (r'^encoder/norm\b', 'layernorm'),
    (r'^encoder/block_(\d+)/', r'encoder/layer/\1/'),
    (r'/attention/out\b', '/attention/o_proj'),
    (r'/(layer_scale\d)$', r'/\1/lambda1'),
    (r'/mlp/gate\b', '/mlp/gate_proj'),
]
GATED = [(r'/mlp/fc1\b', '/mlp/up_proj'), (r'/mlp/fc2\b', '/mlp/down_proj')]


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('mlp', ['swiglu', pytest.param('mlp', marks=pytest.mark.long)])
def test_parity_with_dinov2_with_registers(mlp):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    fields = {**TINY, **DINOV2_REGISTERS, 'mlp_dim': 24 if mlp == 'swiglu' else 32}
    model = Model(**fields, mlp=mlp)
    images, masked = images_like(2, 8, 8, 3), jnp.array([[1, 0, 0, 1], [0, 0, 1, 0]], bool)
    # The parameter `mask_token` comes from initialization with masked patches.
    params = drawn(types.SimpleNamespace(init=functools.partial(model.init, masked=masked)), images)
    config = transformers.Dinov2WithRegistersConfig(
        **SIZES, mlp_ratio=2, use_swiglu_ffn=mlp == 'swiglu'
    )
    with torch.device('meta'):
        reference = transformers.Dinov2WithRegistersModel(config)
    names = DINO_NAMES + (GATED if mlp == 'swiglu' else [])
    load_into(reference, params, names, no_key=False)
    with torch.no_grad():
        expected = reference(images_for(images), bool_masked_pos=torch.from_numpy(np.array(masked)))
    found = output_of(model, params, images, masked=masked)['tokens']
    np.testing.assert_allclose(found, expected.last_hidden_state, atol=1e-5)


DINOV3_NAMES = [
    (r'^(cls_token|mask_token|register_tokens)$', r'embeddings/\1'),
    (r'^patch_embed', 'embeddings/patch_embeddings'),
    (r'^encoder/norm\b', 'norm'),
    (r'^encoder/block_(\d+)/', r'model/layer/\1/'),
    *DINO_NAMES[5:],
    *GATED,
]


@pytest.mark.slow
@pytest.mark.parity
def test_parity_with_dinov3():
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = Model(**TINY, **DINOV3, mlp='swiglu')
    images, masked = images_like(2, 8, 12, 3), jnp.arange(12).reshape(2, 6) % 4 == 1
    params = drawn(types.SimpleNamespace(init=functools.partial(model.init, masked=masked)), images)
    config = transformers.DINOv3ViTConfig(
        **SIZES, intermediate_size=24, use_gated_mlp=True, hidden_act='silu', num_register_tokens=4
    )
    with torch.device('meta'):
        reference = transformers.DINOv3ViTModel(config)
    reference.rope_embeddings = type(reference.rope_embeddings)(config)  # not stored
    load_into(reference, params, DINOV3_NAMES, no_key=True)
    with torch.no_grad():
        expected = reference(images_for(images), bool_masked_pos=torch.from_numpy(np.array(masked)))
    found = output_of(model, params, images, masked=masked)['tokens']
    np.testing.assert_allclose(found, expected.last_hidden_state, atol=1e-5)


CLIP_NAMES = [
    (r'^cls_token$', 'embeddings/class_embedding'),
    (r'^pos_embed$', 'embeddings/position_embedding/weight'),
    (r'^patch_embed', 'embeddings/patch_embedding'),
    (r'^norm_pre', 'pre_layrnorm'),
    (r'^encoder/norm\b', 'post_layernorm'),
    (r'^encoder/block_(\d+)/', r'encoder/layers/\1/'),
    (r'/attention/out\b', '/attention/out_proj'),
    (r'/attention/', '/self_attn/'),
    (r'/norm(\d)', r'/layer_norm\1'),
    (r'^(?!head)', 'vision_model/'),
    (r'^head', 'visual_projection'),
]


@pytest.mark.slow
@pytest.mark.parity
def test_parity_with_the_vision_tower_of_clip():
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = Model(**TINY, **CLIP, num_classes=5)
    images = images_like(2, 8, 8, 3)
    params = drawn(model, images)
    config = transformers.CLIPVisionConfig(**SIZES, intermediate_size=24, projection_dim=5)
    with torch.device('meta'):
        reference = transformers.CLIPVisionModelWithProjection(config)
    # A buffer that is not stored.
    places = torch.arange(5).expand((1, -1))
    reference.vision_model.embeddings.position_ids = places
    load_into(reference, params, CLIP_NAMES, no_key=False)
    with torch.no_grad():
        expected = reference(images_for(images)).image_embeds
    np.testing.assert_allclose(output_of(model, params, images)['logits'], expected, atol=1e-5)


LAYERS = [
    (r'^encoder/block_(\d+)/', r'layers/\1/'),
    (r'/attention/out\b', '/attention/o_proj'),
    (r'/norm1\b', '/layernorm_before'),
    (r'/norm2\b', '/layernorm_after'),
]
BEIT_NAMES = [
    (r'^cls_token$', 'embeddings/cls_token'),
    (r'^patch_embed', 'embeddings/patch_embeddings/projection'),
    (r'/layer_scale(\d)$', r'/lambda_\1'),
    *LAYERS,
    (r'^position_bias', 'shared_position_bias'),
    (r'/attention/position_bias', '/relative_position_bias'),
    (r'/table', '/relative_position_bias_table'),
    (r'^fc_norm', 'pooler/layernorm'),
    (r'^(?!head)', 'beit/'),
    (r'^head', 'classifier'),
]


def with_joined_tables(params):
    """The parameters with the biases of patches and of other tokens in one table [N H]."""
    if 'table' in params:
        table = np.asarray(params['table'])
        rows = np.concatenate([table.reshape(-1, table.shape[-1]), params['prefix']])
        return {'table': rows}
    each = params.items()
    return {k: with_joined_tables(v) if isinstance(v, dict) else v for k, v in each}


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('shared', [False, pytest.param(True, marks=pytest.mark.long)])
def test_parity_with_beit(shared):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    fields = {**TINY, **BEIT, 'positions': f'relative(shared={shared})', 'num_classes': 5}
    model, images = Model(**fields), images_like(2, 8, 8, 3)
    params = drawn(model, images)
    # Square images: transformers mixes rows and columns of the tables of others.
    config = transformers.BeitConfig(
        **SIZES,
        intermediate_size=24,
        use_relative_position_bias=not shared,
        use_shared_relative_position_bias=shared,
        num_labels=5,
    )
    with torch.device('meta'):
        reference = transformers.BeitForImageClassification(config)
    load_into(reference, with_joined_tables(params), BEIT_NAMES, no_key=True)
    with torch.no_grad():
        expected = reference(images_for(images)).logits
    np.testing.assert_allclose(output_of(model, params, images)['logits'], expected, atol=1e-5)


DEIT_NAMES = [
    (r'^dist_token$', 'distillation_token'),
    (r'^pos_embed$', 'position_embeddings'),
    (r'^(cls_token|distillation_token|position_embeddings)$', r'embeddings/\1'),
    (r'^patch_embed', 'embeddings/patch_embeddings/projection'),
    (r'^encoder/norm\b', 'layernorm'),
    *LAYERS,
    (r'^(?!head)', 'deit/'),
    (r'^head/distillation', 'distillation_classifier'),
    (r'^head', 'cls_classifier'),
]


@pytest.mark.slow
@pytest.mark.parity
def test_parity_with_distilled_deit():
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = Model(**TINY, pool='distilled', gelu='erf', norm_eps=1e-12, num_classes=5)
    images = images_like(2, 8, 8, 3)
    params = drawn(model, images)
    config = transformers.DeiTConfig(**SIZES, intermediate_size=24, num_labels=5)
    with torch.device('meta'):
        reference = transformers.DeiTForImageClassificationWithTeacher(config)
    load_into(reference, params, DEIT_NAMES, no_key=False)
    with torch.no_grad():
        expected = reference(images_for(images))
    found = output_of(model, params, images)
    names = {'cls_logits': 'class_logits', 'distillation_logits': 'distillation_logits'}
    for theirs, ours in {'logits': 'logits', **names}.items():
        np.testing.assert_allclose(found[ours], expected[theirs], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parity
def test_parity_of_post_norm_with_the_transformer_of_torch():
    torch = pytest.importorskip('torch')
    block = Block(2, 24, gelu='erf', norm_eps=1e-5, options=BlockOptions(norm_place='post'))
    x = images_like(2, 5, 16)
    params = drawn(block, x)
    reference = torch.nn.TransformerEncoderLayer(
        *(16, 2, 24), activation='gelu', batch_first=True, dtype=torch.float32
    )
    attention = params['attention']
    state = {
        'self_attn.in_proj_weight': attention['qkv']['kernel'].reshape(16, 48).T,
        'self_attn.in_proj_bias': attention['qkv']['bias'].ravel(),
        'self_attn.out_proj.weight': attention['out']['kernel'].reshape(16, 16).T,
        'self_attn.out_proj.bias': attention['out']['bias'],
    }
    for i in (1, 2):
        state[f'linear{i}.weight'] = params['mlp'][f'fc{i}']['kernel'].T
        state[f'linear{i}.bias'] = params['mlp'][f'fc{i}']['bias']
        state[f'norm{i}.weight'] = params[f'norm{i}']['scale']
        state[f'norm{i}.bias'] = params[f'norm{i}']['bias']
    reference.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in state.items()})
    with torch.no_grad():
        expected = reference.eval()(torch.from_numpy(np.array(x)))
    with jax.default_matmul_precision('highest'):
        found = jax.jit(block.apply)({'params': params}, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_residual_post_norm_is_on_the_branches():
    model = Model(**TINY | {'depth': 1}, norm_place='res_post', layer_scale=0.1)
    images = images_like(2, 8, 8, 3)
    params = drawn(model, images)
    apply = functools.partial(model.apply, capture_intermediates=True, mutable='intermediates')
    _, kept = jax.jit(apply)({'params': params}, images)
    (x,), encoder = kept['intermediates']['Dropout_0']['__call__'], kept['intermediates']['encoder']
    block, parameters = encoder['block_0'], params['encoder']['block_0']
    for i, layer in ((1, 'attention'), (2, 'mlp')):
        (branch,) = block[layer]['__call__']
        (normed,) = block[f'norm{i}']['__call__']
        centered = branch - branch.mean(-1, keepdims=True)
        unit = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        norm = parameters[f'norm{i}']
        np.testing.assert_allclose(normed, unit * norm['scale'] + norm['bias'], atol=1e-4)
        x = x + normed * parameters[f'layer_scale{i}']
    np.testing.assert_allclose(block['__call__'][0], x, atol=1e-5)


@pytest.mark.parametrize('fields', [{'norm_place': 'post'}, {'final_norm': False}])
def test_models_without_a_final_norm(fields):
    plain, without = leaves(Model(**TINY)), leaves(Model(**TINY, **fields))
    assert plain.keys() - without.keys() == {'encoder/norm/scale', 'encoder/norm/bias'}


def test_without_a_final_norm_tokens_are_those_of_the_last_block():
    model, images = Model(**TINY, final_norm=False), images_like(1, 8, 8, 3)
    params = drawn(model, images)
    apply = functools.partial(model.apply, capture_intermediates=True, mutable='intermediates')
    outputs, kept = jax.jit(apply)({'params': params}, images)
    (last,) = kept['intermediates']['encoder']['block_1']['__call__']
    np.testing.assert_array_equal(outputs['tokens'], last)


@pytest.mark.parametrize('fields', [{'scan': True}, {'positions': 'relative(shared=True)'}])
def test_relative_positions_are_resized_with_the_image(fields):
    model = Model(**{**TINY, 'posemb': 'none', 'positions': 'relative', **fields}, registers=1)
    params = jax.tree.map(lambda p: np.ones(p.shape, np.float32), shapes(model, (8, 8)))
    with pytest.raises(UserError, match=r'2 x 2.*3 x 2'):
        jax.eval_shape(model.apply, {'params': params}, spec(1, 8, 12, 3))
    resized, notes = model.resize_params(params, (8, 8), (8, 12))
    assert says(notes, 'position_bias', '3 x 2', 'bilinear')
    outputs = jax.eval_shape(model.apply, {'params': resized}, spec(1, 8, 12, 3))
    assert outputs['tokens'].shape == (1, 8, 16)
    assert model.resize_params(params, (8, 8), (8, 8)) == (params, [])


@pytest.mark.parametrize('shared', [False, True])
def test_the_kernel_is_not_for_biases(shared):
    images = jnp.zeros((2, 8, 8, 3))

    def call(attention):
        fields = {**TINY, 'positions': f'relative(shared={shared})'}
        model = Model(**fields, attention=attention)
        variables = jax.eval_shape(model.init, jax.random.key(0), images)
        with runs_on(Target('TPU v5 lite')):
            jax.eval_shape(model.apply, variables, images)

    call('auto')
    with pytest.raises(UserError, match=r'support.*biases') as caught:
        call('pallas')
    assert '\n' not in str(caught.value)


EVERYTHING = {
    **{'gelu': 'quick', 'norm_pre': True, 'mlp': 'swiglu(norm=True)', 'layer_scale': 0.1},
    **{'registers': 2, 'no_bias': 'key|patch_embed|mlp|norm|out|head', 'qk_norm': 'rms'},
    'positions': 'rope(reference=4)',
}


def test_layers_without_bias_have_none():
    model = Model(num_classes=3, pool='gap', fc_norm=True, **TINY, **EVERYTHING)
    biases = {path: leaf.shape for path, leaf in leaves(model).items() if path.endswith('/bias')}
    # Queries and values have a row each.
    expected = {f'encoder/block_{i}/attention/qkv/bias': (2, 2, 8) for i in range(2)}
    assert biases == expected
    bare = model.clone(no_bias=f'{EVERYTHING["no_bias"]}|query|value')
    assert not [path for path in leaves(bare) if path.endswith('/bias')]


def leaves(model):
    found = jax.tree_util.tree_leaves_with_path(shapes(model, (8, 8)))
    return {path_name(path): leaf for path, leaf in found}


def stacked(params):
    """The parameters of a scanned model."""
    encoder = dict(params['encoder'])
    blocks = [encoder.pop(f'block_{i}') for i in range(2)]
    return {
        **params,
        'encoder': {**encoder, 'blocks': jax.tree.map(lambda *p: np.stack(p), *blocks)},
    }


@pytest.mark.slow
def test_scanned_and_recomputed_models_equal_the_plain_one():
    model = Model(num_classes=5, **TINY, **EVERYTHING)
    images = images_like(2, 8, 8, 3)
    params = drawn(model, images)

    def loss(model, params):
        logits = model.apply({'params': params}, images)['logits']
        return (logits * np.arange(5)).sum(), logits

    def graded(model, params):
        return jax.jit(jax.value_and_grad(functools.partial(loss, model), has_aux=True))(params)

    (_, expected), grads = graded(model, params)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    for remat in ('names', True):
        scanned = model.clone(scan=True, remat=remat)
        (_, found), of_scanned = graded(scanned, stacked(params))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, of_scanned, stacked(grads))


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['gap', pytest.param('map', marks=pytest.mark.long)])
def test_padding_does_not_change_images_and_registers_are_not_pooled(pool):
    fields = {**TINY, **EVERYTHING, 'posemb': 'none', 'positions': 'rope'}
    model = Model(num_classes=5, pool=pool, **fields)
    images = images_like(1, 8, 8, 3)
    wide = jnp.pad(images, ((0, 0), (0, 4), (0, 0), (0, 0)), constant_values=3.0)
    params = drawn(model, images)
    mask = jnp.arange(6)[None] < 4
    plain = output_of(model, params, images)
    padded = output_of(model, params, wide, mask=mask)
    np.testing.assert_allclose(padded['logits'], plain['logits'], atol=1e-5)
    assert model.prefix_tokens == 2
    if pool == 'gap':
        mean = plain['tokens'][:, 2:].mean(axis=1)
        np.testing.assert_allclose(plain['pre_logits'], mean, atol=1e-6)


def test_registers_have_no_positions_and_come_after_the_class_token():
    model = Model(**TINY, registers=3)
    parameters = leaves(model)
    assert parameters['pos_embed'].shape == (1, 5, 16)
    assert parameters['register_tokens'].shape == (1, 3, 16)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes(model, (8, 8)))
    resized, notes = model.resize_params(params, (8, 8), (12, 12))
    assert resized['pos_embed'].shape == (1, 10, 16)
    assert len(notes) == 1
    outputs = jax.eval_shape(model.apply, {'params': params}, spec(1, 8, 8, 3))
    assert outputs['tokens'].shape == (1, 8, 16)


@pytest.mark.slow
def test_rms_norm_and_norms_of_queries_and_keys_by_their_definition():
    fields = {**TINY, 'depth': 1, 'norm': 'rms', 'qk_norm': 'rms', 'norm_eps': 1e-2}
    model, images = Model(**fields), images_like(2, 8, 8, 3)
    params = drawn(model, images)
    assert set(params['encoder']['norm']) == set(params['encoder']['block_0']['norm1']) == {'scale'}
    apply = functools.partial(model.apply, capture_intermediates=True, mutable='intermediates')
    _, kept = jax.jit(apply)({'params': params}, images)
    block, parameters = kept['intermediates']['encoder']['block_0'], params['encoder']['block_0']

    def rms(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * scale

    (x,) = kept['intermediates']['Dropout_0']['__call__']
    (normed,) = block['norm1']['__call__']
    np.testing.assert_allclose(normed, rms(x, parameters['norm1']['scale']), atol=1e-5)
    attention = parameters['attention']
    projected = np.einsum('bnd,dchk->cbhnk', normed, attention['qkv']['kernel'])
    q, k, _ = projected + np.asarray(attention['qkv']['bias'])[:, None, :, None]
    q, k = (rms(y, attention[f'{name}_norm']['scale']) for y, name in ((q, 'q'), (k, 'k')))
    weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(8))
    expected = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(block['attention']['attention'][0], expected, atol=1e-5)


@pytest.mark.slow
def test_places_change_in_training_alone():
    model = Model(num_classes=5, posemb='none', **TINY, positions='rope_dinov3(rescale=2.0)')
    images = images_like(2, 8, 8, 3)
    params = drawn(model, images)

    @jax.jit
    def train(key):
        rngs = {'dropout': key}
        return model.apply({'params': params}, images, train=True, rngs=rngs)['logits']

    plain = output_of(model, params, images)['logits']
    first, again, other = (train(jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-4
    assert np.abs(first - plain).max() > 1e-4


def test_learning_rates_by_layer_know_every_parameter():
    model = Model(num_classes=3, **TINY, **EVERYTHING)
    order = model.layer_order()
    unknown = [path for path in leaves(model) if not any(re.search(p, path) for p in order)]
    assert unknown == ['encoder/norm/scale', 'head/kernel']


def test_attention_maps_have_the_grid_of_the_patches():
    model = Model(**TINY, **EVERYTHING)
    images = images_like(1, 8, 12, 3)
    apply = functools.partial(model.apply, mutable='intermediates')
    _, kept = jax.eval_shape(apply, {'params': shapes(model, (8, 12))}, images)
    maps = model.attention_maps(kept['intermediates'], images)
    assert [(m.weights.shape, m.key_grid) for m in maps] == [((1, 2, 9, 9), (2, 3))] * 2


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'mlp': 'swigloo'}, r"block.mlp 'swigloo'; .* 'swiglu'"),
        ({'mlp': 'swiglu(norms=True)'}, r"block: .*'mlp_norms'; .* 'mlp_norm'"),
        ({'mlp': 'swiglu(norm=1)'}, r'mlp_norm .* 1'),
        ({'mlp': 'swiglu(True)'}, "call.*'name"),
        ({'mlp': 'swiglu(norm=open("a"))'}, 'call'),
        ({'mlp': ''}, "mlp='': write a name"),
        ({'norm_place': 'after'}, "block.norm_place 'after'"),
        ({'positions': 'relative(shared=1)'}, 'False.*1'),
        (
            {'pool': 'distilled', 'head_norm': 'batch'},
            'distilled.*representation_size',
        ),
        ({'norm': 'batch'}, "block.norm 'batch'"),
        ({'qk_norm': 'l2'}, "block.qk_norm 'l2'"),
        ({'positions': 'rotary'}, "positions.kind 'rotary'"),
        ({'positions': 'rope(base=1.0)'}, "positions.rope: .*'base'"),
        ({'positions': 'rope_dinov3(theta="1")'}, "100.0.*'1'"),
        ({'positions': 'rope', 'width': 12, 'num_heads': 2}, 'a multiple of 4 wide, not 6'),
        ({'no_bias': 'qkv'}, "no_bias.*'qkv'"),
        ({'registers': -1}, r'registers .* 0, not -1'),
    ],
)
def test_impossible_parts_are_refused_at_construction(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**fields)


# For each flat name of an earlier version: an old value, and the same in its group.
OLD_FORMS = {
    'pool': ('gap', {'pool': {'kind': 'gap'}}),
    'pool_heads': (1, {'pool': {'num_heads': 1}}),
    'pool_mlp_dim': (8, {'pool': {'mlp_dim': 8}}),
    'fc_norm': (False, {'pool': {'norm': False}}),
    'posemb': ('none', {'positions': {'embed': 'none'}}),
    'posemb_prefix': ('all', {'positions': {'prefix': 'all'}}),
    'posemb_std': (0.5, {'positions': {'std': 0.5}}),
    'positions': (
        'rope(reference=16, order="xy")',
        {'positions': {'kind': 'rope', 'rope': {'reference': 16, 'order': 'xy'}}},
    ),
    'representation_size': (8, {'head': {'representation_size': 8}}),
    'head_norm': ('batch', {'head': {'norm': 'batch'}}),
    'head_bias': (-2.0, {'head': {'bias': -2.0}}),
    'gelu': ('erf', {'block': {'gelu': 'erf'}}),
    'norm': ('rms', {'block': {'norm': 'rms'}}),
    'norm_eps': (1e-3, {'block': {'norm_eps': 1e-3}}),
    'norm_place': ('post', {'block': {'norm_place': 'post'}}),
    'norm_pre': (True, {'block': {'norm_pre': True}}),
    'final_norm': (False, {'block': {'final_norm': False}}),
    'qk_norm': ('rms', {'block': {'qk_norm': 'rms'}}),
    'inner_norm': (True, {'block': {'inner_norm': True}}),
    'mlp': ('swiglu(norm=True)', {'block': {'mlp': 'swiglu', 'mlp_norm': True}}),
    'layer_scale': (0.1, {'block': {'layer_scale': 0.1}}),
    'attention_dropout': (0.1, {'block': {'attention_dropout': 0.1}}),
    'drop_path': (0.2, {'block': {'drop_path': 0.2}}),
    'residual_dtype': ('bfloat16', {'block': {'residual_dtype': 'bfloat16'}}),
    'no_bias': ('query|mlp', {'no_bias': ('query', 'mlp')}),
}
# The same of other models.
OLD_FORMS_OF_OTHERS = {
    open_clip.Model: {
        **{'text_width': (36, 'texts.width'), 'text_depth': (1, 'texts.depth')},
        **{'text_mlp_dim': (8, 'texts.mlp_dim'), 'text_num_heads': (3, 'texts.num_heads')},
        **{'causal': (False, 'texts.causal'), 'eos': (7, 'texts.eos')},
        **{'init_scale': (2.0, 'logits.scale'), 'init_bias': (-1.0, 'logits.bias')},
        **{'pool': ('gap', 'pool.kind'), 'gelu': ('tanh', 'block.gelu')},
    },
    detr.Model: {
        **{'layers': ((1, 1), 'resnet.layers'), 'backbone_width': (8, 'resnet.width')},
        **{'backbone_norm': ('group', 'resnet.norm'), 'dilate': (True, 'resnet.dilate')},
        'frozen_stages': (2, 'resnet.frozen_stages'),
    },
    rf_detr.Model: {
        **{'cross_heads': (4, 'cross.heads'), 'points': (3, 'cross.points')},
        **{'sampling': ('product', 'cross.sampling'), 'mask_stride': (4, 'masks.stride')},
        **{'mask_mlp_dim': (8, 'masks.mlp_dim'), 'projector_blocks': (2, 'neck.blocks')},
        **{'projector_eps': (1e-3, 'neck.eps'), 'projector_norm': ('frozen', 'neck.norm')},
        'projector_scales': ((2.0, 0.5), 'neck.scales'),
    },
    tips.Model: {
        **{'text_norm_eps': (1e-3, 'texts.norm_eps'), 'text_scaled': (False, 'texts.scaled')},
    },
    mae.Model: {'residual_dtype': ('bfloat16', 'block.residual_dtype')},
    jit.Model: {'attention_dropout': (0.1, 'block.attention_dropout')},
    cappa.Model: {'norm_eps': (1e-3, 'block.norm_eps')},
    swin.Model: {'drop_path': (0.1, 'block.drop_path')},
}


def test_every_moved_field_is_tried():
    tried = {name for forms in OLD_FORMS_OF_OTHERS.values() for name in forms}
    assert tried | set(OLD_FORMS) == {*options.MOVED, 'no_bias'}


# Models that are a ViT and another part, whose fields stand beside the ViT's.
WITH_ANOTHER_PART = {'dinov2': 22, 'dpt': 24, 'pmt': 23, 'rf_detr': 27, 'vit_adaptors': 21}


@pytest.mark.parametrize('name', modules('vit_jax.models'))
def test_a_model_has_at_most_20_fields_at_the_top(name):
    assert len(options.defaults(objects.model_class(name))) <= WITH_ANOTHER_PART.get(name, 20)


@pytest.mark.parametrize(
    ('cls', 'name'), [(cls, name) for cls, forms in OLD_FORMS_OF_OTHERS.items() for name in forms]
)
def test_flat_names_of_other_models_make_the_same_model(cls, name):
    value, path = OLD_FORMS_OF_OTHERS[cls][name]
    group, key = path.split('.')
    old, new = cls(**{name: value}), cls(**{group: {key: value}})
    assert old == new != cls() and getattr(getattr(new, group), key) == value
    assert dataclasses.replace(cls(), **{name: value}) == new == cls().clone(**{name: value})
    flat = options.flat_fields(options.nested_fields(new))
    assert flat[name] == value and cls(**flat) == new


@pytest.mark.parametrize('name', OLD_FORMS)
def test_flat_names_of_earlier_versions_make_the_same_model(name):
    value, nested = OLD_FORMS[name]
    old, new = Model(**TINY, **{name: value}), Model(**TINY, **nested)
    assert old == new and hash(old) == hash(new)
    assert Model(**TINY).clone(**{name: value}) == new
    flat = options.flat_fields(options.nested_fields(new))
    assert flat[name] == (value.replace('"', "'") if name == 'positions' else value)
    assert Model(**flat) == new


def test_a_group_keeps_the_defaults_of_the_class():
    assert naflex.Model(**TINY, pool={'num_heads': 1}).pool.kind == 'map'
    assert vit_factorized.Model(**TINY, posemb_std=0.1).positions.prefix == 'none'


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'pool': {'kin': 'gap'}}, "'kin'.*'kind'"),
        ({'positions': {'rope': {'theta': 9.0}}}, "positions.rope .*positions.kind='none'"),
        ({'block': {'norm_eps': 'small'}}, "block.norm_eps .*'small'"),
    ],
)
def test_mistakes_in_groups(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**fields)
