"""`pack`: what is packed is read back the same, whatever happens on the way."""

import io
import json
import logging
import sys

import numpy as np
import pytest
from helpers import loading
from helpers.messages import mentions
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.data import packing
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.storage import lock


@pytest.fixture
def flowers(tmp_path):
    """JPEG files of noise, 12 for training and 4 for tests, of two classes."""
    root = tmp_path / 'flowers'
    random = np.random.default_rng(0)
    for split, count in (('train', 6), ('test', 2)):
        for name in ('daisy', 'rose'):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 255, (20 + i, 30, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / name / f'{i}.jpg', quality=80)
    return root


def pack(source, out, *flags):
    return main(['pack', str(source), str(out), '--workers', '0', '--per-shard', '5', *flags])


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def assert_same_examples(first, second):
    assert len(first) == len(second)
    assert first.info == second.info
    for i in range(len(first)):
        a, b = first[i], second[i]
        assert a.keys() == b.keys()
        for key, value in a.items():
            np.testing.assert_array_equal(value, b[key], err_msg=key)


def test_what_is_packed_is_read_back(flowers, tmp_path, capsys):
    out = tmp_path / 'out'
    assert pack(f'folder:{flowers}', out, '--split', 'train', '--split', 'test') == 0
    printed = capsys.readouterr().out
    assert 'train: 12 examples in 3 shards' in printed
    assert 'test: 4 examples in 1 shards' in printed
    for split in ('train', 'test'):
        source = open_source(f'folder:{flowers}', split)
        packed = open_source(f'packed:{out}', split)
        assert_same_examples(source, packed)
        np.testing.assert_array_equal(packed.labels(), source.labels())
        np.testing.assert_array_equal(packed.class_counts(), source.class_counts())
    stored = open_source(f'packed:{out}', 'test').encoded(0)['image']
    files = [path.read_bytes() for path in (flowers / 'test').rglob('*.jpg')]
    assert stored in files, 'the files themselves, not encoded anew'


@pytest.mark.parametrize('source', ['digits', 'scenes:20', 'synthetic:copy'])
def test_sources_without_files_lose_nothing(source, tmp_path, capsys):
    assert pack(source, tmp_path / 'out', '--split', 'train=train[:7]') == 0
    assert_same_examples(
        open_source(source, 'train[:7]'), open_source(f'packed:{tmp_path}/out', 'train')
    )


def test_images_are_reduced_if_asked_for(flowers, tmp_path):
    out = tmp_path / 'out'
    assert pack(f'folder:{flowers}', out, '--shorter-side', '22', '--quality', '95') == 0
    packed, source = (
        open_source(f'packed:{out}', 'train'),
        open_source(f'folder:{flowers}', 'train'),
    )
    for i in range(12):
        height, _ = source[i]['image'].shape[:2]
        if height <= 22:
            np.testing.assert_array_equal(packed[i]['image'], source[i]['image'])
        else:
            assert packed[i]['image'].shape == (22, round(30 * 22 / height), 3)
    assert json.loads((out / 'manifest.json').read_text())['options'] == {
        'shorter_side': 22,
        'quality': 95,
    }


def test_images_with_objects_are_not_reduced(tmp_path, capsys):
    assert pack('scenes:20', tmp_path / 'out', '--shorter-side', '8') == 2
    assert "--shorter-side cannot resize 'boxes'" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_write_the_same_bytes(flowers, tmp_path):
    single, several = tmp_path / 'one', tmp_path / 'several'
    assert pack(f'folder:{flowers}', single) == 0
    assert pack(f'folder:{flowers}', several, '--workers', '2') == 0
    assert contents(single) == contents(several)


@pytest.mark.slow
def test_beam_writes_the_same_bytes(flowers, tmp_path, capsys):
    pytest.importorskip('apache_beam', reason="pip install -e '.[beam]', into its own environment")
    splits = ('--split', 'train', '--split', 'test')
    assert pack(f'folder:{flowers}', tmp_path / 'one', *splits) == 0
    argv = ['pack', f'folder:{flowers}', str(tmp_path / 'beam'), '--per-shard', '5', *splits]
    assert main([*argv, '--beam=--runner=DirectRunner']) == 0
    assert contents(tmp_path / 'one') == contents(tmp_path / 'beam')
    for file in (flowers / 'train' / 'rose').iterdir():
        file.write_bytes(b'no image')
    argv[2] = str(tmp_path / 'broken')
    capsys.readouterr()
    assert main([*argv, '--beam=--runner=DirectRunner']) == 2
    printed = capsys.readouterr().err
    assert 'error: --beam: ' in printed and mentions(printed, '3', 'tolerated')
    assert not (tmp_path / 'broken' / 'manifest.json').exists()


