"""Large-scale jitter, by an independent formulation of its published arithmetic."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError


def example(height=40, width=60):
    """An image with two objects, one of them a single pixel, and a void row."""
    rng = np.random.default_rng(0)
    segments = np.zeros((height, width), np.int16)
    segments[10:30, 20:50], segments[5, 5], segments[-1] = 1, 2, -1
    return {
        'image': rng.integers(0, 256, (height, width, 3), np.uint8),
        'segments': segments,
        'labels': np.array([7, 3]),
        'boxes': np.array([[20, 10, 50, 30], [5, 5, 6, 6]], np.float32),
    }


def jittered(record, seed, spec='large_scale_jitter(32)'):
    return parse_transforms(spec)(record, np.random.default_rng(seed))


@pytest.mark.parametrize('shape', [(40, 60), (61, 33), (32, 32)])
def test_by_the_published_arithmetic(shape):
    """torchvision's ScaleJitter, padding, and RandomCrop: each pixel of the result by itself."""
    record = example(*shape)
    seen = set()
    for seed in range(30):
        found = jittered(record, seed, 'large_scale_jitter((32, 48), 0.5, 2.0)')
        draws = np.random.default_rng(seed)
        scale = min(32 / shape[0], 48 / shape[1]) * draws.uniform(0.5, 2.0)
        rows, columns = int(shape[0] * scale), int(shape[1] * scale)
        top, left = draws.integers(max(0, rows - 32) + 1), draws.integers(max(0, columns - 48) + 1)
        resized = np.asarray(
            Image.fromarray(record['image']).resize((columns, rows), Image.Resampling.BILINEAR)
        )
        image = np.zeros((32, 48, 3), np.uint8)
        numbers = np.full((32, 48), -1)
        for i in range(min(rows, 32)):
            for j in range(min(columns, 48)):
                image[i, j] = resized[top + i, left + j]
                y, x = (top + i + 0.5) * shape[0] / rows, (left + j + 0.5) * shape[1] / columns
                numbers[i, j] = record['segments'][int(y), int(x)]
        np.testing.assert_array_equal(found['image'], image)
        kept = [k for k in (1, 2) if (numbers == k).any()]
        names = np.array([0, 1, 1 if kept == [2] else 2, -1])  # 2 becomes 1 if 1 is gone
        np.testing.assert_array_equal(found['segments'], names[numbers])
        np.testing.assert_array_equal(found['labels'], record['labels'][np.array(kept) - 1])
        assert len(found['boxes']) == len(kept)
        seen.add((rows > 32, len(kept)))
    assert len(seen) > 2


def test_scales_are_uniform_and_padding_is_black_and_void():
    record = example(64, 64) | {'segments': np.ones((64, 64), np.int16), 'labels': np.zeros(1, int)}
    del record['boxes']
    shares = []
    for seed in range(300):
        found = jittered(record, seed, 'large_scale_jitter(64, 0.2, 1.0)')
        real = found['segments'] == 1
        side = int(real.any(0).sum())
        assert real[:side, :side].all() and real.sum() == side**2
        assert (found['segments'][~real] == -1).all() and not found['image'][~real].any()
        shares.append(side / 64)
    assert 0.19 < min(shares) < 0.22 and 0.97 < max(shares) <= 1
    np.testing.assert_allclose(np.quantile(shares, [0.25, 0.5, 0.75]), [0.4, 0.6, 0.8], atol=0.07)


def test_a_window_without_objects_is_drawn_again():
    segments = np.zeros((64, 64), np.int16)
    segments[:8, :8] = 1
    record = {'image': np.zeros((64, 64, 3), np.uint8), 'segments': segments, 'labels': np.ones(1)}
    found = [jittered(record, seed, 'large_scale_jitter(32, 2, 2)') for seed in range(100)]
    kept = np.mean([len(one['labels']) for one in found])
    assert 0.3 < kept < 0.6  # a window has it with probability (8 / 33)^2 = 0.06, one of ten 0.46
    nothing = {**record, 'segments': 0 * segments, 'labels': np.zeros(0)}
    assert jittered(nothing, 0)['labels'].shape == (0,)
    assert jittered({'image': record['image']}, 0)['image'].shape == (32, 32, 3)


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('large_scale_jitter(32, 2, 1)', r'low=2 .* high=1'),
        ('large_scale_jitter(32, 0)', r'low=0 .* high=2.0'),
        ("large_scale_jitter(32, method='cubic')", "method='cubic'"),
    ],
)
def test_mistakes(spec, message):
    with pytest.raises(UserError, match=message):
        parse_transforms(spec)
