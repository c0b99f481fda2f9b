"""`convert`: between run folders and the files of other code bases."""

import dataclasses
import functools
import os
import shutil

import jax
import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.inference import load
from vit_jax.interop import files
from vit_jax.interop.families import bit, vision_transformer
from vit_jax.models import bit_resnet, vit

VIT = dict(num_classes=5, patch_size=8, width=16, depth=2, mlp_dim=24, num_heads=2)
BIT = dict(num_classes=5, layers=(1, 1))


class Killed(BaseException):
    """Simulated end of the process."""


def random_params(model):
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('convert')
    flat = vision_transformer.write(random_params(vit.Model(**VIT)), {'name': 'vit', **VIT})
    files.write_npz(path / 'vit.npz', flat)
    files.write_npz(path / 'bit.npz', bit.write_npz(random_params(bit_resnet.Model(**BIT))))
    return path


def convert(*argv):
    return cli.main(['convert', *map(str, argv)])


@pytest.mark.parametrize('family', ['', 'timm_vit:'])
def test_files_of_a_run_on_small_images_are_prepared_as_by_the_run(repo, tmp_path, family, capsys):
    """Its images have one size and no transforms: files are cropped and resized."""
    run = repo / 'tests' / 'golden' / 'run_digits'
    assert convert(run, f'{family}{tmp_path / "there"}') == 0
    assert family or 'gray' in capsys.readouterr().out
    pixels = np.random.default_rng(0).integers(0, 255, (24, 24), np.uint8)
    for i, image in enumerate((pixels, pixels[:8, :8], pixels[:16])):
        Image.fromarray(image).save(tmp_path / f'{i}.png')
    names = [tmp_path / f'{i}.png' for i in range(3)]
    original, converted = (vit_jax.predict(path, names) for path in (run, tmp_path / 'there'))
    for i, tolerance in enumerate((1e-6, 1e-6, 1e-3)):  # the last is cropped a pixel apart
        np.testing.assert_allclose(converted[i]['probs'], original[i]['probs'], atol=tolerance)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, variables, images):
    return model.apply(variables, images)['logits']


def logits(path, images):
    return np.asarray(apply(*vit_jax.load(path), images))


@pytest.fixture
def images():
    return np.random.default_rng(1).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['vit', 'bit'])
@pytest.mark.parametrize('target', ['folder', 'weights.safetensors', 'other.npz'])
def test_what_is_written_computes_the_same(folder, tmp_path, images, capsys, name, target):
    source, written = folder / f'{name}.npz', tmp_path / target
    assert convert(source, written) == 0
    printed = capsys.readouterr().out
    assert f'{source}: ' in printed
    assert f'{written}: written\n' in printed
    expected = logits(source, images)
    assert np.abs(expected).max() > 0.1
    # The readers of the other code base take another GELU only where the file can say so.
    np.testing.assert_allclose(logits(written, images), expected, atol=1e-6)


def test_a_run_becomes_a_file_and_back(smoke_run, tmp_path, capsys):
    path = tmp_path / 'digits.npz'
    assert convert(smoke_run, path) == 0
    printed = capsys.readouterr().out
    assert f'run {smoke_run}, step 20: vit for 8 x 8 images, ' in printed
    assert 'note: class names' in printed
    flat, _ = files.read_arrays(path)
    assert flat['embedding/kernel'].shape == (2, 2, 1, 32)
    assert flat['head/kernel'].shape == (32, 10)


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    (tmp_path / 'taken.npz').write_text('mine')
    (tmp_path / 'config.json').write_text('{}')
    for argv, message in [
        ([folder / 'no.npz', tmp_path / 'out.npz'], 'no.npz'),
        ([folder / 'vit.npz', tmp_path / 'taken.npz'], 'taken.npz already exists'),
        ([folder / 'vit.npz', tmp_path], 'config.json already exists'),
        ([folder / 'vit.npz'], 'dst'),
        ([folder / 'vit.npz', tmp_path / 'd.pt'], '.pt'),
        ([folder / 'vit.npz', tmp_path / 'd.txt'], '.txt'),
        ([folder / 'vit.npz', tmp_path / 'taken.npz' / 'a.npz'], ('taken.npz', 'folder')),
        ([folder / 'vit.npz', tmp_path / 'taken.npz' / 'a'], ('taken.npz', 'folder')),
    ]:
        assert convert(*argv) == 2
        captured = capsys.readouterr()
        assert captured.out == ''
        assert captured.err.startswith('error: ')
        assert captured.err.count('\n') == 1
        assert mentions(captured.err, message)
    assert (tmp_path / 'taken.npz').read_text() == 'mine'


