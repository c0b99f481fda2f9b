"""ViT: exact parameter counts, parity with transformers, dtypes, initial values, mistakes."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import precision
from helpers.pictures import count, images_like, shapes, spec

from vit_jax.errors import UserError
from vit_jax.models.vit import VARIANTS, Model, variant
from vit_jax.nn.blocks import Block
from vit_jax.nn.options import POOLS, nested_fields
from vit_jax.tree_paths import path_name

TINY = {'patch_size': 4, 'width': 16, 'depth': 2, 'mlp_dim': 32, 'num_heads': 2}

# With a class token, 1000 classes and images of 224 x 224. Those of Ti to H are the counts of
# google-research/vision_transformer, the others follow from the closed form.
COUNTS = {
    'mu/16': 76_712,
    'Ti/16': 5_717_416,
    'S/16': 22_050_664,
    'S/32': 22_878_952,
    'M/16': 38_837_736,
    'B/8': 86_576_872,
    'B/16': 86_567_656,
    'B/32': 88_224_232,
    'L/16': 304_326_632,
    'L/32': 306_535_400,
    'So400m/14': 413_597_656,
    'H/14': 632_045_800,
    'g/14': 1_012_611_432,
    'g-opt/16': 1_136_286_184,
    'G/14': 1_844_440_680,
    'G-opt/14': 1_664_842_216,
    'e/14': 3_807_214_312,
}


def perturbed(model, images):
    """Parameters none of which is at its initial zero or one, so that each of them shows."""
    tree = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(1)

    def draw(path, p):
        name = path[-1].key
        deviation = 0.1 if name in ('bias', 'scale') else model.width**-0.5
        return np.float32(name == 'scale') + deviation * rng.standard_normal(p.shape, np.float32)

    return jax.tree_util.tree_map_with_path(draw, tree)


def closed_form(model):
    """Parameters at 224 x 224."""
    width, mlp, pool = model.width, model.mlp_dim, model.pool.kind
    patches, pixels = (224 // model.patch_size) ** 2, model.patch_size**2 * 3
    norm, attention = 2 * width, 4 * (width * width + width)
    perceptron = 2 * width * mlp + mlp + width
    total = (pixels + 1) * width + model.depth * (2 * norm + attention + perceptron) + norm
    total += width * (pool == 'cls')
    total += (patches + (pool == 'cls')) * width * (model.positions.embed == 'learn')
    total += (width + attention + norm + perceptron) * (pool == 'map')
    features = model.head.representation_size or width
    total += (width + 1) * features * (features != width)
    return total + (features + 1) * (model.num_classes or 0)


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    assert closed_form(Model(num_classes=1000, **variant(name))) == COUNTS[name]


@pytest.mark.parametrize(
    'name',
    [x if x == 'So400m/14' else pytest.param(x, marks=pytest.mark.long) for x in COUNTS],
)
def test_models_have_the_parameters_of_the_closed_form(name):
    # Scanned, so that the deepest is traced as quickly as the shallowest.
    assert count(shapes(Model(num_classes=1000, scan=True, **variant(name)))) == COUNTS[name]


def test_unrolled_model_has_as_many_parameters():
    assert count(shapes(Model(num_classes=1000, **variant('Ti/16')))) == COUNTS['Ti/16']


def test_every_shape_has_a_listed_count():
    assert {name.split('/')[0] for name in COUNTS} == set(VARIANTS)


@pytest.mark.parametrize(
    'fields',
    [
        {'pool': 'gap'},
        {'pool': 'map'},
        {'pool': 'none'},
        {'posemb': 'sincos2d'},
        {'representation_size': 64},
        {'num_classes': 0},
    ],
)
def test_options_add_what_they_should(fields):
    model = Model(**{'num_classes': 1000, 'scan': True, **variant('Ti/16'), **fields})
    assert count(shapes(model)) == closed_form(model)


def test_parameter_names():
    params = shapes(Model(num_classes=7, representation_size=8, **TINY), (8, 12))
    names = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    block = {
        'norm1/scale': (16,),
        'norm1/bias': (16,),
        'attention/qkv/kernel': (16, 3, 2, 8),
        'attention/qkv/bias': (3, 2, 8),
        'attention/out/kernel': (2, 8, 16),
        'attention/out/bias': (16,),
        'norm2/scale': (16,),
        'norm2/bias': (16,),
        'mlp/fc1/kernel': (16, 32),
        'mlp/fc1/bias': (32,),
        'mlp/fc2/kernel': (32, 16),
        'mlp/fc2/bias': (16,),
    }
    assert names == {
        'patch_embed/kernel': (4, 4, 3, 16),
        'patch_embed/bias': (16,),
        'cls_token': (1, 1, 16),
        'pos_embed': (1, 7, 16),
        **{f'encoder/block_{i}/{name}': shape for i in (0, 1) for name, shape in block.items()},
        'encoder/norm/scale': (16,),
        'encoder/norm/bias': (16,),
        'pre_logits/kernel': (16, 8),
        'pre_logits/bias': (8,),
        'head/kernel': (8, 7),
        'head/bias': (7,),
    }


def hf_state(params):
    """Our parameters under the names and in the layouts of transformers."""
    import torch

    def tensor(x):
        return torch.from_numpy(np.array(x))

    def dense(name, p):
        kernel, bias = np.asarray(p['kernel']), np.asarray(p['bias'])
        return {f'{name}.weight': tensor(kernel.T), f'{name}.bias': tensor(bias)}

    def norm(name, p):
        return {f'{name}.weight': tensor(p['scale']), f'{name}.bias': tensor(p['bias'])}

    patch, encoder = params['patch_embed'], params['encoder']
    state = {
        'vit.embeddings.cls_token': tensor(params['cls_token']),
        'vit.embeddings.position_embeddings': tensor(params['pos_embed']),
        'vit.embeddings.patch_embeddings.projection.weight': tensor(
            np.asarray(patch['kernel']).transpose(3, 2, 0, 1)
        ),
        'vit.embeddings.patch_embeddings.projection.bias': tensor(patch['bias']),
        **norm('vit.layernorm', encoder['norm']),
        **dense('classifier', params['head']),
    }
    for name, block in encoder.items():
        if not name.startswith('block_'):
            continue
        layer, attention = f'vit.layers.{name[6:]}', block['attention']
        width = attention['out']['kernel'].shape[-1]
        for i, projection in enumerate('qkv'):
            kernel = attention['qkv']['kernel'][:, i].reshape(width, width)
            bias = attention['qkv']['bias'][i].reshape(width)
            p = {'kernel': kernel, 'bias': bias}
            state |= dense(f'{layer}.attention.{projection}_proj', p)
        out = {'kernel': attention['out']['kernel'].reshape(width, width)}
        state |= dense(f'{layer}.attention.o_proj', out | {'bias': attention['out']['bias']})
        state |= norm(f'{layer}.layernorm_before', block['norm1'])
        state |= norm(f'{layer}.layernorm_after', block['norm2'])
        state |= dense(f'{layer}.mlp.fc1', block['mlp']['fc1'])
        state |= dense(f'{layer}.mlp.fc2', block['mlp']['fc2'])
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ('shape', 'size', 'batch'),
    [
        pytest.param({**variant('B/16'), 'depth': 2}, (224, 224), 1),
        pytest.param({**TINY, 'patch_size': 8}, (24, 40), 3, marks=pytest.mark.parity),
    ],
    ids=['two blocks of B/16', 'not square'],
)
def test_parity_with_transformers(shape, size, batch):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = Model(num_classes=1000, gelu='erf', norm_eps=1e-12, **shape)
    images = images_like(batch, *size, 3)
    params = perturbed(model, images)
    config = transformers.ViTConfig(
        image_size=size,
        patch_size=model.patch_size,
        hidden_size=model.width,
        num_hidden_layers=model.depth,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_dim,
        num_labels=1000,
        attn_implementation='eager',
    )
    with torch.device('meta'):
        reference = transformers.ViTForImageClassification(config)
    reference.load_state_dict(hf_state(params), strict=True, assign=True)
    with torch.no_grad():
        expected = reference.eval()(
            torch.from_numpy(np.array(images).transpose(0, 3, 1, 2)),
            output_attentions=True,
        )
    with jax.default_matmul_precision('highest'):
        apply = jax.jit(lambda p, x: model.apply({'params': p}, x, mutable='intermediates'))
        outputs, kept = apply(params, images)
    np.testing.assert_allclose(outputs['logits'], expected.logits, atol=1e-5)
    for i in range(model.depth):
        (weights,) = kept['intermediates']['encoder'][f'block_{i}']['attention']['attention']
        np.testing.assert_allclose(weights, expected.attentions[i], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('pool', 'posemb'), list(zip(POOLS, itertools.cycle(['sincos2d', 'learn']), strict=False))
)
def test_outputs_and_gradients_of_every_pooling(pool, posemb):
    features = 16 if pool == 'distilled' else 8
    fields = {**TINY, 'depth': 1, 'representation_size': 8 if features == 8 else None}
    model = Model(num_classes=5, pool=pool, posemb=posemb, **fields)
    images = images_like(2, 8, 12, 3)
    params = perturbed(model, images)

    def loss(params):
        outputs = model.apply({'params': params}, images)
        return (outputs['logits'] ** 2).sum(), outputs

    grads, outputs = jax.jit(jax.grad(loss, has_aux=True))(params)
    tokens = 6 + {'gap': 0, 'map': 0, 'none': 0, 'distilled': 2}.get(pool, 1)
    per_token = (tokens,) if pool == 'none' else ()
    assert outputs['tokens'].shape == (2, tokens, 16)
    assert outputs['pre_logits'].shape == (2, *per_token, features)
    assert outputs['logits'].shape == (2, *per_token, 5)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_pooling_takes_the_tokens_it_names():
    images = images_like(2, 8, 8, 3)
    picks = {
        'cls': lambda t: t[:, 0],
        'gap': lambda t: t.mean(1),
        'patches': lambda t: t[:, 1:].mean(1),
    }
    for pool, pick in picks.items():
        model = Model(pool=pool, **TINY | {'depth': 1})
        apply = jax.jit(model.apply)
        outputs = jax.device_get(apply({'params': perturbed(model, images)}, images))
        assert 'logits' not in outputs
        np.testing.assert_allclose(outputs['pre_logits'], pick(outputs['tokens']), atol=1e-6)


@pytest.mark.parametrize('pool', ['gap', 'patches'])
def test_the_final_norm_may_come_after_the_mean(pool):
    model = Model(pool=pool, fc_norm=True, num_classes=5, **{**TINY, 'depth': 1})
    images = images_like(2, 8, 8, 3)
    params = perturbed(model, images)
    usual = shapes(model.clone(fc_norm=False), (8, 8))
    norm = usual['encoder'].pop('norm')
    assert shapes(model, (8, 8)) == usual | {'fc_norm': norm}
    outputs = jax.jit(model.apply)({'params': params}, images)
    mean = np.asarray(outputs['tokens'])[:, int(pool == 'patches') :].mean(1)
    normed = (mean - mean.mean(-1, keepdims=True)) / np.sqrt(mean.var(-1, keepdims=True) + 1e-6)
    expected = normed * params['fc_norm']['scale'] + params['fc_norm']['bias']
    np.testing.assert_allclose(outputs['pre_logits'], expected, atol=1e-5)


@pytest.mark.slow
def test_the_norm_before_the_head_takes_mean_and_deviation_of_the_batch():
    """Those of the batch in training, which the averages in `batch_stats` follow."""
    model = Model(num_classes=5, head_norm='batch', **{**TINY, 'depth': 1})
    images = images_like(4, 8, 8, 3)
    assert shapes(model, (8, 8)) == shapes(model.clone(head_norm='none'), (8, 8))
    params = perturbed(model, images)
    head = params['head'] = {'kernel': np.asarray(images_like(16, 5)), 'bias': np.zeros(5)}
    initial = jax.jit(lambda key: model.init(key, images)['batch_stats'])(jax.random.key(0))
    variables = {'params': params, 'batch_stats': initial}
    train = jax.jit(lambda v: model.apply(v, images, train=True, mutable='batch_stats'))
    outputs, new = jax.device_get(train(variables))
    features = outputs['pre_logits']
    mean, variance = features.mean(0), features.var(0)
    normed = (features - mean) / np.sqrt(variance + 1e-6)
    np.testing.assert_allclose(outputs['logits'], normed @ head['kernel'], atol=1e-4)
    stats = new['batch_stats']['head_norm']
    np.testing.assert_allclose(stats['mean'], 0.1 * mean, atol=1e-6)
    np.testing.assert_allclose(stats['var'], 0.9 + 0.1 * variance, atol=1e-6)


@pytest.mark.slow
def test_fixed_positions_leave_the_class_token_alone():
    model = Model(posemb='sincos2d', **TINY | {'depth': 1})
    images = jnp.asarray(np.zeros((1, 8, 8, 3), np.float32))
    params = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), shapes(model, (8, 8)))
    capture = {'capture_intermediates': lambda module, _: module.name == 'Dropout_0'}
    apply = jax.jit(
        lambda p: model.apply({'params': p}, images, **capture, mutable='intermediates')
    )
    kept = apply(params)[1]
    (embedded,) = kept['intermediates']['Dropout_0']['__call__']
    np.testing.assert_array_equal(embedded[0, 0], np.zeros(16))
    # cos 0 = 1: the first patch sits at the origin.
    np.testing.assert_array_equal(embedded[0, 1], [0, 0, 0, 0, 1, 1, 1, 1] * 2)


@pytest.mark.slow
def test_scanned_model_equals_the_unrolled_one():
    unrolled = Model(num_classes=5, **TINY)
    images = images_like(2, 8, 8, 3)
    params = perturbed(unrolled, images)
    encoder = params['encoder']
    blocks = jax.tree.map(lambda *p: np.stack(p), encoder['block_0'], encoder['block_1'])
    stacked = {**params, 'encoder': {'blocks': blocks, 'norm': encoder['norm']}}
    expected = jax.jit(unrolled.apply)({'params': params}, images)['logits']
    for fields in ({'scan': True}, {'scan': True, 'remat': True}):
        scanned = dataclasses.replace(unrolled, **fields)
        found = jax.jit(scanned.apply)({'params': stacked}, images)['logits']
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_computes_close_to_float32_with_float32_parameters():
    images = images_like(2, 8, 8, 3)
    full = Model(num_classes=5, **TINY)
    half = dataclasses.replace(full, dtype='bfloat16')
    initial = shapes(half, (8, 8))
    assert {leaf.dtype for leaf in jax.tree.leaves(initial)} == {jnp.dtype('float32')}
    params = perturbed(full, images)
    expected = jax.jit(full.apply)({'params': params}, images)['logits']
    apply = jax.jit(lambda p: half.apply({'params': p}, images, mutable='intermediates'))
    outputs, kept = apply(params)
    assert outputs['tokens'].dtype == jnp.bfloat16
    assert outputs['logits'].dtype == jnp.float32
    # bfloat16 has 8 bits: a relative error of 2^-8 at each of some ten roundings.
    error = np.abs(outputs['logits'] - expected).max() / np.abs(expected).max()
    assert 0 < error < 0.05
    (weights,) = kept['intermediates']['encoder']['block_1']['attention']['attention']
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize(('residual', 'sums'), [(None, 'bfloat16'), ('float32', 'float32')])
def test_the_residual_stream_has_the_dtype_asked_for(scan, residual, sums):
    model = Model(**TINY, scan=scan, dtype='bfloat16', residual_dtype=residual)
    params = {'params': shapes(model, (8, 8))}

    def call(params):
        is_block = lambda module, _: isinstance(module, Block)  # noqa: E731
        return model.apply(params, images_like(2, 8, 8, 3), capture_intermediates=is_block)

    outputs, kept = jax.eval_shape(call, params)
    found = jax.tree_util.tree_leaves_with_path(kept)
    dtypes = {x.dtype for path, x in found if '__call__' in path_name(path)}
    assert (dtypes, outputs['tokens'].dtype) == ({jnp.dtype(sums)}, jnp.bfloat16)


@pytest.mark.slow
def test_a_float32_residual_stream_rounds_the_sums_of_blocks_less():
    images = images_like(2, 8, 8, 3)
    full = Model(**TINY | {'depth': 8}, scan=True)
    half = dataclasses.replace(full, dtype='bfloat16')
    models = (full, half, dataclasses.replace(half, residual_dtype='float32'))

    @jax.jit
    def errors(params):
        truth, *found = (m.apply({'params': params}, images)['tokens'] for m in models)
        return [jnp.square(x - truth).mean() for x in found]

    of_half, of_mixed = map(float, errors(perturbed(full, images)))
    assert 0 < of_mixed < 0.9 * of_half


def test_layer_norm_is_float32_in_bfloat16():
    model = Model(dtype='bfloat16', **TINY)
    images = images_like(2, 8, 8, 3)
    params = perturbed(model, images)
    precision.assert_norms_have_float32_statistics(model, params, images, 2 * 2 + 1)


@pytest.mark.slow
def test_dropout_is_the_example_s_own_and_absent_in_evaluation():
    model = Model(num_classes=5, dropout=0.3, attention_dropout=0.3, drop_path=0.3, **TINY)
    images = jnp.asarray(np.tile(images_like(1, 8, 8, 3), (4, 1, 1, 1)))
    params = {'params': perturbed(model, images)}
    rngs = {'dropout': jax.random.key(0)}
    apply = jax.jit(lambda p, x: model.apply(p, x, train=True, rngs=rngs)['logits'])
    train, alone = jax.device_get((apply(params, images), apply(params, images[:2])))
    assert (train != train[:1]).any(axis=1)[1:].all()
    np.testing.assert_allclose(alone, train[:2], atol=1e-5)
    plain = dataclasses.replace(model, dropout=0.0, attention_dropout=0.0, drop_path=0.0)
    both = jax.jit(lambda p: [m.apply(p, images)['logits'] for m in (model, plain)])
    np.testing.assert_array_equal(*both(params))


@pytest.mark.slow
def test_initial_values():
    shape = {**TINY, 'width': 64, 'mlp_dim': 256, 'depth': 1}
    model = Model(num_classes=5, head_bias=-10.0, **shape)
    init = jax.jit(model.init_with_output)
    outputs, variables = jax.device_get(init(jax.random.key(0), images_like(2, 64, 64, 3)))
    params = variables['params']
    assert not np.asarray(params['cls_token']).any()
    assert not np.asarray(params['head']['kernel']).any()
    np.testing.assert_array_equal(params['head']['bias'], np.full(5, -10.0))
    assert np.std(params['pos_embed']) == pytest.approx(0.02, rel=0.03)
    # LeCun: variance 1 / (4 * 4 * 3).
    assert np.std(params['patch_embed']['kernel']) == pytest.approx(48**-0.5, rel=0.05)
    mlp = params['encoder']['block_0']['mlp']
    for layer in mlp.values():
        # Xavier: uniform of variance 2 / (64 + 256).
        assert np.std(layer['kernel']) == pytest.approx((2 / 320) ** 0.5, rel=0.02)
        assert 0 < np.std(layer['bias']) < 2e-6
    np.testing.assert_array_equal(outputs['logits'], np.full((2, 5), -10.0))


def test_variant_gives_keywords_of_the_model():
    assert variant('B/16') == {
        'patch_size': 16,
        'width': 768,
        'depth': 12,
        'mlp_dim': 3072,
        'num_heads': 12,
    }
    assert Model(**variant('B/16')) == Model()
    assert variant('So400m/14')['patch_size'] == 14


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('T/16', r"unknown ViT variant 'T'; .* 'Ti'"),
        ('B16', "unknown ViT variant 'B16'"),
        ('B', "'B'.*B/16"),
        ('B/0', "'B/0'.*patch"),
        ('B/16.5', 'patch.*size'),
    ],
)
def test_unknown_variants_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        variant(name)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'pool': 'mean'}, "pool.kind 'mean'"),
        (
            {'fc_norm': True},
            "pool.norm=True .*'gap' or 'patches', not 'cls'",
        ),
        ({'posemb': 'learned'}, r"positions.embed 'learned'; .* 'learn'"),
        ({'gelu': 'exact'}, "block.gelu 'exact'"),
        ({'residual_dtype': 'half'}, "block.residual_dtype 'half'"),
        ({'dtype': 'bf16'}, r"unknown dtype 'bf16'; .* 'bfloat16'"),
        ({'num_heads': 7}, r'width 768 .* num_heads 7'),
        ({'drop_path': 1.0}, r'drop_path .* 0 .* 1, not 1.0'),
        ({'attention_dropout': -0.1}, 'attention_dropout must be'),
    ],
)
def test_impossible_fields_are_refused_at_construction(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**fields)


def test_images_of_another_size_than_pos_embed_are_refused():
    model = Model(**TINY)
    variables = {'params': shapes(model, (8, 8))}
    with pytest.raises(UserError, match=r'pos_embed.*\b5\b.*\b7\b'):
        jax.eval_shape(model.apply, variables, spec(1, 8, 12, 3))
    with pytest.raises(UserError, match=r'10 x 8.*width'):
        jax.eval_shape(model.apply, variables, spec(1, 8, 10, 3))


def test_fixed_positions_take_images_of_any_size():
    model = Model(num_classes=5, posemb='sincos2d', **TINY)
    variables = {'params': shapes(model, (8, 8))}
    outputs = jax.eval_shape(model.apply, variables, spec(2, 12, 20, 3))
    assert outputs['tokens'].shape == (2, 16, 16)


def test_fields_are_hashable_and_survive_json():
    model = Model(num_classes=5, scan=True, **TINY)
    fields = nested_fields(model)
    text = json.dumps(fields)
    assert Model(**json.loads(text) | {'no_bias': fields['no_bias']}) == model
    assert len({model, Model(**fields)}) == 1
