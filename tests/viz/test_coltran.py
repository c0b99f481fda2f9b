"""What is shown of samples of colors, and of upsampled ones."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.ops import colors
from vit_jax.tasks.coltran import Task
from vit_jax.viz import coltran, coltran_upsampler
from vit_jax.viz.photo import Context, Photo

RNG = np.random.default_rng(0)
CONTEXT = Context((), argparse.Namespace())
SAMPLES = RNG.integers(0, 256, (2, 6, 8, 3), dtype=np.uint8)
PREDICTION = {'samples': SAMPLES, 'bits_per_dim': np.array([2.5, 3.0], np.float32)}


def photo(image):
    return Photo(pathlib.Path('a.png'), image, {'image': image}, '')


def test_samples_are_told_and_drawn_between_gray_and_original():
    seen = photo(SAMPLES[1])
    rows = coltran.Viz().rows(PREDICTION, seen, CONTEXT)
    assert [(row['sample'], row['bits_per_dim']) for row in rows] == [(0, 2.5), (1, 3.0)]
    assert rows[1]['psnr'] > 100 > rows[0]['psnr'] > 5
    panels = coltran.sample_panels(seen, SAMPLES)
    assert [title for title, _ in panels] == ['gray', 'sample 0', 'sample 1', 'original']
    gray = panels[0][1]
    assert (gray == gray[..., :1]).all()
    figure = coltran.Viz().draw(
        [PREDICTION, PREDICTION], [seen, photo(SAMPLES[0, ..., :1])], CONTEXT
    )
    assert sum(bool(axes.images) for axes in figure.axes) == 4 + 3


@pytest.mark.slow
def test_colors_are_laid_over_the_file_and_its_luminance_stays():
    seen = photo(SAMPLES[1].repeat(2, axis=1))  # a file twice as wide
    panels = coltran.file_panels(seen, SAMPLES)
    assert [title for title, _ in panels] == ['gray', 'sample 0', 'sample 1', 'original']
    gray, sample, _, original = (picture / 255 for _, picture in panels)
    assert sample.shape == original.shape == (6, 16, 3)
    luminance = np.asarray(colors.luminance(sample))
    np.testing.assert_allclose(luminance, colors.luminance(gray), atol=0.02)
    assert np.abs(sample - gray).max() > 0.05


def test_a_gray_photograph_has_no_original_to_compare_with():
    seen = photo(SAMPLES[0, ..., :1])
    assert [row['psnr'] for row in coltran.Viz().rows(PREDICTION, seen, CONTEXT)] == [None, None]
    assert coltran.sample_panels(seen, SAMPLES)[-1][0] == 'sample 1'


def test_upsampled_colors():
    prediction, seen = {'coarse': SAMPLES[0], 'image': SAMPLES[1]}, photo(SAMPLES[1])
    rows = coltran_upsampler.Viz().rows(prediction, seen, CONTEXT)
    assert [row['image'] for row in rows] == ['coarse', 'upsampled']
    assert rows[1]['psnr'] > 100 > rows[0]['psnr']
    titles = [title for title, _ in coltran_upsampler.Viz().panels(prediction, seen)]
    assert titles == ['gray', 'coarse', 'upsampled', 'original']


def test_flags_change_the_task():
    parser = argparse.ArgumentParser()
    coltran.Viz().add_flags(parser)
    task = Task(samples=5)
    assert coltran.Viz().adapt_task(task, Context(flags=parser.parse_args([]))) == task
    flags = parser.parse_args(['--samples', '2', '--temperature', '0.5', '--top-k', '9'])
    context = Context(flags=flags)
    assert coltran.Viz().adapt_task(task, context) == Task(samples=2, temperature=0.5, top_k=9)
    with pytest.raises(UserError, match=r'samples .* 1, not 0'):
        coltran.Viz().adapt_task(task, Context(flags=parser.parse_args(['--samples', '0'])))
