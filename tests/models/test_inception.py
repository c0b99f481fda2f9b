"""Inception v3 of FID: features equal torch-fidelity's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import inception as files

import vit_jax
from vit_jax.errors import UserError
from vit_jax.inference.images import photo_reader
from vit_jax.inference.load import open_model
from vit_jax.models import inception


def run(path, size):
    """The outputs of a file's model for random images."""
    model, variables = vit_jax.load(path)
    return jax.jit(model.apply)(variables, jnp.asarray(files.photos(size) / 127.5 - 1, jnp.float32))


@pytest.mark.parity
@pytest.mark.parametrize('size', [(61, 40), pytest.param((32, 32), marks=pytest.mark.long)])
def test_features_equal_torch_fidelity(tmp_path, size):
    path = files.write(tmp_path / 'inception.pth', 1.0)
    params = vit_jax.load(path)[1]['params']
    # torchvision's count for 1,000 classes, and eight more.
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 23_834_568 + 8 * 2049
    with np.load(files.GOLDEN) as golden:
        outputs = run(path, size)
        for ours, theirs in (('pre_logits', 'features'), ('logits', 'logits')):
            expected = golden[f'{theirs} {size}']
            np.testing.assert_allclose(outputs[ours], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_images_keep_their_size(tmp_path):
    reader = photo_reader(open_model(files.write(tmp_path / 'inception.pth', 1 / 32)))
    for size in files.SIZES:
        assert reader.read(files.photos(size)[0]).image.shape == (*size, 3)


@pytest.mark.parametrize(('old', 'new'), [(2, 5), (7, 7), (9, 4)])
def test_resizing_samples_corners(old, new):
    """Output i is the input at i * old / new, between its neighbors."""
    x = np.random.default_rng(0).normal(size=(1, old, 1, 1)).astype(np.float32)
    place = np.minimum(np.arange(new) * old / new, old - 1)
    expected = np.interp(place, np.arange(old), x[0, :, 0, 0])
    resized = inception.resize(jnp.asarray(x), new)[0, :, 0, 0]
    np.testing.assert_allclose(resized, expected, atol=1e-6)


def test_too_small_a_size_is_refused():
    with pytest.raises(UserError, match='image_size=74'):
        inception.Model(image_size=74)
