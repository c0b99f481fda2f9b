"""Stacks of attention maps, and models whose queries have no place in the image."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vit_jax.commands import attention as command
from vit_jax.config.run import Data
from vit_jax.errors import UserError
from vit_jax.inference.predict import batch_of_one, parameter_pictures, predict_with_attention
from vit_jax.models import base as models
from vit_jax.nn.maps import AttentionMap
from vit_jax.viz.attention_pictures import choose_stack, stack_weights


def attention_map(name, queries, keys, seed=0):
    rng, count = np.random.default_rng(seed), (1, 2, int(np.prod(queries)), int(np.prod(keys)))
    return AttentionMap(name, rng.dirichlet(np.ones(count[3]), count[:3]), queries, keys)


MAPS = [
    attention_map('encoder/stage_0/block_0', (4, 4), (4, 4)),
    attention_map('encoder/stage_0/block_1', (4, 4), (4, 4)),
    attention_map('encoder/stage_1/block_0', (2, 2), (2, 2)),
    attention_map('decoder/block_0', (5,), (5,)),
    attention_map('decoder/block_0/cross', (5,), (2, 2), seed=1),
    attention_map('decoder/block_1', (5,), (5,)),
    attention_map('decoder/block_1/cross', (5,), (2, 2), seed=2),
]


class Model(models.Model):
    """Offers the maps above whatever it sees."""

    def apply(self, variables, image, train, mutable, rngs):
        assert not train and mutable == ['intermediates'] and not rngs
        return {'sum': image.sum()}, {}

    def attention_maps(self, intermediates, image):
        assert image.shape == (1, 8, 8, 1)
        return MAPS


@pytest.fixture
def run():
    task = SimpleNamespace(rngs=(), attention_inputs=lambda apply, batch: (batch['image'],))
    names = {'model': SimpleNamespace(name='toy'), 'task': SimpleNamespace(name='classify')}
    return SimpleNamespace(
        model=Model(),
        task=task,
        settings=SimpleNamespace(**names),
        variables={},
        step=1,
        raw_images={'channels': 1, 'size': (8, 8)},
        data=Data(source='', split=''),
        class_names=(),
        vocab=None,
        takes_images=True,
    )


@pytest.mark.parametrize(
    ('pattern', 'names'),
    [
        ('', ['decoder/block_0/cross', 'decoder/block_1/cross']),
        ('decoder/block_0/cross', ['decoder/block_0/cross']),
        ('decoder/block_.$', ['decoder/block_0', 'decoder/block_1']),
        ('encoder', ['encoder/stage_1/block_0']),
        ('encoder/stage_0', ['encoder/stage_0/block_0', 'encoder/stage_0/block_1']),
    ],
)
def test_a_stack_has_layers_of_one_kind_and_size(pattern, names):
    assert [m.name for m in choose_stack(MAPS, pattern)] == names


def test_a_stack_that_is_not_there():
    with pytest.raises(UserError, match=r'encoder/stage/block'):
        choose_stack(MAPS, 'neck')


def test_the_maps_are_those_of_the_example(run):
    outputs, maps = predict_with_attention(
        run, batch_of_one({'image': np.ones((8, 8, 1), np.float32)})
    )
    assert outputs['sum'] == 64
    weights = stack_weights(choose_stack(maps))
    assert weights.shape == (2, 2, 5, 4)
    np.testing.assert_array_equal(weights[1], MAPS[-1].weights[0])


def test_a_decoder_is_drawn_query_by_query(run, tmp_path):
    Image.new('L', (8, 8)).save(tmp_path / 'a.png')

    def titles(*words):
        argv = ['RUN', '--out', 'a.png', *words, str(tmp_path / 'a.png')]
        figure, line = command.draw_image(run, command.make_parser(argv).parse_args(argv))
        return [title for axes in figure.axes if (title := axes.get_title())], line

    drawn, line = titles('--head', '1')
    assert drawn == ['input', 'mean of all queries', *(f'query {i}' for i in range(5))]
    assert line.startswith('2 layers x 2 heads, 2 x 2 patches; ')
    drawn, _ = titles('--query', '3')
    assert drawn[2:] == ['layer 0', 'layer 1', 'head 0', 'head 1']
    drawn, _ = titles('--map', 'encoder/stage_0', '--query', '3,3')
    assert drawn[:3] == ['input', 'layer 1, mean of heads', 'rollout']
    with pytest.raises(UserError, match=r'decoder/block_1.*attend'):
        titles('--map', 'decoder/block_1$')


def test_a_model_without_pictures_is_a_mistake():
    config = SimpleNamespace(model=SimpleNamespace(name='foo'))
    run = SimpleNamespace(model=models.Model(), params={}, image_size=None, settings=config)
    with pytest.raises(UserError, match=r"'foo'.*parameters"):
        parameter_pictures(run, '')
