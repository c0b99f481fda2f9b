"""Color jitter, gray, solarize and blur, against the equations of torchvision's transforms."""

import colorsys
import pickle

import numpy as np
import pytest

from vit_jax import signatures
from vit_jax.data.transforms.parse import parse_transforms
from vit_jax.errors import UserError

IMAGE = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)


def apply(spec, image=IMAGE, seed=0):
    made = parse_transforms(spec)({'image': image, 'label': 3}, np.random.default_rng(seed))
    assert made['label'] == 3 and made['image'].dtype == np.uint8
    return made['image']


def luminance(image):
    return image @ np.array([0.299, 0.587, 0.114])


@pytest.mark.parametrize('name', ['color_jitter', 'random_gray', 'solarize', 'gaussian_blur'])
def test_each_has_a_probability(name):
    np.testing.assert_array_equal(apply(f'{name}(p=0)'), IMAGE)
    changed = [(apply(f'{name}(p=0.3)', seed=seed) != IMAGE).any() for seed in range(100)]
    assert 0.15 < np.mean(changed) < 0.45
    np.testing.assert_array_equal(apply(f'{name}(p=1)', seed=5), apply(f'{name}(p=1)', seed=5))
    assert apply(f'{name}(p=1)', IMAGE[..., :1]).shape == (12, 16, 1)


def test_three_augment_is_one_of_three():
    gray, solarized = apply('random_gray(p=1)'), apply('solarize(p=1)')
    made = [apply('three_augment', seed=seed) for seed in range(60)]
    of_gray = sum((x == gray).all() for x in made)
    of_solarized = sum((x == solarized).all() for x in made)
    blurred = [x for x in made if (x != gray).any() and (x != solarized).any()]
    assert min(of_gray, of_solarized, len(blurred)) > 10
    smooth = [np.abs(np.diff(x.astype(int), axis=0)).mean() for x in blurred]
    assert min(smooth) < 0.7 * np.abs(np.diff(IMAGE.astype(int), axis=0)).mean()


def factor_of(image, changed, base):
    """The factor x of changed = base + x (image - base), by least squares where nothing is cut."""
    inside = (changed > 0) & (changed < 255)
    rest = (image - base)[inside]
    return (rest * (changed - base)[inside]).sum() / (rest**2).sum()


@pytest.mark.parametrize(
    ('option', 'base'),
    [
        ('brightness', np.zeros(3)),
        ('contrast', np.full(3, luminance(IMAGE).mean())),
        ('saturation', luminance(IMAGE)[..., None] * np.ones(3)),
    ],
)
def test_factors_are_uniform_around_one(option, base):
    off = {'brightness': 0, 'contrast': 0, 'saturation': 0, 'hue': 0, option: 0.4}
    spec = f'color_jitter(p=1, {", ".join(f"{k}={v}" for k, v in off.items())})'
    base = np.broadcast_to(base, IMAGE.shape)
    found = [factor_of(IMAGE.astype(float), apply(spec, seed=s), base) for s in range(60)]
    assert 0.59 < min(found) < 0.68 and 1.32 < max(found) < 1.41
    assert abs(np.mean(found) - 1) < 0.08


def test_photometric_distortion_is_of_four_changes_in_two_orders():
    off = dict.fromkeys(('brightness', 'contrast', 'saturation', 'hue'), 0)
    np.testing.assert_array_equal(apply('photometric_distortion(p=0)'), IMAGE)
    for option, strength in (('brightness', 32 / 255), ('contrast', 0.5), ('saturation', 0.5)):
        base = {'brightness': 0, 'contrast': luminance(IMAGE).mean()}.get(option)
        base = luminance(IMAGE)[..., None] if base is None else base
        args = ', '.join(f'{k}=0' for k in off if k != option)
        made = [apply(f'photometric_distortion({args})', seed=s) for s in range(120)]
        factors = [
            factor_of(IMAGE.astype(float), one, np.broadcast_to(base, IMAGE.shape)) for one in made
        ]
        changed = np.array([f for f in factors if abs(f - 1) > 0.01])
        assert 0.3 < len(changed) / len(made) < 0.6
        assert 0.7 * strength < np.abs(changed - 1).max() < 1.05 * strength
    made = [apply('photometric_distortion(0, 0.5, 0, 0.05, p=1)', seed=s) for s in range(20)]
    assert len({one.tobytes() for one in made}) == 20
    assert apply('photometric_distortion(p=1)', IMAGE[..., :1]).shape == (12, 16, 1)