def test_beam_where_it_is_not_installed(flowers, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'apache_beam', None)
    argv = ['pack', f'folder:{flowers}', str(tmp_path / 'out'), '--beam=']
    assert main(argv) == 2
    assert mentions(capsys.readouterr().err, '--beam', 'apache_beam', "'.[beam]'")
    assert not (tmp_path / 'out').exists()
    assert main([*argv, '--workers', '2']) == 2
    assert '--workers' in capsys.readouterr().err


@pytest.mark.fault(88)
def test_an_interrupted_packing_goes_on(flowers, tmp_path, monkeypatch, capsys):
    uninterrupted, out = tmp_path / 'whole', tmp_path / 'out'
    assert pack(f'folder:{flowers}', uninterrupted) == 0
    written = packing.write_shard

    def interrupted(job, at):
        if at.number == 1:
            raise KeyboardInterrupt
        return written(job, at)

    with monkeypatch.context() as patch:
        patch.setattr(packing, 'write_shard', interrupted)
        job = packing.Job(f'folder:{flowers}', {'train': 'train'}, str(out), 5)
        with pytest.raises(KeyboardInterrupt):
            packing.pack(job, job.shards(), 0, print)
    assert pack(f'folder:{flowers}', out, '--per-shard', '6') == 2
    assert '"per_shard": ' in capsys.readouterr().err
    first = out / 'train-00000-of-00003.array_record'
    before = first.stat().st_mtime_ns
    assert pack(f'folder:{flowers}', out) == 0
    assert first.stat().st_mtime_ns == before, 'a finished shard stays'
    assert contents(out) == contents(uninterrupted)


def test_two_processes_do_not_write_one_folder(flowers, tmp_path, capsys):
    out = tmp_path / 'out'
    with lock.hold(out):
        assert pack(f'folder:{flowers}', out) == 2
        assert str(out) in capsys.readouterr().err
        assert contents(out).keys() == {lock.LOCK}
    assert pack(f'folder:{flowers}', out) == 0
    assert lock.LOCK not in contents(out)


def test_broken_files_are_left_out_and_named(flowers, tmp_path, caplog):
    (flowers / 'train' / 'rose' / '2.jpg').write_bytes(b'no image')
    with caplog.at_level(logging.WARNING):
        assert pack(f'folder:{flowers}', tmp_path / 'out') == 0
    assert 'rose/2.jpg' in caplog.text
    packed = open_source(f'packed:{tmp_path}/out', 'train')
    assert len(packed) == len(packed.labels()) == 11


def test_too_many_broken_files_are_refused(flowers, tmp_path, capsys):
    for file in (flowers / 'train' / 'rose').iterdir():
        file.write_bytes(b'no image')
    assert pack(f'folder:{flowers}', tmp_path / 'out') == 2
    assert mentions(capsys.readouterr().err, '3', 'tolerated')
    assert not (tmp_path / 'out' / 'manifest.json').exists()


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--per-shard', '0'], '--per-shard 0: must be in 1..'),
        (['--quality', '101'], '--quality 101'),
        (['--workers', '-1'], '--workers -1'),
        (['--split', '../x=train'], "--split '../x'"),
        (['--split', 'val'], "unknown split 'val'"),
    ],
)
def test_wrong_flags(flowers, tmp_path, capsys, flags, message):
    assert pack(f'folder:{flowers}', tmp_path / 'out', *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_a_folder_with_other_files_is_refused(flowers, tmp_path, capsys):
    assert pack(f'folder:{flowers}', flowers) == 2
    assert 'other files' in capsys.readouterr().err
    assert pack(f'folder:{flowers}', tmp_path / 'out') == 0
    assert pack(f'folder:{flowers}', tmp_path / 'out') == 2
    assert 'already' in capsys.readouterr().err


@pytest.fixture
def packed(flowers, tmp_path):
    assert pack(f'folder:{flowers}', tmp_path / 'out') == 0
    return tmp_path / 'out'


def test_batches_do_not_depend_on_threads_and_workers(packed):
    loading.assert_read_alike(f'packed:{packed}', 8)


def replace_in_manifest(folder, old, new):
    file = folder / 'manifest.json'
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.fault(85)
@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda out: (out / 'manifest.json').unlink(), r'manifest\.json.*exist'),
        (lambda out: (out / 'manifest.json').write_text('['), 'manifest.*packed'),
        (lambda out: replace_in_manifest(out, '"format": 1', '"format": 9'), 'format 9, not 1'),
        (
            lambda out: replace_in_manifest(out, '"train-00001', '"../train-00001'),
            r"lists '\.\./train-00001.*outside",
        ),
        (lambda out: (out / 'train-00001-of-00003.array_record').unlink(), 'is missing'),
        (
            lambda out: (out / 'train-00001-of-00003.array_record').write_bytes(b'short'),
            '5 of .* bytes.*copy',
        ),
    ],
    ids=['absent', 'no JSON', 'newer', 'outside', 'missing', 'cut off'],
)
def test_damaged_folders_are_refused_in_one_line(packed, damage, message):
    damage(packed)
    with pytest.raises(UserError, match=message) as error:
        open_source(f'packed:{packed}', 'train')
    assert '\n' not in str(error.value)


