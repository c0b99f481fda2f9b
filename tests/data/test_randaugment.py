"""RandAugment: every operation against arithmetic written down independently of Pillow."""

import itertools

import numpy as np
import pytest
from PIL import ImageEnhance, ImageOps

from vit_jax.__main__ import main
from vit_jax.data import native
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import parse_transforms, pillow, pixels
from vit_jax.data.transforms.randaugment import GRAY, VARIANTS, make_operations, operate
from vit_jax.errors import EXIT_PREEMPTED

OPERATIONS = make_operations(translate=100, cutout=40)
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.fixture(params=[1, 3], ids=['gray', 'rgb'])
def image(request):
    """Smooth enough to have structure, and not of the full range."""
    rng = np.random.default_rng(0)
    noise = rng.integers(20, 180, (9, 11, request.param))
    return np.repeat(np.repeat(noise, 2, 0), 2, 1).astype(np.uint8)


class Sign:
    """A generator whose coin always falls the same way."""

    def __init__(self, positive):
        self.positive = positive

    def random(self):
        return 0.0 if self.positive else 1.0


def run(name, image, level, rng=None, operations=OPERATIONS):
    return operate([operations[name]], {'image': image}, level, rng)['image']


def close(actual, expected, atol):
    difference = np.abs(actual.astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= atol


def test_there_are_sixteen():
    assert sorted(OPERATIONS) == [
        'autocontrast',
        'brightness',
        'color',
        'contrast',
        'cutout',
        'equalize',
        'invert',
        'posterize',
        'rotate',
        'sharpness',
        'shear_x',
        'shear_y',
        'solarize',
        'solarize_add',
        'translate_x',
        'translate_y',
    ]


def test_autocontrast_stretches_each_channel_to_the_full_range(image):
    low, high = (f(image.astype(float), (0, 1)) for f in (np.min, np.max))
    close(run('autocontrast', image, 0), (image - low) * 255 / (high - low), 1)


def test_equalize_maps_by_the_cumulative_histogram(image):
    out = run('equalize', image, 0)
    for c in range(image.shape[2]):
        histogram = np.bincount(image[..., c].ravel(), minlength=256)
        # The last occupied bin is left out, as in the TensorFlow code.
        step = (histogram.sum() - histogram[np.nonzero(histogram)[0][-1]]) // 255
        before = np.concatenate([[0], np.cumsum(histogram)[:-1]])
        table = np.minimum((before + step // 2) // step, 255) if step else np.arange(256)
        np.testing.assert_array_equal(out[..., c], table[image[..., c]])


def test_invert(image):
    np.testing.assert_array_equal(run('invert', image, 0), 255 - image)


@pytest.mark.parametrize('level', LEVELS)
def test_posterize_keeps_high_bits(image, level):
    drop = 8 - {0.0: 1, 0.5: 2, 1.0: 4, 1.5: 6, 2.0: 8}[level]
    np.testing.assert_array_equal(
        run('posterize', image, level), (image.astype(int) >> drop) << drop
    )


@pytest.mark.parametrize('level', LEVELS)
def test_solarize_inverts_from_the_threshold(image, level):
    expected = np.where(image < int(256 * level), image, 255 - image)
    np.testing.assert_array_equal(run('solarize', image, level), expected)


@pytest.mark.parametrize(('level', 'threshold'), [(0.5, 128), (1.0, 0), (1.5, 128), (2.0, 0)])
def test_solarize_of_big_vision_has_its_threshold_in_a_byte(image, level, threshold):
    expected = np.where(image < threshold, image, 255 - image)
    out = run('solarize', image, level, operations=VARIANTS['big_vision'])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize(('size', 'gray'), [((224, 224), 196), ((32, 32), 4), ((300, 300), 255)])
def test_contrast_of_big_vision_moves_away_from_a_count_of_pixels(level, size, gray):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    out = run('contrast', image, level, operations=VARIANTS['big_vision'])
    close(out, blend(np.array([gray]), image, level), 1)


def test_the_variant_draws_the_same_operations():
    """Where neither of the two is drawn, nothing is another."""
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    ours, theirs = (
        parse_transforms(f'randaugment(1, 10, 5, 3{words})')
        for words in ('', ", variant='big_vision'")
    )
    same = [
        np.array_equal(*(t({'image': picture}, example_rng(0, i))['image'] for t in (ours, theirs)))
        for i in range(200)
    ]
    assert np.mean(same) == pytest.approx(14 / 16, abs=0.07)


@pytest.mark.parametrize('level', LEVELS)
def test_solarize_add_lifts_the_dark_half(image, level):
    lifted = np.minimum(image.astype(int) + int(110 * level), 255)
    expected = np.where(image < 128, lifted, image)
    np.testing.assert_array_equal(run('solarize_add', image, level), expected)


def luma(image):
    """ITU-R BT.601, as bytes."""
    weights = [0.299, 0.587, 0.114] if image.shape[2] == 3 else [1.0]
    return np.round(image @ np.array(weights))[..., None]


def blend(base, image, level):
    factor = 1.8 * level + 0.1
    return np.clip(base + factor * (image - base.astype(float)), 0, 255)


@pytest.mark.parametrize('level', LEVELS)
def test_color_moves_away_from_gray(image, level):
    close(run('color', image, level), blend(luma(image), image, level), 4)


@pytest.mark.parametrize('level', LEVELS)
def test_contrast_moves_away_from_the_mean(image, level):
    mean = np.round(luma(image).mean())
    close(run('contrast', image, level), blend(mean, image, level), 4)


@pytest.mark.parametrize('level', LEVELS)
def test_brightness_moves_away_from_black(image, level):
    close(run('brightness', image, level), blend(np.zeros(1), image, level), 1)


@pytest.mark.parametrize('level', LEVELS)
def test_sharpness_moves_away_from_the_smoothed(image, level):
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    height, width = image.shape[:2]
    smooth = sum(
        kernel[y, x] * image[y : height - 2 + y, x : width - 2 + x].astype(float)
        for y in range(3)
        for x in range(3)
    )
    out = run('sharpness', image, level)
    close(out[1:-1, 1:-1], blend(np.round(smooth), image[1:-1, 1:-1], level), 4)
    np.testing.assert_array_equal(out[0], image[0])  # the border stays


def gather(image, source_x, source_y):
    """The nearest pixel of each source point, gray outside."""
    height, width = image.shape[:2]
    x, y = np.floor(source_x).astype(int), np.floor(source_y).astype(int)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    picked = image[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)]
    return np.where(inside[..., None], picked, GRAY)


def check_gathers(actual, image, source_x, source_y):
    """Where a source point lies on the edge of two pixels, either is right."""
    nudges = [(dx, dy) for dx in (-1e-3, 1e-3) for dy in (-1e-3, 1e-3)]
    fits = [(actual == gather(image, source_x + dx, source_y + dy)).all(-1) for dx, dy in nudges]
    assert np.any(fits, 0).all()


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize('level', [0.0, 0.05, 0.1, 1.0])
def test_translations(image, level, positive):
    y, x = np.mgrid[: image.shape[0], : image.shape[1]] + 0.5
    shift = 100 * level * (1 if positive else -1)
    rng = Sign(positive)
    np.testing.assert_array_equal(
        run('translate_x', image, level, rng), gather(image, x + shift, y)
    )
    np.testing.assert_array_equal(
        run('translate_y', image, level, rng), gather(image, x, y + shift)
    )


def agree(actual, expected, share=0.97):
    """Nearest neighbors may differ where a source point lies on the edge of a pixel."""
    assert np.mean(np.all(actual == expected, -1)) >= share


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize('level', [0.0, 0.5, 1.0, 2.0])
def test_shears(image, level, positive):
    y, x = np.mgrid[: image.shape[0], : image.shape[1]] + 0.5
    shear = 0.3 * level * (1 if positive else -1)
    rng = Sign(positive)
    check_gathers(run('shear_x', image, level, rng), image, x + shear * y, y)
    check_gathers(run('shear_y', image, level, rng), image, x, y + shear * x)


@pytest.mark.parametrize('positive', [True, False])
@pytest.mark.parametrize('level', [0.0, 0.5, 1.0, 2.0])
def test_rotation_is_about_the_center(image, level, positive):
    height, width = image.shape[:2]
    angle = np.deg2rad(30 * level * (1 if positive else -1))
    y, x = np.mgrid[:height, :width] + 0.5
    dx, dy = x - width / 2, y - height / 2
    source_x = width / 2 + np.cos(angle) * dx - np.sin(angle) * dy
    source_y = height / 2 + np.sin(angle) * dx + np.cos(angle) * dy
    check_gathers(run('rotate', image, level, Sign(positive)), image, source_x, source_y)


def test_cutout_is_a_gray_square_around_any_pixel():
    image = np.zeros((60, 80, 3), np.uint8)
    rows, areas = set(), []
    for i in range(200):
        gray = (run('cutout', image, 0.25, example_rng(0, i)) == GRAY).all(-1)
        ys, xs = np.nonzero(gray)
        assert gray[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1].all()
        rows.add(int(ys.min()))
        areas.append(int(gray.sum()))
    assert max(areas) == 20 * 20
    assert min(areas) < 20 * 20  # cut off at a border
    assert len(rows) > 30


def test_cutout_of_nothing(image):
    np.testing.assert_array_equal(run('cutout', image, 0.0, example_rng(0, 0)), image)


def test_all_operations_are_drawn_equally_often(monkeypatch):
    from vit_jax.data.transforms import randaugment

    drawn = []
    named = {
        name: lambda image, level, rng, name=name: (drawn.append((name, level)) or image, None)
        for name in OPERATIONS
    }
    monkeypatch.setattr(randaugment, 'make_operations', lambda translate, cutout: named)
    transform = parse_transforms('randaugment(3, 15)')
    record = {'image': np.zeros((4, 4, 3), np.uint8)}
    for i in range(1000):
        transform(record, example_rng(0, i))
    counts = [sum(name == n for n, _ in drawn) for name in OPERATIONS]
    assert len(drawn) == 3000
    assert {level for _, level in drawn} == {1.5}
    assert min(counts) > 130  # 187 expected, standard deviation 13
    assert max(counts) < 245


BYTES = {
    'invert': lambda image, level: ImageOps.invert(image),
    'autocontrast': lambda image, level: ImageOps.autocontrast(image),
    'equalize': lambda image, level: ImageOps.equalize(image),
    'posterize': lambda image, level: ImageOps.posterize(image, min(max(int(4 * level), 1), 8)),
    'solarize': lambda image, level: ImageOps.solarize(image, int(256 * level)),
    'color': lambda image, level: ImageEnhance.Color(image).enhance(1.8 * level + 0.1),
    'contrast': lambda image, level: ImageEnhance.Contrast(image).enhance(1.8 * level + 0.1),
    'brightness': lambda image, level: ImageEnhance.Brightness(image).enhance(1.8 * level + 0.1),
    'sharpness': lambda image, level: ImageEnhance.Sharpness(image).enhance(1.8 * level + 0.1),
    'turn': lambda image, level: pillow.transform(image, turn(image, level), GRAY),
    'shift': lambda image, level: pillow.transform(image, shift(image, level), GRAY),
}


def turn(image, level):
    draws = np.random.default_rng(int(100 * level)).uniform(-1, 1, 6)
    draws *= (1, 1, image.width, 1, 1, image.height)
    return tuple(draws.tolist())


def shift(image, level):
    x, y = np.random.default_rng(int(100 * level)).uniform(-1, 1, 2)
    return (1, 0, image.width * x, 0, 1, np.rint(image.height * y) + 0.5)


@pytest.mark.parametrize('compiled', [True, False])
@pytest.mark.parametrize('shape', [(31, 40, 3), (9, 11, 1), (3, 3, 3), (1, 2, 3), (4, 1, 1)])
def test_operations_have_the_bytes_of_pillow(monkeypatch, compiled, shape):
    """Compiled or not, for images of few and of all values."""
    if not compiled:
        monkeypatch.setattr(native, '_load_native', lambda: None)
        pixels._matches_pillow.cache_clear()
    elif not native.has_loop('move'):
        pytest.skip('nothing was compiled')
    moves = {'turn': turn, 'shift': shift}
    for (name, expected), level, high in itertools.product(BYTES.items(), LEVELS, (2, 60, 256)):
        drawn = np.random.default_rng(high).integers(0, high, shape)
        image = (drawn * (255 // (high - 1))).astype(np.uint8)
        of_pillow = pillow.to_pillow(image)
        if name in moves:
            found = pixels.move(image, moves[name](of_pillow, level), GRAY)
        else:
            found = run(name, image, level)
        said = f'{name} {level} {high}'
        np.testing.assert_array_equal(
            found, pillow.from_pillow(expected(of_pillow, level)), err_msg=said
        )
        mirrored = pixels.mirror(image)
        np.testing.assert_array_equal(mirrored, image[:, ::-1])
    pixels._matches_pillow.cache_clear()


@pytest.mark.parametrize(
    ('spec', 'side', 'said'),
    [
        ('randaugment(2, 10)', 32, 'use translate=14, cutout=6'),
        ("pad_and_crop(4)|flip|randaugment(2, 10, variant='big_vision')", 32, 'of 32 x 32 pixels'),
        ("views('image', 2, 'inception_crop(32)|randaugment(2, 10)')", 96, 'use translate=14'),
        ('pad_and_crop(40)', 32, 'use pad=4'),
        ('randaugment(2, 10, translate=14, cutout=6)', 32, None),
        ('randaugment_increasing(2, 9)|random_erasing(0.9)', 32, None),
        ('resize(224)|randaugment(2, 20)', 32, None),
        ('randaugment(2, 10)', 128, None),
    ],
)
def test_pixels_that_do_not_suit_the_size_are_remarked_on(spec, side, said):
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    found = parse_transforms(spec).remarks({'image': image, 'label': 1})
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_a_run_begins_with_the_remark(tmp_path, repo, capsys):
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py', '--stop-at', '1']
    words += ['--config.data.transforms=randaugment(2, 10)', '--config.data.cache=False']
    assert main([*words, '--workdir', str(tmp_path / 'run')]) == EXIT_PREEMPTED
    said = capsys.readouterr().out
    assert 'randaugment(2, 10) turns' in said
    assert 'images of 8 x 8 pixels' in said and 'translate=4, cutout=1' in said