def test_the_hue_turns():
    spec = 'color_jitter(0, 0, 0, 0.1, p=1)'
    before = [colorsys.rgb_to_hsv(*pixel) for pixel in IMAGE.reshape(-1, 3) / 255]
    turns = []
    for seed in range(30):
        after = [colorsys.rgb_to_hsv(*p) for p in apply(spec, seed=seed).reshape(-1, 3) / 255]
        moved = [(b[0] - a[0] + 0.5) % 1 - 0.5 for a, b in zip(before, after, strict=True)]
        turns.append(np.median(moved))
        assert np.abs(np.array(moved) - turns[-1]).max() < 0.05  # all pixels alike
        np.testing.assert_allclose([a[2] for a in before], [b[2] for b in after], atol=0.02)
    assert -0.105 < min(turns) < -0.06 and 0.06 < max(turns) < 0.105


def test_gray_and_solarized():
    gray = apply('random_gray(p=1)')
    np.testing.assert_allclose(gray, luminance(IMAGE)[..., None] * np.ones(3), atol=1)
    expected = np.where(IMAGE < 128, IMAGE, 255 - IMAGE)
    np.testing.assert_array_equal(apply('solarize(128, p=1)'), expected)


@pytest.mark.parity
def test_blur_is_a_convolution():
    torch = pytest.importorskip('torch')
    weights = torch.exp(-0.5 * (torch.arange(-4, 5) / 1.5).double() ** 2)
    kernel = torch.outer(weights, weights)
    x = torch.from_numpy(IMAGE).double().permute(2, 0, 1)[:, None]
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode='reflect')
    expected = torch.nn.functional.conv2d(padded, (kernel / kernel.sum())[None, None])
    found = apply('gaussian_blur(1.5, 1.5, p=1)')
    np.testing.assert_allclose(found, expected[:, 0].permute(1, 2, 0), atol=0.51)


def test_frames_of_a_clip_change_alike():
    clip = np.stack([IMAGE, IMAGE])
    made = apply('color_jitter(p=1)|gaussian_blur(p=1)', clip)
    np.testing.assert_array_equal(made[0], made[1])


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('color_jitter(hue=0.6)', r'hue=0.6 must be in \[0, 0.5\]'),
        ('color_jitter(-1)', 'brightness=-1.*0'),
        ('photometric_distortion(contrast=-1)', 'contrast=-1.*0'),
        ('random_gray(1.5)', r'p=1.5 must be in \[0, 1\]'),
        ('gaussian_blur(2, 1)', r'sigma_min=2 .* sigma_max=1'),
    ],
)
def test_mistakes(spec, message):
    with pytest.raises(UserError, match=message):
        parse_transforms(spec)


def test_a_choice_draws_one_by_the_weights():
    gray, solarized = apply('random_gray(p=1)'), apply('solarize(p=1)')
    spec = "choice('random_gray(p=1)', 'solarize(p=1)|random_gray(p=0)', '', weights=(2, 1, 1))"
    made = [apply(spec, seed=seed) for seed in range(200)]
    counts = [sum((x == y).all() for x in made) for y in (gray, solarized, IMAGE)]
    assert sum(counts) == 200
    assert 75 < counts[0] < 125 and 30 < counts[1] < 70
    equal = [apply("choice('random_gray(p=1)', 'solarize(p=1)')", seed=s) for s in range(100)]
    assert 35 < sum((x == gray).all() for x in equal) < 65
    copy = pickle.loads(pickle.dumps(parse_transforms(spec)))
    again = copy({'image': IMAGE}, np.random.default_rng(7))['image']
    np.testing.assert_array_equal(again, made[7])


def test_a_choice_moves_boxes_and_names_its_transforms():
    record = {'image': IMAGE, 'boxes': np.array([[0, 0, 4, 4]], np.float32), 'labels': np.zeros(1)}
    made = parse_transforms("choice('flip', 'flip')")
    found = {tuple(made(record, np.random.default_rng(i))['boxes'][0]) for i in range(20)}
    assert found == {(0, 0, 4, 4), (12, 0, 16, 4)}
    assert made.random
    text = "choice('flip|solarize', \"choice('gray', 'my_lab.x')\")"
    assert signatures.transform_names(text)[-1] == 'my_lab.x'


@pytest.mark.parametrize(
    'spec',
    [
        "choice('flip')",
        "choice('flip', 2)",
        "choice('flip', '', weights=(1,))",
        "choice('flip', '', weights=(0, 0))",
        "choice('flip', '', weights=(-1, 2))",
        "choice('flip', 'unknown')",
        "choice('flip', 'drop_alpha')",
    ],
)
def test_mistakes_in_choices(spec):
    with pytest.raises(UserError, match='choice'):
        parse_transforms(spec)
