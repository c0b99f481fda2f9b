"""`packed:` and `tfds:` in object storage give what they give on a disk."""

import io
import json
import logging
import os
import pathlib
import pickle
import time

import numpy as np
import pytest
from helpers import flaky_server, mounts
from helpers.object_servers import SCHEMES, forget_connections, serve_bucket
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.data.sources import open_source
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.runtime import caches
from vit_jax.storage import paths, ranges, servers

SHARD = 'train-00001-of-00002.array_record'


@pytest.fixture(scope='module', params=SCHEMES)
def bucket(request):
    with serve_bucket(request.param) as url:
        yield url


@pytest.fixture(scope='module')
def local(tmp_path_factory):
    """Twelve images packed in two shards."""
    root = tmp_path_factory.mktemp('flowers')
    drawn = np.random.default_rng(0)
    for name in ('daisy', 'rose'):
        (root / 'train' / name).mkdir(parents=True)
        for i in range(6):
            pixels = drawn.integers(0, 255, (20 + i, 30, 3), np.uint8)
            Image.fromarray(pixels).save(root / 'train' / name / f'{i}.jpg', quality=80)
    words = ['pack', f'folder:{root}', str(root / 'packed'), '--per-shard', '6', '--workers', '0']
    assert main(words) == 0
    return root / 'packed'


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(ranges, 'PAUSE', 0.01)


@pytest.fixture
def copied(local, bucket):
    """The same folder in the bucket; tests that change it give it another name."""
    return copy(local, f'{bucket}/packed')


def copy(local, url):
    target = paths.path(url)
    for file in local.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return url


def kept():
    return sorted(caches.folder('ranges').rglob('train-*.parts/*'))


def assert_same(one, other):
    assert len(one) == len(other) and one.info == other.info
    np.testing.assert_array_equal(one.labels(), other.labels())
    for i in range(len(one)):
        np.testing.assert_array_equal(one[i]['image'], other[i]['image'])


@pytest.mark.slow
def test_packed_data_of_a_bucket_are_those_of_the_disk(local, copied):
    there = open_source(f'packed:{copied}', 'train')
    assert_same(there, open_source(f'packed:{local}', 'train'))
    assert len(kept()) == 12
    assert_same(pickle.loads(pickle.dumps(there)), there)  # as in worker processes


@pytest.mark.slow
def test_packing_into_a_bucket_writes_the_same_bytes(local, bucket, capsys):
    out = f'{bucket}/direct'
    words = ['pack', f'folder:{local.parent}', out, '--per-shard', '6', '--workers', '0']
    assert main([*words[:-3], '7', *words[-2:]]) == 0
    assert main(words) == 2
    assert str(out) in capsys.readouterr().err
    paths.remove(paths.path(out))
    paths.path(f'{out}/{SHARD}').write_bytes((local / SHARD).read_bytes())
    assert main(words) == 2
    assert 'other files' in capsys.readouterr().err
    paths.remove(paths.path(out))
    assert main(words) == 0
    written = {
        name: paths.path(f'{out}/{name}').read_bytes() for name in paths.files(paths.path(out))
    }
    assert written == {file.name: file.read_bytes() for file in local.iterdir()}


def write_tfds(folder):
    tfds = pytest.importorskip('tensorflow_datasets')
    features = tfds.features.FeaturesDict(
        {
            'image': tfds.features.Image(shape=(4, 6, 3)),
            'label': tfds.features.ClassLabel(names=['cat', 'dog']),
        }
    )
    identity = tfds.core.DatasetIdentity(
        name='pets', version=tfds.core.Version('1.0.0'), data_dir=str(folder), module_name=''
    )
    folder.mkdir(parents=True)
    writer = tfds.core.SequentialWriter(
        tfds.core.DatasetInfo(builder=identity, features=features),
        max_examples_per_shard=5,
        file_format='array_record',
    )
    writer.initialize_splits(['train'])
    for i in range(12):
        file = io.BytesIO()
        Image.fromarray(np.full((4, 6, 3), i, np.uint8)).save(file, 'PNG')
        writer.add_examples({'train': [{'image': file.getvalue(), 'label': i % 2}]})
    writer.close_all()


@pytest.mark.slow
def test_prepared_data_of_a_bucket_are_those_of_the_disk(bucket, tmp_path, monkeypatch):
    write_tfds(tmp_path / 'tfds' / 'pets' / '1.0.0')
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
    here = open_source('tfds:pets', 'train')
    copy(tmp_path / 'tfds' / 'pets' / '1.0.0', f'{bucket}/tfds/pets/1.0.0')
    monkeypatch.setenv('TFDS_DATA_DIR', f'{bucket}/tfds')
    there = open_source('tfds:pets', 'train')
    assert_same(there, here)
    assert_same(pickle.loads(pickle.dumps(there)), here)
    with pytest.raises(UserError, match=r"unknown data set 'pats'; .* 'pets'"):
        open_source('tfds:pats', 'train')


