"""CapPa against big_vision's model, exact sizes, cached steps, what parallel prediction sees."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import big_vision_cappa
from helpers.pictures import count, drawn

from vit_jax.errors import UserError
from vit_jax.models import cappa, vit
from vit_jax.models.cappa import Model
from vit_jax.ops import terms
from vit_jax.tasks.caption import Task

TINY = Model(
    **{'vocab_size': big_vision_cappa.VOCAB, 'length': big_vision_cappa.LENGTH, 'patch_size': 4},
    **{'width': 8, 'depth': 2, 'mlp_dim': 12, 'num_heads': 2, 'decoder_depth': 2},
)
GOLDEN = json.loads(big_vision_cappa.GOLDEN.read_text())
IMAGES, IDS = map(jnp.asarray, big_vision_cappa.inputs())
TARGET_IN = jnp.pad(IDS, ((0, 0), (1, 0)))[:, :-1]  # big_vision's captions begin with 0
ALL = jnp.ones(3, bool)


@pytest.fixture(scope='module')
def params():
    return drawn(TINY, IMAGES, TARGET_IN)


@pytest.fixture(scope='module')
def forward():
    return jax.jit(lambda params, *inputs: TINY.apply({'params': params}, *inputs))


@pytest.mark.parity
@pytest.mark.parametrize('parallel', [None, ALL], ids=['causal', 'parallel'])
@pytest.mark.parametrize('bias', [False, True], ids=['plain', 'biased'])
def test_logits_and_loss_are_those_of_big_vision(bias, parallel):
    stored = GOLDEN['biased' if bias else 'plain']
    params = big_vision_cappa.as_ours(big_vision_cappa.parameters(stored['shapes']))
    model = dataclasses.replace(TINY, decoder_bias=bias)
    found = jax.jit(model.apply)(
        {'params': unflatten_dict(params, sep='/')}, IMAGES, TARGET_IN, parallel
    )
    expected = stored['causal' if parallel is None else 'parallel']
    np.testing.assert_allclose(found['logits'], expected['logits'], atol=1e-5, rtol=1e-5)
    loss = terms.means(Task().loss(found, {'caption': IDS}))['loss']
    assert float(loss) == pytest.approx(expected['loss'], abs=1e-5)


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ('S/16', 'L/14')))
        for name in GOLDEN['counts']
    ],
)
def test_parameter_counts_are_those_of_big_vision(name):
    model = Model(vocab_size=32_000, scan=True, **cappa.variant(name))
    images, ids = jnp.zeros((1, 224, 224, 3)), jnp.zeros((1, 64), jnp.int32)
    made = jax.eval_shape(model.init, jax.random.key(0), images, ids)
    assert count(made) == GOLDEN['counts'][name]
    without = jax.eval_shape(model.clone(mask_token=False).init, jax.random.key(0), images, ids)
    assert count(made) - count(without) == model.width


@pytest.mark.slow
def test_steps_with_a_cache_equal_teacher_forcing(params, forward):
    expected = forward(params, IMAGES, TARGET_IN)['logits']
    apply = functools.partial(TINY.apply, {'params': params})

    @jax.jit
    def steps():
        cache = apply(apply(IMAGES, method='encode'), 5, method='init_cache')
        found = []
        for i in range(5):
            logits, cache = apply(cache, TARGET_IN[:, i], i, method='decode_step')
            found.append(logits)
        return jnp.stack(found, 1)

    np.testing.assert_allclose(steps(), expected, atol=1e-5)


def test_causal_tokens_see_those_before_and_parallel_ones_none(params, forward):
    other = TARGET_IN.at[:, 2].set(1)
    chosen = jnp.array([True, False, True])
    first, second = (
        np.asarray(forward(params, IMAGES, x, chosen)['logits']) for x in (TARGET_IN, other)
    )
    np.testing.assert_array_equal(first[[0, 2]], second[[0, 2]])
    np.testing.assert_array_equal(first[1, :2], second[1, :2])
    assert (first[1, 2:] != second[1, 2:]).any(-1).all()


def test_examples_of_both_kinds_in_a_batch_are_as_by_themselves(params, forward):
    mixed = forward(params, IMAGES, TARGET_IN, jnp.array([True, False, True]))['logits']
    parallel = forward(params, IMAGES, TARGET_IN, ALL)['logits']
    causal = forward(params, IMAGES, TARGET_IN)['logits']
    np.testing.assert_allclose(mixed[1], causal[1], atol=1e-5)
    np.testing.assert_allclose(mixed[::2], parallel[::2], atol=1e-5)


def test_it_encodes_images_as_the_vit_that_is_taken_from_it(params, forward):
    keywords, names = TINY.transferable()
    alone = vit.Model(**{k: v for k, v in keywords.items() if k != 'name'})
    part = {name: params[name] for name in names}
    found = jax.jit(alone.apply)({'params': part}, IMAGES)
    together = forward(params, IMAGES)
    assert keywords['name'] == 'vit' and together.keys() == found.keys() == {'tokens', 'pre_logits'}
    for name, array in found.items():
        np.testing.assert_allclose(together[name], array, atol=1e-6)
    shapes = jax.eval_shape(alone.init, jax.random.key(0), IMAGES)['params']
    assert flatten_dict(shapes).keys() == flatten_dict(part).keys()


def test_attention_maps_of_words_lie_on_the_image(params):
    look = jax.jit(functools.partial(TINY.apply, mutable=['intermediates']))
    for inputs, names in (
        ((IMAGES,), ['encoder/block_0', 'encoder/block_1']),
        ((IMAGES, TARGET_IN), ['decoder/block_0/cross', 'decoder/block_1/cross']),
    ):
        maps = TINY.attention_maps(look({'params': params}, *inputs)[1]['intermediates'], *inputs)
        assert [m.name for m in maps[-2:]] == names
    assert maps[-1].weights.shape == (3, 2, 5, 6)
    assert (maps[-1].query_grid, maps[-1].key_grid) == ((5,), (2, 3))
    np.testing.assert_allclose(np.triu(maps[2].weights[0, 0], 1), 0)


def test_positions_are_resized_with_the_images(params):
    larger, notes = TINY.resize_params(params, (8, 12), (16, 16))
    assert larger['pos_embed'].shape == (1, 16, 8) and notes
    assert larger['text_pos_embed'] is params['text_pos_embed']
    assert len(TINY.parameter_pictures(params, (8, 12))) == 2


@pytest.mark.parametrize(
    ('fields', 'inputs', 'words'),
    [
        ({'decoder_depth': 0}, (), r'decoder_depth .* 1, not 0'),
        ({'width': 9}, (), r'width 9 .* num_heads 2'),
        ({'length': 4}, (IMAGES, TARGET_IN), r'captions have 5 .* 4'),
        ({'mask_token': False}, (IMAGES, TARGET_IN, ALL), 'set config.task.parallel=0'),
    ],
)
def test_what_makes_no_model(fields, inputs, words):
    def make():
        return jax.eval_shape(TINY.clone(**fields).init, jax.random.key(0), *inputs)

    with pytest.raises(UserError, match=words):
        make()
