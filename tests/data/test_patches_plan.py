"""Sequences of patches: whole patches at the image's aspect ratio, batches of few lengths."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from vit_jax.config.run import Data
from vit_jax.data.dataset import open_dataset
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import parse_transforms
from vit_jax.data.transforms.image import cut_patches, grid_within
from vit_jax.errors import UserError
from vit_jax.ops.sequences import join_patches

DATA = {'source': 'digits:6-32', 'split': 'train[:40]', 'threads': 0}
PLAN = 'patches(patch_size=4, lengths=(4, 16, 36))'


def opened(batch_size=8, multiple=1, **options):
    data = Data(**DATA | {'plan': PLAN} | options)
    return open_dataset(data, batch_size, seed=3, multiple=multiple)


def taken(data, count, start=0):
    batches = data.train_batches(start)
    found = list(itertools.islice(batches, count))
    batches.close()
    return found


def test_the_grid_is_the_largest_of_the_aspect_ratio():
    rng = np.random.default_rng(0)
    for _ in range(200):
        height, width, most = (int(rng.integers(1, n)) for n in (400, 400, 300))
        scales = {Fraction(n, side) for side in (height, width) for n in range(1, most + 1)}
        grids = {s: (-(-s * height // 1), -(-s * width // 1)) for s in scales}
        best = max(s for s, (rows, columns) in grids.items() if rows * columns <= most)
        found = grid_within(height, width, most)
        assert found == grids[best]
        assert grid_within(7 * found[0], 7 * found[1], most) == found  # so it stays


@pytest.mark.parity
def test_the_grid_is_that_of_transformers():
    module = pytest.importorskip('transformers.models.siglip2.image_processing_pil_siglip2')
    rng = np.random.default_rng(0)
    for height, width in rng.integers(20, 2000, (200, 2)).tolist():
        for most in (128, 256, 1024):
            theirs = module.get_image_size_for_max_num_patches(height, width, 16, most)
            assert grid_within(height, width, most) == tuple(side // 16 for side in theirs)


def test_patches_are_cut_and_joined():
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    patches = cut_patches(image, 4)
    np.testing.assert_array_equal(patches[4].reshape(4, 4, 3), image[4:, 4:8])
    padded = np.pad(patches, ((0, 3), (0, 0)))
    np.testing.assert_array_equal(join_patches(padded, (2, 3)), image)


def test_batches_have_few_lengths_and_are_functions_of_their_numbers():
    data = opened()
    assert [shape.spec['patches'].shape for shape in data.shapes] == [(4, 16), (16, 16), (36, 16)]
    first = taken(data, 12)
    assert {batch['patches'].shape[1] for batch in first} == {4, 16, 36}
    for ours, again in zip(first[5:], taken(opened(), 7, start=5), strict=True):
        for name in ours:
            np.testing.assert_array_equal(ours[name], again[name])
    epoch = np.concatenate([batch['index'] for batch in first[:5]])
    assert sorted(epoch.tolist()) == list(range(40))


def test_rows_hold_their_images_and_zeros():
    data, source = opened(), open_source('digits:6-32', 'train[:40]')
    assert data.plan.unit == 'images'
    for batch in taken(data, 6):
        most = batch['patches'].shape[1]
        for i, index in enumerate(batch['index']):
            image = source[index]['image']
            rows, columns = batch['grid'][i]
            assert (rows, columns) == grid_within(*image.shape[:2], most)
            assert not batch['patches'][i, rows * columns :].any()
            shown = join_patches(batch['patches'][i], batch['grid'][i])
            assert shown.shape == (4 * rows, 4 * columns, 1)
            assert abs(shown.mean() - image.mean()) < 40
            assert batch['label'][i] == source[index]['label']


def test_batches_draw_the_size_of_their_patches():
    """As FlexiViT's, of images of one size, which are cut without resizing."""
    images = {'source': 'digits:24-24', 'plan': 'patches(patch_size=(12, 4), lengths=(4, 36))'}
    data, source = opened(**images), open_source('digits:24-24', 'train[:40]')
    assert [shape.spec['patches'].shape for shape in data.shapes] == [(4, 144), (36, 16)]
    found = taken(data, 8)
    assert {batch['patches'].shape[1:] for batch in found} == {(4, 144), (36, 16)}
    for batch in found:
        shown = [join_patches(*row) for row in zip(batch['patches'], batch['grid'], strict=True)]
        np.testing.assert_array_equal(shown, [source[i]['image'] for i in batch['index']])
    again = taken(opened(**images), 3, start=5)
    for ours, other in zip(found[5:], again, strict=True):
        np.testing.assert_array_equal(ours['patches'], other['patches'])


def test_evaluation_takes_the_last_length_and_every_image_once():
    batches = list(opened(batch_size=16, multiple=8).eval_batches())
    assert {batch['patches'].shape for batch in batches} == {(16, 36, 16)}
    index = np.concatenate([batch['index'][batch['mask'] == 1] for batch in batches])
    assert sorted(index.tolist()) == list(range(40))


def test_files_of_any_size_become_few_patches():
    fit = parse_transforms('fit_patches(4, 36)')
    for size in ((5, 300), (700, 410), (1, 1), (24, 24)):
        image = fit({'image': np.zeros((*size, 3), np.uint8)}, None)['image']
        assert tuple(side // 4 for side in image.shape[:2]) == grid_within(*size, 36)


def test_random_windows_keep_their_pixels():
    crop = parse_transforms('crop_area(10, 50, ratio=1.5)')
    image = np.random.default_rng(0).integers(0, 256, (40, 80, 3), np.uint8)
    for seed in range(20):
        window = crop({'image': image}, np.random.default_rng(seed))['image']
        height, width = window.shape[:2]
        assert 0.09 <= height * width / 3200 <= 0.55
        assert 1.2 <= width / height <= 3.2
        assert window.tobytes() != image[:height, :width].tobytes() or seed == 0


def test_digits_of_mixed_sizes():
    source = open_source('digits:6-32', 'train')
    sizes = np.array([source[i]['image'].shape[:2] for i in range(300)])
    assert sizes.min() == 6 and sizes.max() == 32
    np.testing.assert_array_equal(source[7]['image'], source[7]['image'])
    with pytest.raises(UserError, match=r"'digits:6-32'.*images"):
        open_source('digits:32-6', 'train')


@pytest.mark.parametrize(
    ('plan', 'message'),
    [
        ('patches(patch_size=0, lengths=(4,))', 'patch_size=0'),
        ('patches(patch_size=4, lengths=())', r'lengths=\(\)'),
        ('patches(patch_size=4, lengths=(16, 4))', 'lengths='),
        ('patches(patch_size=4, lengths=(8192,))', '4096'),
        ('patches(patch_size=4, lengths=64)', 'lengths=64'),
        ('patches(patch_size=(8, 4), lengths=(16,))', 'lengths='),
        ('patches(patch_size=(8, 0), lengths=(4, 16))', 'patch_size='),
        ('patches(patch_size=4)', "missing a required .*'lengths'"),
    ],
)
def test_impossible_plans_are_refused(plan, message):
    with pytest.raises(UserError, match=message) as error:
        opened(plan=plan)
    assert '\n' not in str(error.value)


def test_data_without_images_are_refused(tmp_path):
    pairs = tmp_path / 'pairs.tsv'
    pairs.write_text('ein Hund\ta dog\n' * 40)
    text = {'source': f'text:{pairs}', 'split': 'train', 'vocab': 'bytes', 'transforms': 'tokenize'}
    with pytest.raises(UserError, match=r'image.*patches'):
        opened(**text).shapes  # noqa: B018