def test_the_cache_keeps_its_bounds(copied, monkeypatch):
    source = open_source(f'packed:{copied}', 'train')
    sizes = [len(source.encoded(i)['image']) for i in range(12)]
    shards = sum(n.size for k, n in ranges.Folder(paths.path(copied)).files.items() if 'of' in k)
    monkeypatch.setenv(caches.LIMIT, '0')
    monkeypatch.setenv('XDG_CACHE_HOME', str(pathlib.Path(caches.folder('x')).parents[1] / 'none'))
    again = open_source(f'packed:{copied}', 'train')
    assert [len(again.encoded(i)['image']) for i in range(12)] == sizes
    assert not kept()
    # A hundredth of the padded shards is less than a third of the records in them.
    monkeypatch.setenv(caches.LIMIT, str(shards * 0.01 / 1e9))
    again = open_source(f'packed:{copied}', 'train')
    assert [len(again.encoded(i)['image']) for i in range(12)] == sizes
    assert 0 < len(kept()) < 12
    assert sum(file.stat().st_size for file in kept()) < 0.01 * shards
    monkeypatch.setenv(caches.LIMIT, 'much')
    with pytest.raises(UserError, match=r'VIT_JAX_CACHE_GB=much.*number'):
        open_source(f'packed:{copied}', 'train')


def test_what_is_old_makes_room(local, bucket, monkeypatch):
    size = sum(file.stat().st_size for file in local.glob('*-of-*'))
    monkeypatch.setenv(caches.LIMIT, str(1.4 * size / 1e9))

    def rooms(name):
        """The share of each folder that is kept once this one is opened."""
        open_source(f'packed:{copy(local, f"{bucket}/{name}")}', 'train')
        found = map(json.loads, (file.read_text() for file in abouts()))
        return {about['path'][-1]: about['bytes'] / size for about in found}

    def abouts():
        return caches.folder('ranges').glob(f'*/{ranges.ABOUT}')

    assert rooms('a') == {'a': 1}
    assert rooms('b') == {'a': 1, 'b': pytest.approx(0.4, abs=1e-3)}, 'a may be in use'
    for about in abouts():
        os.utime(about, (1e9, 1e9))
    assert rooms('b') == {'b': 1}


@pytest.mark.fault(98)
def test_a_full_cache_folder_is_a_warning(copied, tmp_path, caplog, monkeypatch):
    with mounts.small_disk(tmp_path / 'small', 16 << 10) as small:
        monkeypatch.setenv('XDG_CACHE_HOME', str(small))
        source = open_source(f'packed:{copied}', 'train')
        with caplog.at_level(logging.WARNING):
            assert all(source[i]['image'].size for i in range(12))
        (line,) = [text for text in caplog.messages if 'nothing more' in text]
        assert 'VIT_JAX_CACHE_GB' in line and '\n' not in line


@pytest.mark.fault(98)
def test_without_a_cache_folder_everything_is_read(copied, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    source = open_source(f'packed:{copied}', 'train')
    assert all(source[i]['image'].size for i in range(12))


@pytest.mark.fault(87)
def test_damaged_ranges_are_read_again(local, copied):
    there = open_source(f'packed:{copied}', 'train')
    assert all(there[i]['image'].size for i in range(12))
    for number, file in enumerate(kept()):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content if number % 2 else b'')
    for file in caches.folder('ranges').rglob('*.index'):
        file.write_bytes(b'damaged')
    assert_same(open_source(f'packed:{copied}', 'train'), open_source(f'packed:{local}', 'train'))


@pytest.mark.fault(97)
@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda data: data[: len(data) // 2], f'{SHARD} has .* bytes'),
        (lambda data: data[:-65536] + bytes(65536), f'{SHARD} .*copy'),
        (None, f'{SHARD} is missing'),
    ],
    ids=['cut off', 'index', 'missing'],
)
def test_shards_that_are_damaged_are_refused_in_one_line(local, bucket, damage, message, request):
    url = copy(local, f'{bucket}/{request.node.callspec.id.replace(" ", "_")}')
    shard = paths.path(url) / SHARD
    if damage is None:
        shard.unlink()
    else:
        shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        open_source(f'packed:{url}', 'train')
    assert '\n' not in str(error.value)


@pytest.mark.fault(97)
def test_an_index_of_other_records_is_refused(local, bucket):
    url = copy(local, f'{bucket}/other')
    manifest = paths.path(url) / 'manifest.json'
    text = manifest.read_text()
    assert '"examples": 6' in text
    manifest.write_text(text.replace('"examples": 6', '"examples": 7'))
    with pytest.raises(UserError, match=r'6 records.*7'):
        open_source(f'packed:{url}', 'train')


