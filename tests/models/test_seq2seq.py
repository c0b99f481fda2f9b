"""The Transformer: exact parameter counts, parity, dropout, mistakes."""

import functools
import math

import jax
import numpy as np
import pytest
from helpers import marian
from helpers.sequences import SOURCE, TARGET_IN, count, forward, perturbed, shapes

from vit_jax.errors import UserError
from vit_jax.models.seq2seq import VARIANTS, Model, variant
from vit_jax.nn.encoder_decoder import Embeddings
from vit_jax.nn.positions import sincos1d
from vit_jax.tree_paths import path_name

VOCAB = 23
TINY = {'vocab_size': VOCAB, 'width': 16, 'depth': 2, 'num_heads': 2, 'mlp_dim': 24}

# With 37,000 tokens in one matrix: those of the paper's table 3, exactly, and a smaller one.
COUNTS = {'tiny': 6_061_056, 'base': 63_082_496, 'big': 214_245_376}


@pytest.mark.slow
@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    assert count(shapes(Model(vocab_size=37_000, **variant(name)))) == COUNTS[name]


def test_every_variant_has_a_listed_count():
    assert set(COUNTS) == set(VARIANTS)


@pytest.mark.parametrize(
    ('fields', 'more'),
    [
        ({'norm': 'pre'}, 2 * 2 * 16),  # a final layer norm on both sides
        ({'tied': False}, 2 * VOCAB * 16),
        ({'positions': 'concatenated'}, 0),
    ],
)
def test_options_add_what_they_should(fields, more):
    assert count(shapes(Model(**TINY, **fields))) - count(shapes(Model(**TINY))) == more


def test_parameter_names():
    params = shapes(Model(**{**TINY, 'depth': 1}, norm='pre', tied=False))
    names = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def norm(name):
        return {f'{name}/scale': (16,), f'{name}/bias': (16,)}

    out = {'out/kernel': (2, 8, 16), 'out/bias': (16,)}
    self_attention = {'qkv/kernel': (16, 3, 2, 8), 'qkv/bias': (3, 2, 8), **out}
    cross = {
        'q/kernel': (16, 1, 2, 8),
        'q/bias': (1, 2, 8),
        'kv/kernel': (16, 2, 2, 8),
        'kv/bias': (2, 2, 8),
        **out,
    }
    block = {
        **{f'attention/{name}': shape for name, shape in self_attention.items()},
        **norm('attention_norm'),
        'mlp/fc1/kernel': (16, 24),
        'mlp/fc1/bias': (24,),
        'mlp/fc2/kernel': (24, 16),
        'mlp/fc2/bias': (16,),
        **norm('mlp_norm'),
    }
    decoder = block | norm('cross_norm') | {f'cross/{name}': s for name, s in cross.items()}
    assert names == {
        **{f'embed/{name}': (VOCAB, 16) for name in ('source', 'target', 'output')},
        **{f'encoder/block_0/{name}': shape for name, shape in block.items()},
        **norm('encoder/norm'),
        **{f'decoder/block_0/{name}': shape for name, shape in decoder.items()},
        **norm('decoder/norm'),
    }


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['post', 'pre'])
def test_parity_with_transformers(norm):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = Model(**TINY, norm=norm, positions='concatenated', activation='swish', norm_eps=1e-5)
    params = perturbed(model)
    fields = {
        f'{side}_{name}': value
        for side in ('encoder', 'decoder')
        for name, value in [('layers', 2), ('attention_heads', 2), ('ffn_dim', 24)]
    }
    tokens = {'pad_token_id': 0, 'eos_token_id': 2, 'decoder_start_token_id': 1}
    config, reference = {
        'post': (transformers.MarianConfig, transformers.MarianMTModel),
        'pre': (transformers.PegasusConfig, transformers.PegasusForConditionalGeneration),
    }[norm]
    reference = reference(
        config(
            vocab_size=VOCAB,
            d_model=16,
            max_position_embeddings=8,
            activation_function='swish',
            scale_embedding=True,
            attn_implementation='eager',
            forced_eos_token_id=None,
            **fields,
            **tokens,
        )
    )
    missing, unexpected = reference.load_state_dict(marian.state(params), strict=False)
    assert not unexpected
    assert all('embed_positions' in name or name == 'final_logits_bias' for name in missing)
    with torch.no_grad():
        expected = reference.eval()(
            torch.from_numpy(np.array(SOURCE)),
            attention_mask=torch.from_numpy(np.array(SOURCE != 0)),
            decoder_input_ids=torch.from_numpy(np.array(TARGET_IN)),
            output_attentions=True,
        )
    outputs, kept = forward(model, params, mutable='intermediates')
    np.testing.assert_allclose(outputs['logits'], expected.logits, atol=1e-5)
    real = np.asarray(SOURCE != 0)
    memory = expected.encoder_last_hidden_state.numpy()
    np.testing.assert_allclose(outputs['memory'][real], memory[real], atol=1e-5)
    sides = {
        ('encoder', 'attention'): expected.encoder_attentions,
        ('decoder', 'attention'): expected.decoder_attentions,
        ('decoder', 'cross'): expected.cross_attentions,
    }
    for (side, layer), attentions in sides.items():
        for i, attention in enumerate(attentions):
            (weights,) = kept['intermediates'][side][f'block_{i}'][layer]['attention']
            np.testing.assert_allclose(weights, attention, atol=1e-5)