def test_labels_that_do_not_fit_are_refused(packed):
    content = io.BytesIO()
    np.save(content, np.zeros(3, np.int64))
    (packed / 'train.labels.npy').write_bytes(content.getvalue())
    with pytest.raises(UserError, match='has 3 of 12 labels'):
        open_source(f'packed:{packed}', 'train').labels()
    content = io.BytesIO()
    np.save(content, np.full(12, 1.5))
    (packed / 'train.labels.npy').write_bytes(content.getvalue())
    with pytest.raises(UserError, match='float64'):
        open_source(f'packed:{packed}', 'train').labels()


def test_a_label_that_is_no_whole_number_is_named(flowers, tmp_path, monkeypatch):
    encode = packing.packed.encode
    monkeypatch.setattr(
        packing.packed, 'encode', lambda r: encode(r | ({'label': 1.5} if r['label'] else {}))
    )
    job = packing.Job(f'folder:{flowers}', {'train': 'train'}, str(tmp_path / 'out'))
    with pytest.raises(UserError, match=r'record \d: label 1\.5'):
        packing.pack(job, job.shards(), 0, lambda _: None)


@pytest.mark.fault(85)
def test_a_shard_with_other_bytes_has_broken_records(packed):
    file = packed / 'train-00000-of-00003.array_record'
    file.write_bytes(bytes(file.stat().st_size))
    source = open_source(f'packed:{packed}', 'train')
    with pytest.raises(Exception, match=r'train-00000-of-00003\.array_record record 0'):
        source[0]
    assert list(source.broken) == [0]


def test_the_listing_is_that_of_the_manifest(packed):
    before = open_source(f'packed:{packed}', 'train').listing()
    labels = packed / 'train.labels.npy'
    np.save(labels, 1 - np.load(labels))
    relabeled = open_source(f'packed:{packed}', 'train').listing()
    assert relabeled.examples != before.examples and relabeled.contents == before.contents
    digest = json.loads((packed / 'manifest.json').read_text())['splits']['train'][0]['sha256']
    replace_in_manifest(packed, digest, '0' * 64)
    other = open_source(f'packed:{packed}', 'train').listing()
    assert other.examples == relabeled.examples and other.contents != before.contents


OWN = """
import numpy as np
from vit_jax.data.sources import digits

class Source(digits.Source):
    def __getitem__(self, index):
        record = dict(super().__getitem__(index))
        record['image'] = record['image'].astype(np.float32) / 3
        if index == 2:
            record['image'][0, 0] = np.nan
        return record
"""


def test_images_of_other_types_are_stored_unchanged(tmp_path, monkeypatch, capsys, caplog):
    (tmp_path / 'float_lab').mkdir()
    (tmp_path / 'float_lab' / 'digits.py').write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ['float_lab.digits:', tmp_path / 'out', '--split', 'train=train[:20]']
    assert pack(*argv) == 0
    assert "'image' holds nan" in caplog.text
    source, stored = (
        open_source('float_lab.digits:', 'train'),
        open_source(f'packed:{argv[1]}', 'train'),
    )
    assert len(stored) == 19
    assert stored[5]['image'].dtype == np.float32
    np.testing.assert_array_equal(stored[5]['image'], source[6]['image'])
    argv[1] = tmp_path / 'small'
    assert pack(*argv, '--shorter-side', '4') == 2
    assert 'float32' in capsys.readouterr().err