@pytest.mark.fault(97)
def test_damaged_bytes_in_a_bucket_are_a_broken_record(local, bucket):
    url = copy(local, f'{bucket}/bytes')
    shard = paths.path(url) / SHARD
    content = bytearray(shard.read_bytes())
    content[70:74] = bytes(4)  # in the header of the first chunk
    shard.write_bytes(bytes(content))
    source = open_source(f'packed:{url}', 'train')
    with pytest.raises(Exception, match=f'{SHARD} record 0'):
        source[6]
    assert list(source.broken) == [6]


@pytest.mark.fault(99)
def test_places_that_are_not_there(bucket):
    with pytest.raises(UserError, match='/nowhere'):
        open_source(f'packed:{bucket}/nowhere', 'train')


@pytest.mark.fault(99)
def test_without_a_network_it_is_said_in_seconds(monkeypatch):
    pytest.importorskip('gcsfs')
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', 'http://127.0.0.1:9')
    monkeypatch.setattr(servers, 'PAUSE', 0.01)
    with pytest.raises(UserError, match='nothing answers at 127') as error:
        open_source('packed:gs://bucket/packed', 'train')
    assert '\n' not in str(error.value)


@pytest.fixture(scope='module')
def server():
    """A bucket on s3:// with a server before it that has faults; and these."""
    import s3fs

    with (
        pytest.MonkeyPatch.context() as patch,
        serve_bucket('s3') as url,
        flaky_server.before(os.environ['AWS_ENDPOINT_URL']) as (place, faults),
    ):
        patch.setenv('AWS_ENDPOINT_URL', place)
        patch.setenv('AWS_MAX_ATTEMPTS', '1')
        patch.setattr(s3fs.S3FileSystem, 'retries', 1)
        forget_connections()
        yield url, faults


@pytest.fixture
def flaky(local, server):
    """A packed folder behind that server, without faults at first."""
    url, faults = server
    faults.of, faults.refused, faults.late, faults.cut, faults.asked = '', 0, 0.0, False, []
    return copy(local, f'{url}/packed'), faults


@pytest.mark.slow
@pytest.mark.fault(99)
def test_a_bucket_that_refuses_or_is_slow(flaky, local, monkeypatch):
    url, faults = flaky
    here, there = open_source(f'packed:{local}', 'train'), open_source(f'packed:{url}', 'train')
    faults.of, faults.refused = SHARD, 2
    np.testing.assert_array_equal(there[6]['image'], here[6]['image'])
    assert faults.refused == 0 and len(faults.asked) == 3, 'refused twice, then answered'
    assert all(found.startswith('bytes=') for _, found in faults.asked), 'a range, no whole shard'
    faults.refused = 1000
    with pytest.raises(servers.Unreachable, match=f'{SHARD} cannot be read, 4 tries in') as error:
        there[7]
    assert error.value.exit_code == EXIT_FAILED and '\n' not in str(error.value)
    assert not there.broken, 'an outage breaks no record'
    faults.refused, faults.late = 0, 0.6
    monkeypatch.setattr(ranges, 'SECONDS', 0.2)
    with pytest.raises(servers.Unreachable, match=r'no answer in 0\.2 s'):
        there[8]
    monkeypatch.setattr(ranges, 'SECONDS', 20.0)
    np.testing.assert_array_equal(there[8]['image'], here[8]['image'])


@pytest.mark.slow
@pytest.mark.fault(99)
@pytest.mark.parametrize('how', ['cut', 'refused'])
def test_a_run_folder_that_breaks_off_is_not_a_matter_of_credentials(flaky, how, capsys):
    """The reading of its config is cut, or answered by 503; time may mend both."""
    url, faults = flaky
    folder = f'{url.rpartition("/")[0]}/run'
    for name in ('config.json', 'metrics.jsonl'):
        paths.path(f'{folder}/{name}').write_bytes(b'{"seed": 0, "step": 1}' + b' ' * 100)
    setattr(faults, how, 1000)
    faults.of = 'config.json'
    assert main(['inspect', '--checkpoint', folder]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert folder in line and 'credentials' not in line


def test_records_that_are_expected_are_on_their_way_at_once(flaky):
    url, faults = flaky
    there = open_source(f'packed:{url}', 'train')
    faults.of, faults.late = 'array_record', 0.3
    began = time.monotonic()
    there.expect(range(12))
    assert all(there.encoded(i)['image'] for i in range(12))
    assert time.monotonic() - began < 12 * 0.3 / 2
