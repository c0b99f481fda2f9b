"""Where models look: one form for images and text, every layer once, in order."""

import dataclasses
import functools
from operator import itemgetter

import jax
import numpy as np
import pytest
from helpers.pictures import drawn, images_like
from helpers.sequences import SOURCE, TARGET_IN, perturbed

from vit_jax.models import bit_resnet, hybrid, rnn_seq2seq, seq2seq, vit
from vit_jax.nn.maps import collect

DEPTH = 11  # so that block_10 follows block_9 and not block_1
VIT = vit.Model(patch_size=3, width=8, depth=DEPTH, mlp_dim=8, num_heads=2)
HYBRID = hybrid.Model(layers=(), width=8, depth=2, mlp_dim=8, num_heads=2)
TRANSFORMER = seq2seq.Model(vocab_size=23, width=16, depth=2, num_heads=2, mlp_dim=24)
LSTM = rnn_seq2seq.Model(vocab_size=17, width=6, embed_dim=5)


def maps(model, variables, *inputs):
    apply = jax.jit(lambda v: model.apply(v, *inputs, mutable='intermediates'))
    return model.attention_maps(apply(variables)[1]['intermediates'], *inputs)


@functools.cache
def image_maps(model, *shape):
    """The maps, for images of this shape, of the model with the parameters of the scanned one."""
    images = images_like(*shape)
    params = drawn(model.clone(scan=True, remat=False), images)
    # Large enough for tokens to be looked at differently.
    variables = {'params': jax.tree.map(lambda x: 3 * np.asarray(x), params)}
    if not model.scan:  # the same parameters, a block at a time
        encoder = variables['params']['encoder']
        blocks = encoder.pop('blocks')
        for i in range(model.depth):
            encoder[f'block_{i}'] = jax.tree.map(itemgetter(i), blocks)
    return maps(model, variables, images)


@pytest.mark.slow
@pytest.mark.parametrize(('pool', 'prefix'), [('cls', 1), ('gap', 0), ('map', 0)])
def test_an_image_is_a_grid_after_its_class_token(pool, prefix):
    found = image_maps(dataclasses.replace(VIT, pool=pool, scan=True), 2, 6, 9, 3)
    assert [each.name for each in found] == [f'encoder/block_{i}' for i in range(DEPTH)]
    for each in found:
        assert each.query_grid == each.key_grid == (2, 3)
        assert each.weights.shape == (2, 2, prefix + 6, prefix + 6)
        np.testing.assert_allclose(np.asarray(each.weights).sum(-1), 1, atol=1e-6)
        assert np.ptp(each.weights) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('options', [{'scan': True}, {'scan': True, 'remat': True}])
def test_scanned_layers_come_in_the_same_order(options):
    unrolled = image_maps(VIT, 2, 6, 9, 3)
    assert not np.allclose(unrolled[2].weights, unrolled[10].weights, atol=1e-3)
    scanned = image_maps(dataclasses.replace(VIT, **options), 2, 6, 9, 3)
    for a, b in zip(scanned, unrolled, strict=True):
        assert a.name == b.name
        np.testing.assert_allclose(a.weights, b.weights, atol=1e-5)


@pytest.mark.slow
def test_the_grid_of_a_hybrid_is_that_of_its_feature_map():
    found = image_maps(HYBRID, 2, 8, 12, 3)
    assert [each.name for each in found] == ['encoder/block_0', 'encoder/block_1']
    assert {(each.query_grid, each.key_grid) for each in found} == {((2, 3), (2, 3))}
    assert found[0].weights.shape == (2, 2, 7, 7)


@pytest.mark.slow
def test_a_translation_has_three_kinds_of_attention():
    found = maps(TRANSFORMER, {'params': perturbed(TRANSFORMER)}, SOURCE, TARGET_IN)
    assert [(each.name, each.query_grid, each.key_grid) for each in found] == [
        ('encoder/block_0', (6,), (6,)),
        ('encoder/block_1', (6,), (6,)),
        ('decoder/block_0', (5,), (5,)),
        ('decoder/block_1', (5,), (5,)),
        ('decoder/block_0/cross', (5,), (6,)),
        ('decoder/block_1/cross', (5,), (6,)),
    ]
    padding = np.asarray(SOURCE) == 0
    for name, queries, keys, weights in (
        (each.name, *each.query_grid, *each.key_grid, np.asarray(each.weights)) for each in found
    ):
        assert weights.shape == (3, 2, queries, keys)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
        unseen = np.triu(np.ones((5, 5), bool), 1) if keys == 5 else padding[:, None, None]
        assert not weights[np.broadcast_to(unseen, weights.shape)].any(), name


@pytest.mark.slow
@pytest.mark.parametrize('attention', rnn_seq2seq.ATTENTIONS)
def test_the_lstm_has_one_alignment(attention):
    model = dataclasses.replace(LSTM, attention=attention)
    (found,) = maps(model, {'params': perturbed(model)}, SOURCE, TARGET_IN)
    assert (found.name, found.query_grid, found.key_grid) == ('decoder/cross', (5,), (6,))
    assert found.weights.shape == (3, 1, 5, 6)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-6)


def test_a_convolutional_network_offers_none():
    assert not bit_resnet.Model().attends and vit.Model().attends


def test_a_stack_may_lie_deep_and_have_layers_of_other_names():
    weights = np.full((1, 1, 2, 3), 1 / 3)
    kept = {'stages': {'stage_1': {'block_0': {'look': {'attention': (weights,)}}}}}
    (found,) = collect(kept, 'stages/stage_1', (2,), (3,), 'look')
    assert found.name == 'stages/stage_1/block_0/look'
    np.testing.assert_array_equal(found.weights, weights)


def test_a_call_that_kept_nothing_is_a_mistake():
    with pytest.raises(ValueError, match='encoder'):
        VIT.attention_maps({}, images_like(1, 6, 9, 3))