def torch_state(params):
    """Tensors of a torch.nn.Transformer of one layer, by name."""
    import torch

    norms = {
        'encoder': {'attention_norm': 'norm1', 'mlp_norm': 'norm2'},
        'decoder': {'attention_norm': 'norm1', 'cross_norm': 'norm2', 'mlp_norm': 'norm3'},
    }
    arrays = {}

    def dense(name, kernel, bias):
        arrays.update({f'{name}.weight': np.asarray(kernel).T, f'{name}.bias': bias})

    def norm(name, p):
        arrays.update({f'{name}.weight': p['scale'], f'{name}.bias': p['bias']})

    def attention(name, p):
        kernel, bias = marian.projections(p)
        arrays[f'{name}.in_proj_weight'] = kernel.reshape(len(kernel), -1).T
        arrays[f'{name}.in_proj_bias'] = bias.reshape(-1)
        dense(f'{name}.out_proj', p['out']['kernel'].reshape(16, 16), p['out']['bias'])

    for side, names in norms.items():
        layer, block = f'{side}.layers.0', params[side]['block_0']
        for ours, theirs in names.items():
            norm(f'{layer}.{theirs}', block[ours])
        attention(f'{layer}.self_attn', block['attention'])
        if side == 'decoder':
            attention(f'{layer}.multihead_attn', block['cross'])
        dense(f'{layer}.linear1', **block['mlp']['fc1'])
        dense(f'{layer}.linear2', **block['mlp']['fc2'])
        if 'norm' in params[side]:
            norm(f'{side}.norm', params[side]['norm'])
    return {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('norm', ['post', pytest.param('pre', marks=pytest.mark.long)])
def test_parity_with_torch(norm):
    torch = pytest.importorskip('torch')
    model = Model(**TINY | {'depth': 1}, norm=norm, norm_eps=1e-5)
    params = perturbed(model)
    reference = torch.nn.Transformer(
        16, 2, 1, 1, 24, dropout=0.0, batch_first=True, norm_first=norm == 'pre'
    )
    if norm == 'post':  # torch has final layer norms always
        reference.encoder.norm = reference.decoder.norm = None
    reference.load_state_dict(torch_state(params), strict=True)
    table = np.asarray(params['embed']['shared'])

    def embed(tokens):
        x = table[tokens] * math.sqrt(16) + sincos1d(tokens.shape[1], 16)
        return torch.from_numpy(x.astype(np.float32))

    padding = torch.from_numpy(np.array(SOURCE == 0))
    with torch.no_grad():
        hidden = reference(
            embed(SOURCE),
            embed(TARGET_IN),
            tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
    logits = forward(model, params)['logits']
    np.testing.assert_allclose(logits, hidden.numpy() @ table.T, atol=1e-5)


@pytest.mark.slow
def test_dropout_falls_on_embeddings_and_on_every_branch():
    model = Model(**{**TINY, 'depth': 1}, dropout=0.5)
    kept = forward(
        model,
        perturbed(model),
        train=True,
        rngs={'dropout': jax.random.key(0)},
        capture_intermediates=lambda module, _: module.name == 'drop',
        mutable='intermediates',
    )[1]['intermediates']
    calls = {
        side: [*kept['drop']['__call__'], *kept[side]['block_0']['drop']['__call__']]
        for side in ('encoder', 'decoder')
    }
    # The embeddings' dropout is one module for both sides.
    assert {side: len(arrays) for side, arrays in calls.items()} == {'encoder': 4, 'decoder': 5}
    for arrays in calls.values():
        assert all(0.3 < (np.asarray(x) == 0).mean() < 0.7 for x in arrays)


def test_embeddings_start_with_variance_1_over_width():
    layer = Embeddings(4000, 16)
    init = jax.jit(functools.partial(layer.init, method='source'))
    variables = init(jax.random.key(0), np.array([0]))
    assert np.std(variables['params']['shared']) == pytest.approx(16**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'norm': 'past'}, r"unknown norm 'past'; .* 'post'"),
        ({'positions': 'learned'}, r"unknown positions 'learned'; .* 'interleaved'"),
        ({'activation': 'relu6'}, r"unknown activation 'relu6'; .* 'relu'"),
        ({'dtype': 'float8'}, "unknown dtype 'float8'"),
        ({'num_heads': 3}, r'width 16 .* num_heads 3'),
        ({'width': 15, 'num_heads': 5}, 'width.*15'),
        ({'depth': 0}, r'depth .* 1, not 0'),
        ({'dropout': 1.0}, r'dropout .* 0 .* 1, not 1.0'),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        shapes(Model(**{**TINY, **fields}))


def test_unknown_variant():
    with pytest.raises(UserError, match=r"'bas'.*'base'"):
        variant('bas')
