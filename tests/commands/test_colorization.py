"""Colorization by the command line: gray files of every mode, folders, and whose patches decide."""

import json

import numpy as np
import pytest
from helpers.messages import mentions
from helpers.xla import use_one_device
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.ops import colors
from vit_jax.viz import attention, figures

pytestmark = pytest.mark.slow  # a colorizer is trained

CONFIG = 'experiments/colorization/cifar10.py:smoke'
RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (24, 40), dtype=np.uint8)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('colorization')


@pytest.fixture(scope='module')
def run(folder, repo):
    """A colorizer after two steps, whose rare colors weigh more."""
    prior, workdir = folder / 'colors.json', folder / 'run'
    argv = ['colors', 'scenes:4', '--split', 'train', '--out', str(prior)]
    assert cli.main(argv) == 0
    config = ['--config', str(repo / CONFIG), f'--config.task.prior={prior}']
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        argv = ['train', *config, '--workdir', str(workdir), '--stop-at', '2']
        assert cli.main(argv) == EXIT_PREEMPTED
    return workdir


@pytest.fixture(scope='module')
def files(folder):
    """The same gray values in every mode that has them, and a color file."""
    gray = Image.fromarray(BYTES)
    images = {mode: gray.convert(mode) for mode in ('L', 'RGB')}
    images['LA'] = Image.merge('LA', [gray, Image.new('L', gray.size, 255)])
    images['I;16'] = Image.fromarray(BYTES.astype(np.uint16) * 257)
    images['P'] = gray.convert('P')
    images['1'] = Image.fromarray(BYTES > 127)
    images['color'] = Image.fromarray(RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8))
    paths = {mode: folder / f'{mode.replace(";", "_")}.png' for mode in images}
    for mode, image in images.items():
        image.save(paths[mode])
    # CMYK without black, as JPEG, is not exactly gray.
    paths['CMYK'] = folder / 'CMYK.jpg'
    images['color'].convert('CMYK').save(paths['CMYK'])
    return paths


@pytest.mark.long
def test_files_of_every_mode_keep_size_and_luminance(run, files, folder, capsys):
    out = folder / 'made'
    argv = ['predict', '--workdir', run, '--out', out, '--json', *files.values()]
    assert cli.main([str(word) for word in argv]) == 0
    rows = {r['image']: r['predictions'][0] for r in json.loads(capsys.readouterr().out)['images']}
    images = {mode: np.asarray(Image.open(out / f'{p.stem}.png')) for mode, p in files.items()}
    for mode in ('L', 'RGB', 'LA', 'I;16', 'P'):
        assert images[mode].shape == (24, 40, 3)
        gray = np.asarray(colors.to_bytes(colors.to_gray(images[mode] / 255)))[..., 0]
        assert np.abs(gray.astype(int) - BYTES).max() <= 1
        assert rows[str(files[mode])].keys() == {'colorfulness'}
        np.testing.assert_array_equal(images[mode], images['L'])
    assert images['1'].shape == (24, 40, 3)
    assert images['color'].shape == images['CMYK'].shape == (20, 30, 3)
    assert 'psnr' in rows[str(files['color'])]


@pytest.mark.long
def test_a_picture_of_all(run, files, folder, capsys):
    picture = folder / 'all.png'
    argv = ['predict', '--workdir', run, '--out', picture, files['L'], files['color']]
    assert cli.main([str(word) for word in argv]) == 0
    assert str(picture) in capsys.readouterr().out and picture.stat().st_size > 10_000


def test_no_file_is_written_over(run, files, folder, capsys):
    argv = ['predict', '--workdir', run, '--out', folder, files['L']]
    assert cli.main([str(word) for word in argv]) == 2
    assert mentions(capsys.readouterr().err, 'L.png', 'overwrite')


def test_who_decided_the_color_of_a_patch(run, files, folder, capsys, monkeypatch):
    """The maps are drawn on the gray image that the model saw."""
    drawn, draw = [], attention.draw_layers
    monkeypatch.setattr(
        attention, 'draw_layers', lambda *a, **k: drawn.append(a[0]) or draw(*a, **k)
    )
    picture = folder / 'looks.png'
    argv = ['attention', '--workdir', run, '--query', '2,5', '--out', picture, files['color']]
    assert cli.main([str(word) for word in argv]) == 0
    assert '1 layers x 2 heads, 8 x 8 patches' in capsys.readouterr().out
    assert len(drawn) == 1 and np.ptp(drawn[0]) > 0 and not figures.has_colors(drawn[0])


def test_mistakes(folder, capsys):
    for argv, message in (
        (['digits', '--out', str(folder / 'c.json')], ('1 channels', '3', 'RGB')),
        (['scenes:4', '--out', str(folder)], 'folder'),
        (['scenes:4', '--images', '0', '--out', str(folder / 'c.json')], 'at least 1'),
    ):
        assert cli.main(['colors', *argv]) == 2
        assert mentions(capsys.readouterr().err, message)