@pytest.mark.parametrize('name', ['vit', 'bit'])
def test_names_of_classes_come_along(folder, tmp_path, name):
    names = ('ant', 'bee', 'cat', 'dog', 'emu')
    imported = dataclasses.replace(load.read(folder / f'{name}.npz'), class_names=names)
    assert load.read(folder / f'{name}.npz').class_names == ()
    interop.write(imported, tmp_path / 'folder')
    assert load.open_model(tmp_path / 'folder').class_names == names


@pytest.mark.parametrize('name', ['out.safetensors', 'out.npz'])
def test_files_are_as_open_as_others(folder, tmp_path, name):
    (tmp_path / 'other').touch()
    assert convert(folder / 'bit.npz', tmp_path / name) == 0
    assert (tmp_path / name).stat().st_mode == (tmp_path / 'other').stat().st_mode


def test_a_run_knows_its_classes(smoke_run):
    assert load.read(smoke_run).class_names == tuple('0123456789')


@pytest.mark.parametrize(
    ('name', 'value', 'text'),
    [
        ('head/bias', np.full(5, np.nan), 'head/bias has NaN'),
        ('head/bias', np.full(5, 1e300), 'head/bias has NaN'),
        ('embedding/kernel', np.float32(1), 'cannot have shape ()'),
        ('Transformer/encoderblock_1000000000000/LayerNorm_0/bias', np.ones(16), 'block 10000'),
    ],
)
def test_odd_arrays_are_one_line(folder, tmp_path, capsys, name, value, text):
    flat, _ = files.read_arrays(folder / 'vit.npz')
    files.write_npz(tmp_path / 'odd.npz', flat | {name: value})
    assert convert(tmp_path / 'odd.npz', tmp_path / 'out.npz') == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and text in message and not (tmp_path / 'out.npz').exists()


@pytest.mark.parametrize('odd', [{'id2label': {'x': 1}}, {'num_attention_heads': 'two'}])
def test_odd_configs_are_one_line(folder, tmp_path, capsys, odd):
    assert convert(folder / 'vit.npz', tmp_path / 'hf') == 0
    flat, config = files.read_arrays(tmp_path / 'hf')
    files.write_safetensors(tmp_path / 'hf', flat, config | odd)
    capsys.readouterr()
    assert convert(tmp_path / 'hf', tmp_path / 'out.npz') == 2
    assert capsys.readouterr().err.count('\n') == 1


@pytest.mark.fault(79)
@pytest.mark.parametrize('replaced', [0, 1, 2])
def test_a_conversion_that_is_killed_leaves_no_arrays_without_their_config(
    folder, tmp_path, monkeypatch, capsys, replaced
):
    """The next try names the file to remove; every file that exists is complete."""
    replace, written = os.replace, []

    def killed(source, target):
        if len(written) == replaced:
            raise Killed
        replace(source, target)
        written.append(target.name)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', killed)
        with pytest.raises(Killed):
            convert(folder / 'vit.npz', tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    assert cli.main(['inspect', '--checkpoint', str(tmp_path)]) == 2
    again = convert(folder / 'vit.npz', tmp_path)
    assert again == (2 if written else 0)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == (2 if written else 1)
    assert not written or mentions(errors[1], 'already', 'exists')


@pytest.mark.fault(108)
def test_nothing_is_written_into_the_checkpoints_of_a_run(smoke_run, tmp_path, monkeypatch, capsys):
    """Nor over one of its files, by any command."""
    run = shutil.copytree(smoke_run, tmp_path / 'run')
    monkeypatch.chdir(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob('*'))
    digits = ('--config', f'{os.path.dirname(__file__)}/../../experiments/vit/digits.py:smoke')
    for command, flag, target in (
        (('convert', 'run'), (), 'checkpoints/'),
        (('convert', 'run'), (), 'checkpoints/20/x.npz'),
        (('convert', 'run'), (), 'checkpoints/new/x.npz'),
        (('pack', 'digits'), (), 'checkpoints/packed'),
        (('train', *digits), ('--workdir',), 'checkpoints/inner'),
        (('scaling', 'collect', 'run'), ('--output',), 'metrics.jsonl'),
        (('data', *digits), ('--out',), 'checkpoints/20/a.png'),
        (('report', 'run'), ('--out',), 'checkpoints/r.html'),
    ):
        assert cli.main([*command, *flag, f'run/{target}']) == 2, command
        shown = capsys.readouterr().err
        assert mentions(shown, 'checkpoints') or mentions(shown, 'belongs', 'itself')
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob('*'))
