"""RF-DETR: exact sizes, windows, and what an image without room for all queries gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.interop.adapt import adapt
from vit_jax.models import rf_detr
from vit_jax.models.rf_detr import Model, WindowCut

SIZE = {
    **{'num_classes': 3, 'patch_size': 4, 'width': 16, 'depth': 3, 'mlp_dim': 24, 'num_heads': 2},
    **{'maps': (1, 3), 'windows': 2, 'num_queries': 5, 'groups': 3, 'decoder_width': 32},
    **{'decoder_depth': 1, 'decoder_heads': 2, 'cross_heads': 4, 'decoder_mlp_dim': 16},
}
MODEL = Model(**SIZE)


def shapes(model, size=(32, 32)):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    return flatten_dict(params, sep='/')


# Of transformers' models, without parameters that outputs do not depend on; the paper has 30.5,
# 32.1 and 33.7 million (table 1). Images have the authors' sizes, B's those of its positions.
TOTALS = {'N': (384, 30_466_914), 'S': (512, 32_110_786), 'M': (576, 33_687_074)}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.long] * (name != 'N')) for name in TOTALS]
)
def test_exact_parameter_counts(name):
    side, total = TOTALS[name]
    model = Model(num_classes=91, **rf_detr.variant(name), block={'layer_scale': 1e-5})
    assert sum(x.size for x in shapes(model, (side, side)).values()) == total


def test_what_is_cut_into_windows_can_be_joined():
    """Also where the grid is not square, and each window has the tokens before the patches."""
    cut = WindowCut((4, 6), 2, 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 25, 2)), jnp.float32)
    windows = cut.cut(x)
    assert windows.shape == (12, 7, 2)
    for i in range(4):
        np.testing.assert_array_equal(windows[i::4, 0], x[:, 0])
    np.testing.assert_array_equal(windows[1, 1:4], x[0, 4:7])  # the second half of the first row
    np.testing.assert_array_equal(cut.join(windows), x)
    np.testing.assert_array_equal(cut.join(windows.reshape(3, 28, 2)), x)
    with pytest.raises(UserError, match='windows'):
        WindowCut((4, 6), 4, 1).cut(x)


@pytest.mark.parametrize(
    'change',
    [
        *({'maps': (2, 1)}, {'maps': (1, 2)}, {'cross': {'heads': 3}}),
        *({'sampling': 'other'}, {'masks': {'stride': 5}}, {'neck': {'scales': (2.0, 3.0)}}),
        {'masks': {'stride': 4}, 'neck': {'scales': (2.0, 0.5)}},
    ],
)
def test_fields_that_do_not_fit_are_refused(change):
    with pytest.raises(UserError, match=next(iter(change))):
        Model(**{**SIZE, **change})


def test_a_new_number_of_classes_renews_all_heads_of_classes():
    old, new = shapes(MODEL), shapes(MODEL.clone(num_classes=4))
    heads = {name for name in old if old[name].shape != new[name].shape}
    assert len(heads) == 2 * (1 + 3) and all('class_embed' in name for name in heads)
    arrays = {name: np.zeros(x.shape, np.float32) for name, x in old.items()}
    fitted, notes = adapt(
        unflatten_dict(arrays, sep='/'), unflatten_dict(new, sep='/'), MODEL.clone(num_classes=4)
    )
    assert set(flatten_dict(fitted, sep='/')) == old.keys() - heads
    assert any('3 classes are replaced by 4' in note for note in notes)


def test_small_images_have_as_many_queries_as_patches():
    images = jnp.zeros((1, 8, 8, 3))
    found = jax.eval_shape(
        lambda: MODEL.apply(MODEL.init(jax.random.key(0), images), images, train=True)
    )
    assert found['logits'].shape == (1, 3 * 4, 3) and found['first_boxes'].shape == (1, 3, 4, 4)
    assert found['aux_boxes'].shape == (1, 0, 12, 4)


def test_attention_to_several_maps_is_shown_on_the_patches():
    model, images = MODEL.clone(neck={'scales': (2.0, 0.5)}), jnp.zeros((1, 24, 24, 3))

    def weights():
        variables = model.init(jax.random.key(0), images)
        _, kept = model.apply(variables, images, mutable='intermediates')
        return [each.weights for each in model.attention_maps(kept['intermediates'], images)]

    assert [x.shape for x in jax.eval_shape(weights)] == [(1, 2, 5, 5), (1, 4, 5, 36)]
