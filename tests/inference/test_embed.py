"""Features of images and texts: their values, files, interruption and mistakes."""

import functools
import shutil
import tarfile

import jax
import numpy as np
import pytest
from helpers import transformers_clip, vit_mae
from helpers.messages import mentions, says
from helpers.object_servers import SCHEMES, serve_bucket
from PIL import Image
from pyarrow import parquet

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.inference import embed, feature_files
from vit_jax.models import vit
from vit_jax.storage import lock, paths
from vit_jax.viz import features

LAYERS = ['--features', 'class,mean,patches', '--layer', '-2..-1']


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """A ViT with a class token and two blocks, as transformers would save it."""
    pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    from helpers.transformers_models import perturbed

    shape = {'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2}
    config = transformers.ViTConfig(**shape, intermediate_size=24, patch_size=4, image_size=12)
    folder = tmp_path_factory.mktemp('vit')
    perturbed(transformers.ViTModel(config, add_pooling_layer=False)).save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Seven images of several sizes in a folder."""
    folder, rng = tmp_path_factory.mktemp('photos'), np.random.default_rng(0)
    for i in range(7):
        pixels = rng.integers(0, 256, (12 + i, 14, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f'{i}.png')
    return folder


def run(*words):
    return cli.main(['embed', *map(str, words)])


@pytest.mark.slow
def test_values_are_those_of_transformers(checkpoint, photos):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    trained = embed.open_for_features(checkpoint)
    files = sorted(photos.iterdir())
    pixels = [embed.ImageInputs.from_images(trained, files, None).photo(i).image for i in range(7)]
    batch = jax.jit(trained.task.inputs)({'image': np.stack(pixels)})[0]
    model = transformers.ViTModel.from_pretrained(checkpoint, add_pooling_layer=False).eval()
    with torch.no_grad():
        tensor = torch.from_numpy(np.array(batch).transpose(0, 3, 1, 2))
        theirs = model(tensor, output_hidden_states=True)
    expected = {
        'class_1': theirs.hidden_states[1][:, 0],
        'mean_1': theirs.hidden_states[1][:, 1:].mean(1),
        'patches_2': theirs.hidden_states[2][:, 1:],
    }
    kinds = ['class', 'mean', 'patches']
    found = vit_jax.embed(
        checkpoint, files, features=kinds, layers=[1, -1], normalized=False, batch_size=4
    )
    assert list(found) == [f'{kind}_{layer}' for kind in kinds for layer in (1, 2)]
    for name, values in expected.items():
        values = values.numpy()
        np.testing.assert_allclose(found[name], values, atol=2e-5 * np.abs(values).max(), rtol=0)
    last = theirs.last_hidden_state[:, 0].numpy()
    for name in ('embedding', 'class'):
        one = vit_jax.embed(checkpoint, files[3], features=name)
        np.testing.assert_allclose(one[name], last[3], atol=2e-5 * np.abs(last).max(), rtol=0)


@pytest.mark.slow
def test_an_interrupted_file_is_continued_and_ends_the_same(
    checkpoint, photos, tmp_path, monkeypatch, capsys, one_device
):
    """Parts that are done are not computed again; a bad file is named by both calls."""
    shutil.copytree(photos, tmp_path / 'in')
    (tmp_path / 'in' / '2_bad.png').write_text('not a picture')
    monkeypatch.setattr(feature_files, 'PART_ROWS', 4)
    computed, write = [], paths.write_atomic

    def write_and_stop(file, content):
        if file.name == '4.npz':
            raise KeyboardInterrupt
        write(file, content)

    class Counting(embed.Embedder):
        def rows(self, numbers, *rest):
            computed.append(list(numbers))
            return super().rows(numbers, *rest)

    for ending in ('npz', 'parquet'):
        words = [checkpoint, tmp_path / 'in', *LAYERS, '--batch-size', 2]
        whole, resumed = (tmp_path / f'{name}.{ending}' for name in ('whole', 'resumed'))
        assert run(*words, '--out', whole) == 1
        first = capsys.readouterr()
        named, counted = first.err.splitlines()
        assert says(named, '2_bad.png') and says(counted, '1 of 8 images')
        with monkeypatch.context() as patched:
            patched.setattr(paths, 'write_atomic', write_and_stop)
            assert run(*words, '--out', resumed) == 130
        assert not resumed.exists()
        capsys.readouterr()
        other = [checkpoint, tmp_path / 'in', '--batch-size', 2, '--out', resumed]
        assert run(*other) == 2
        assert says(capsys.readouterr().err, 'features', 'resumed', 'delete it')
        with monkeypatch.context() as patched:
            patched.setattr(embed, 'Embedder', Counting)
            computed.clear()
            assert run(*words, '--out', resumed) == 1
            assert run(*words, '--out', resumed) == 1  # it is finished
        assert computed == [[4, 5, 6, 7]]
        assert capsys.readouterr().err == 2 * first.err
        assert resumed.read_bytes() == whole.read_bytes()
        assert run(*other) == 2
        assert says(capsys.readouterr().err, 'features', 'layers')
        assert not list(tmp_path.glob('*.parts'))


@pytest.mark.slow
@pytest.mark.parametrize('ending', ['npz', 'parquet'])
def test_a_file_is_of_one_model_and_of_the_images_that_it_had(
    ending, checkpoint, photos, smoke_run, tmp_path, capsys
):
    image, out = tmp_path / 'a.png', tmp_path / f'a.{ending}'
    shutil.copy(photos / '0.png', image)
    assert run(checkpoint, image, '--out', out) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert run(smoke_run, image, '--out', out) == 2
    assert says(capsys.readouterr().err, 'model', 'file')
    shutil.copy(photos / '1.png', image)
    assert run(checkpoint, image, '--out', out) == 2
    assert says(capsys.readouterr().err, 'inputs')
    assert out.read_bytes() == before
    out.write_text('of another program')
    assert run(checkpoint, image, '--out', out) == 2
    assert says(capsys.readouterr().err, str(out), 'this command')


def test_two_processes_do_not_write_one_file(checkpoint, photos, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'a.npz'
    with lock.hold(feature_files.parts_folder(out)):
        assert run(checkpoint, photos, '--out', out) == 2
    assert says(capsys.readouterr().err, str(out), 'another process', 'pid')
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with pytest.raises(UserError, match='single process'):
        vit_jax.embed(checkpoint, photos / '0.png')


@pytest.mark.long
@pytest.mark.parametrize('scheme', SCHEMES)
def test_a_file_in_a_bucket(scheme, checkpoint, photos, tmp_path, monkeypatch, capsys, one_device):
    """Its parts lie there too, so that another machine continues."""
    monkeypatch.setattr(feature_files, 'PART_ROWS', 4)
    words = [checkpoint, photos, *LAYERS, '--batch-size', 2]
    write = paths.write_atomic

    def write_and_stop(file, content):
        if file.name == '4.npz':
            raise KeyboardInterrupt
        write(file, content)

    with serve_bucket(scheme) as bucket:
        for ending in ('npz', 'parquet'):
            local, remote = tmp_path / f'a.{ending}', f'{bucket}/a.{ending}'
            assert run(*words, '--out', local) == 0
            with monkeypatch.context() as patched:
                patched.setattr(paths, 'write_atomic', write_and_stop)
                assert run(*words, '--out', remote) == 130
            assert not paths.path(remote).exists()
            assert '0.npz' in paths.files(paths.path(f'{remote}.parts'))
            near = tmp_path / f'{ending}.png'
            assert run(*words, '--out', remote, '--neighbors', near) == 0
            assert run(*words, '--out', remote) == 0
            assert paths.path(remote).read_bytes() == local.read_bytes()
            assert paths.files(paths.path(f'{remote}.parts')) == []
            capsys.readouterr()
            assert run(*words[:2], '--out', remote) == 2
            assert says(capsys.readouterr().err, 'holds other features')


def test_both_formats_hold_the_same(checkpoint, photos, tmp_path):
    for ending in ('npz', 'parquet'):
        assert run(checkpoint, photos, *LAYERS, '--out', tmp_path / f'a.{ending}') == 0
    table = parquet.read_table(tmp_path / 'a.parquet')
    with np.load(tmp_path / 'a.npz') as stored:
        assert table.column_names == stored.files
        assert stored['image'].tolist() == [str(photos / f'{i}.png') for i in range(7)]
        assert table['image'].to_pylist() == stored['image'].tolist()
        assert stored['patches_2'].shape == (7, 9, 16)
        for name in stored.files[1:]:
            np.testing.assert_array_equal(
                np.array(table[name].to_pylist(), np.float32), stored[name]
            )
        for file in ('a.npz', 'a.parquet'):
            found = feature_files.read_column(tmp_path / file, 'mean')
            np.testing.assert_array_equal(found, stored['mean_2'])


@pytest.mark.slow
def test_sources_and_tars(checkpoint, photos, smoke_run, tmp_path):
    """Records have the labels of their source, and a tar file those of its members."""
    words = ['digits', '--split', 'test[:5]', '--out', tmp_path / 'a.npz']
    assert run(smoke_run, *words) == 0
    with np.load(tmp_path / 'a.npz') as stored:
        source = open_source('digits', 'test[:5]')
        assert stored['label'].tolist() == source.labels().tolist()
        images = [source[i]['image'] for i in range(5)]
        found = vit_jax.embed(smoke_run, images)['embedding']
        np.testing.assert_allclose(stored['embedding'], found, atol=1e-6)
    with tarfile.open(tmp_path / 'a.tar', 'w') as tar:
        for file in sorted(photos.iterdir()):
            tar.add(file, file.name)
    assert run(checkpoint, tmp_path / 'a.tar', '--out', tmp_path / 'b.npz') == 0
    assert run(checkpoint, photos, '--out', tmp_path / 'c.npz') == 0
    with np.load(tmp_path / 'b.npz') as tar, np.load(tmp_path / 'c.npz') as folder:
        np.testing.assert_array_equal(tar['embedding'], folder['embedding'])


@pytest.mark.slow
def test_texts_of_a_clip(tmp_path, monkeypatch, capsys):
    pytest.importorskip('transformers')
    model = transformers_clip.reference()
    folder = transformers_clip.save(model, tmp_path / 'clip')
    ids = transformers_clip.batch()['caption']

    def encoder(trained):
        return lambda field, text: ids[int(text)]

    monkeypatch.setattr(embed, 'text_encoder', encoder)
    found = vit_jax.embed(folder, texts=['0', '3'])['embedding']
    expected = transformers_clip.theirs(model, transformers_clip.batch()).text_embeds.numpy()
    np.testing.assert_allclose(found, expected[[0, 3]], atol=1e-5)
    assert run(folder, '--texts', '0; 3', '--out', tmp_path / 'a.npz') == 0
    with np.load(tmp_path / 'a.npz') as stored:
        assert stored['text'].tolist() == ['0', '3']
        np.testing.assert_allclose(stored['embedding'], found, atol=1e-6)
    capsys.readouterr()
    assert run(folder, '--texts', '0', '--features', 'class', '--out', tmp_path / 'a.npz') == 2
    assert says(capsys.readouterr().err, "'embedding'")


@pytest.mark.slow
def test_the_encoder_of_an_autoencoder_has_features(photos, tmp_path):
    """They are the tokens of the ViT that `vit_jax.load` returns."""
    pytest.importorskip('transformers')
    vit_mae.reference().save_pretrained(tmp_path)
    image = photos / '0.png'
    found = vit_jax.embed(tmp_path, image, features='patches')['patches']
    trained = embed.open_for_features(tmp_path)
    pixels = embed.ImageInputs.from_images(trained, [image], None).photo(0).image
    model, variables = vit_jax.load(tmp_path)
    tokens = jax.jit(model.apply)(variables, pixels[None] / np.float32(127.5) - 1)['tokens']
    np.testing.assert_allclose(found, tokens[0, 1:], atol=1e-5 * np.abs(tokens).max())


@pytest.mark.slow
def test_mistakes_are_one_line(checkpoint, photos, smoke_run, tmp_path, capsys):
    out, image = tmp_path / 'a.npz', photos / '0.png'
    for words, message in [
        ([checkpoint, '--out', out], '--texts'),
        ([checkpoint, image, '--texts', 'a', '--out', out], '--texts'),
        ([checkpoint, image], 'name an output'),
        ([checkpoint, image, '--out', tmp_path / 'a.json'], '.parquet or .npz'),
        ([checkpoint, image, '--pca', tmp_path / 'a.txt'], '--pca'),
        ([checkpoint, image, '--out', out, '--background'], '--background'),
        ([checkpoint, image, '--out', out, '--features', 'clas'], "'class'"),
        ([checkpoint, image, '--out', out, '--layer', '7'], 'layer 7 does not exist'),
        ([checkpoint, image, '--out', out, '--layer', '-1..-4'], '--layer'),
        ([checkpoint, image, '--out', out, '--layer', '1', '--features', 'embedding'], 'layers'),
        ([checkpoint, '--texts', 'a', '--out', out], 'embeds no texts'),
        ([checkpoint, '--texts', 'a;;b', '--out', out], 'text 2 is empty'),
        ([checkpoint, tmp_path / 'no.png', '--out', out], 'no.png'),
        ([checkpoint, image, '--neighbors', tmp_path / 'a.png'], '--neighbors'),
        ([checkpoint, 'digits', '--split', 'tset', '--out', out], 'tset'),
        ([smoke_run, image, '--out', out, '--features', 'class'], 'no class token'),
        ([tmp_path / 'no', image, '--out', out], 'no'),
    ]:
        assert run(*words) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ''
        assert captured.err.startswith('error: ')
        assert captured.err.count('\n') == 1, captured.err
        assert mentions(captured.err, message)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_pictures(checkpoint, photos, tmp_path):
    pca, near = tmp_path / 'pca.png', tmp_path / 'near.png'
    assert run(checkpoint, photos, '--pca', pca, '--neighbors', near, '--background') == 0
    for file in (pca, near):
        with Image.open(file) as picture:
            assert min(picture.size) > 200


def test_the_foreground_is_what_lies_inside():
    """A disk of another feature in two images gets colors, and the rest is black."""
    rows, columns = np.mgrid[:8, :8]
    disk = (rows - 3.5) ** 2 + (columns - 3.5) ** 2 < 6
    noise = np.random.default_rng(0).normal(scale=0.1, size=(2, 64, 5))
    patches = noise + 4 * disk.ravel()[:, None] * np.array([1, 1, 0, 0, 0])
    for sign in (1, -1):
        colors = features.component_colors(list(sign * patches), [(8, 8), (8, 8)])
        for image in colors:
            np.testing.assert_array_equal(image.any(axis=-1), disk.ravel())
    whole = features.component_colors(list(patches), [(8, 8), (8, 8)], background=True)
    found = np.concatenate(whole).astype(float)
    components = features.principal_components(patches.reshape(-1, 5), 3)
    for i in range(3):  # but for the ends of the range, which are cut
        assert np.corrcoef(found[:, i], components[:, i])[0, 1] > 0.98
    assert found.any(axis=-1).mean() > 0.95


def test_components_are_those_of_an_svd():
    rows = np.random.default_rng(0).normal(size=(50, 6)) * np.arange(1, 7)
    found = features.principal_components(rows, 3)
    centered = rows - rows.mean(0)
    left, scale, _ = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(np.abs(found), np.abs(left * scale)[:, :3], atol=1e-9)


def test_nearest_neighbors():
    angles = np.array([0.0, 0.1, 3.0, 3.3, 1.5])
    points = np.stack([np.cos(angles), np.sin(angles)], 1) * np.arange(1, 6)[:, None]
    order, cosines = features.nearest_neighbors(points, np.array([0, 2]), 2)
    assert order.tolist() == [[1, 4], [3, 4]]
    np.testing.assert_allclose(cosines[:, 0], np.cos([0.1, 0.3]))


@pytest.mark.slow
@pytest.mark.parametrize('scan', [False, True])
def test_scanned_and_recomputed_blocks_return_their_states(scan):
    model = vit.Model(**vit.variant('mu/4') | {'depth': 2, 'scan': scan, 'remat': True})
    images = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype(np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), images)
    apply = jax.jit(functools.partial(model.hidden_states, normalized=True))
    outputs, states = apply(variables, images)
    assert [state.name for state in states] == ['embedding', 'encoder/block_0', 'encoder/block_1']
    np.testing.assert_allclose(states[-1].tokens, outputs['tokens'], atol=1e-6)
    assert not np.allclose(states[1].tokens, states[2].tokens)
