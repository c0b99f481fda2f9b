"""Windows along the longer side: positions, exact averages, and the processor of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.transforms import parse_transforms, segmentation
from vit_jax.errors import UserError
from vit_jax.ops import sliding

SIDE, MOST = 8, 4
SIZES = [(8, 8), (8, 9), (20, 8), (8, 31), (12, 33), (40, 16)]  # of images, height and width


def cut(*sizes, seed=0):
    """A batch of images as the transform cuts them, and the images resized by it."""
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    make = parse_transforms(f"sliding_windows({SIDE}, most={MOST}, method='nearest')")
    rows = [make({'image': image}, rng) for image in images]
    return images, {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_the_fewest_windows_overlap_evenly():
    for length in range(SIDE, 60):
        found = segmentation.window_starts(length, SIDE)
        assert len(found) == -(-length // SIDE)
        assert (found[0], found[-1]) == (0, length - SIDE)
        steps = np.diff(found)
        assert not len(steps) or (steps.max() - steps.min() <= 1 and steps.max() <= SIDE)
        expected = [
            int(i * (length - SIDE) / max(len(found) - 1, 1) + 1e-9) for i in range(len(found))
        ]
        assert found == expected


@pytest.mark.parametrize('size', SIZES)
def test_windows_are_of_the_resized_image(size):
    (image,), batch = cut(size)
    height, width = batch['scaled_size'][0]
    rows, columns = (
        (np.arange(n) + 0.5) * m // n for n, m in ((height, size[0]), (width, size[1]))
    )
    resized = image[rows.astype(int)[:, None], columns.astype(int)]
    assert min(height, width) == SIDE and batch['full_size'].tolist() == [list(size)]
    tall = size[0] > size[1]
    assert batch['tall'][0] == tall
    for window, start in zip(batch['image'][0], batch['starts'][0], strict=True):
        along = slice(start, start + SIDE)
        expected = resized[along] if tall else resized[:, along]
        np.testing.assert_array_equal(window, expected if start >= 0 else 0 * window)


averaged = jax.jit(jax.vmap(sliding.average, in_axes=(0, 0, 0, None)), static_argnums=3)


def test_linear_predictors_are_exact():
    """What a predictor says of a pixel is the same in every window: the average is that."""
    _, batch = cut(*SIZES)
    for predict in (lambda x: x, lambda x: 0 * x + 7, lambda x: 3 * x - 1):
        scores = jnp.asarray(predict(batch['image'].astype(np.float32))).transpose(0, 1, 4, 2, 3)
        found = np.asarray(averaged(scores, batch['starts'], batch['tall'], MOST * SIDE))
        for row in range(len(SIZES)):
            tall, (height, width) = batch['tall'][row], batch['scaled_size'][row]
            whole = np.zeros((height, width, 3), np.float32)
            for window, start in zip(batch['image'][row], batch['starts'][row], strict=True):
                if start >= 0:
                    at = np.s_[start : start + SIDE] if tall else np.s_[:, start : start + SIDE]
                    whole[at] = predict(window.astype(np.float32))
            expected = whole.transpose(2, 1, 0) if tall else whole.transpose(2, 0, 1)
            np.testing.assert_array_equal(found[row, :, :, : expected.shape[2]], expected)
            assert not found[row, :, :, expected.shape[2] :].any()


def test_scores_of_an_overlap_are_averaged():
    scores = jnp.stack([jnp.full((1, 4, 4), 1.0), jnp.full((1, 4, 4), 2.0)])
    found = sliding.average(scores, jnp.array([0, 2]), jnp.array(False), 8)
    np.testing.assert_array_equal(found[0, 0], [1, 1, 1.5, 1.5, 2, 2, 0, 0])
    found = sliding.average(scores, jnp.array([0, -1]), jnp.array(True), 8)
    np.testing.assert_array_equal(found[0, 0], [1, 1, 1, 1, 0, 0, 0, 0])


segment = jax.jit(sliding.segmentation, static_argnums=2)
FIELDS = ('starts', 'tall', 'scaled_size', 'full_size')


@pytest.mark.parity
def test_classes_at_the_original_size_are_pytorchs():
    """Averaged, interpolated to the size of the file, and the best: as EoMT's authors do."""
    torch = pytest.importorskip('torch')
    _, batch = cut(*SIZES)
    scores = (
        np.random.default_rng(1).normal(size=(len(SIZES), MOST, 5, SIDE, SIDE)).astype(np.float32)
    )
    made = segment(scores, {name: batch[name] for name in FIELDS}, (42, 36))
    assert made['size'].tolist() == list(map(list, SIZES))
    found = made['segmentation']
    for row, size in enumerate(SIZES):
        height, width = batch['scaled_size'][row].tolist()
        total, count = np.zeros((5, height, width), np.float32), np.zeros((height, width))
        for window, start in zip(scores[row], batch['starts'][row], strict=True):
            if start >= 0:
                along = slice(start, start + SIDE)
                at = (along,) if batch['tall'][row] else (slice(None), along)
                total[(slice(None), *at)] += window
                count[at] += 1
        mean = torch.from_numpy((total / count).astype(np.float32))[None]
        full = torch.nn.functional.interpolate(mean, size, mode='bilinear')[0]
        best, second = np.sort(full.numpy(), axis=0)[[-1, -2]]
        clear = best - second > 1e-5
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(
            np.asarray(found[row])[: size[0], : size[1]][clear], full.argmax(0).numpy()[clear]
        )
        outside = np.ones((42, 36), bool)
        outside[: size[0], : size[1]] = False
        assert (np.asarray(found[row])[outside] == sliding.NONE).all()


def test_classes_of_the_pixels_of_resized_images():
    _, batch = cut((12, 33), (20, 8))
    scores = np.random.default_rng(2).normal(size=(2, MOST, 4, SIDE, SIDE)).astype(np.float32)
    found = segment(scores, {name: batch[name] for name in FIELDS}, None)
    assert found['size'].tolist() == batch['scaled_size'].tolist() == [[8, 22], [20, 8]]
    assert found['segmentation'].shape == (2, 4 * SIDE, 4 * SIDE)
    joined = averaged(scores, batch['starts'], batch['tall'], MOST * SIDE).argmax(1)
    np.testing.assert_array_equal(found['segmentation'][0, :8, :22], joined[0, :, :22])
    np.testing.assert_array_equal(found['segmentation'][1, :20, :8], joined[1, :, :20].T)
    assert (np.asarray(found['segmentation'])[1, :, 8:] == sliding.NONE).all()


def test_scores_that_are_not_finite_give_no_class():
    _, batch = cut((8, 16))
    for worst in (np.nan, np.inf, -np.inf):
        scores = np.zeros((1, MOST, 3, SIDE, SIDE), np.float32)
        scores[0, :, 1] = 1
        scores[0, 3] = worst  # of a window that is not used
        fields = {name: batch[name] for name in FIELDS}
        assert (np.asarray(segment(scores, fields, (8, 16))['segmentation']) == 1).all()
        scores[0, 1, 2, 4, 4] = worst
        found = np.asarray(segment(scores, fields, (8, 16))['segmentation'])[0]
        assert found[4, 12] == sliding.NOT_FINITE and found[0, 0] in (1, sliding.NOT_FINITE)


def test_mistakes():
    with pytest.raises(UserError, match=r'41 x 8 pixels needs 6 windows.*most=4'):
        cut((8, 41))
    record = {'image': np.zeros((8, 9, 3), np.uint8), 'boxes': np.zeros((1, 4), np.float32)}
    with pytest.raises(UserError, match=r"replaces.*'boxes'.*keep"):
        parse_transforms('sliding_windows(8)')(record, np.random.default_rng(0))
