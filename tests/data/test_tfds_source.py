"""TFDS data, written by the tests themselves as ArrayRecord."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import loading
from PIL import Image

from vit_jax.data.sources import open_source
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

tfds = pytest.importorskip('tensorflow_datasets')
SIZES = {'train': 12, 'test': 5}


def png(value, shape=(4, 6, 3)):
    buffer = io.BytesIO()
    Image.fromarray(np.full(shape, value, np.uint8).squeeze()).save(buffer, 'PNG')
    return buffer.getvalue()


def write(
    folder, name, *, features=None, version='1.0.0', shape=(4, 6, 3), example=None, keys=None
):
    """Writes SIZES examples; image i of class i % 3 has the value i everywhere."""
    kind = isinstance(features, tfds.features.FeaturesDict)
    features = features or {
        'image': tfds.features.Image(shape=shape),
        'label': tfds.features.ClassLabel(names=['cat', 'dog', 'emu']),
        'id': tfds.features.Text(),
    }
    path = folder / name / version
    info = tfds.core.DatasetInfo(
        builder=tfds.core.DatasetIdentity(
            name=name.split('/')[0],
            version=tfds.core.Version(version),
            data_dir=str(path),
            module_name='',
        ),
        features=features if kind else tfds.features.FeaturesDict(features),
        supervised_keys=keys,
    )
    path.mkdir(parents=True)
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=5, file_format='array_record')
    writer.initialize_splits(list(SIZES))
    example = example or (lambda i: {'image': png(i, shape), 'label': i % 3, 'id': f'example {i}'})
    for split, size in SIZES.items():
        writer.add_examples({split: [example(i) for i in range(size)]})
    writer.close_all()
    return path


OWN_FEATURE = """
import tensorflow_datasets as tfds

class Note(tfds.features.Text):
    pass
"""


def test_a_source_of_ones_own_may_import_features(data_dir, monkeypatch):
    file = write(data_dir, 'odd') / 'features.json'
    own = file.read_text().replace(
        'tensorflow_datasets.core.features.text_feature.Text', 'odd_lab.features.Note'
    )
    assert own != file.read_text()
    file.write_text(own)
    (data_dir / 'odd_lab').mkdir()
    (data_dir / 'odd_lab' / 'features.py').write_text(OWN_FEATURE)
    (data_dir / 'odd_lab' / 'source.py').write_text(
        'import odd_lab.features\nfrom vit_jax.data.sources.tfds import Source\n'
    )
    monkeypatch.syspath_prepend(data_dir)
    with pytest.raises(UserError, match=r'odd_lab\.features'):
        open_source('tfds:odd', 'train')
    assert 'odd_lab.features' not in sys.modules
    assert open_source('odd_lab.source:odd', 'train')[4]['label'] == 1


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
    return tmp_path


def test_records(data_dir):
    write(data_dir, 'pets')
    source = open_source('tfds:pets', 'train')
    assert len(source) == 12
    assert source.info.num_classes == 3
    assert source.info.class_names == ('cat', 'dog', 'emu')
    for i in range(12):
        record = source[i]
        assert set(record) == {'image', 'label'}
        np.testing.assert_array_equal(record['image'], np.full((4, 6, 3), i, np.uint8))
        assert record['label'] == i % 3
    np.testing.assert_array_equal(source.labels(), np.arange(12) % 3)
    assert source.class_counts() is None  # it takes reading all records


@pytest.mark.parametrize(
    ('keys', 'pair'), [(('en', 'de'), ('en', 'de')), (None, ('de', 'en')), (('de', 'en'),) * 2]
)
def test_translations(data_dir, keys, pair):
    features = tfds.features.Translation(languages=('de', 'en'))
    sentence = lambda i: {'de': f'Satz {i}: ü', 'en': f'sentence {i}'}  # noqa: E731
    write(data_dir, 'sentences', features=features, example=sentence, keys=keys)
    source = open_source('tfds:sentences', 'train[:3]')
    assert source.info.num_classes == 0
    for i in range(3):
        assert source[i] == dict(
            zip(('source', 'target'), (sentence(i)[language] for language in pair), strict=True)
        )
    with pytest.raises(UserError, match='have no classes'):
        source.labels()


def test_splits(data_dir):
    write(data_dir, 'pets')
    source = open_source('tfds:pets', 'test[:40%]+train[:1 per class]')
    assert [int(source[i]['image'][0, 0, 0]) for i in range(len(source))] == [0, 1, 0, 1, 2]
    with pytest.raises(UserError, match=r"unknown split 'tests'; .* 'test'"):
        open_source('tfds:pets', 'tests')


def test_gray_images_stay_gray(data_dir):
    write(data_dir, 'letters', shape=(4, 4, 1))
    assert open_source('tfds:letters', 'train')[3]['image'].shape == (4, 4, 1)


def test_versions_and_configs(data_dir):
    for version in ('1.9.0', '1.10.0'):
        write(data_dir, 'pets', version=version)
    write(data_dir, 'subset/1pct')
    write(data_dir, 'subset/10pct')
    for name in ('incomplete.AB1_1.11.0', '9.9.9.bak', '9.9.9.incompleteAB', '9.9.9_old'):
        shutil.copytree(
            data_dir / 'pets' / '1.9.0', data_dir / 'pets' / name
        )  # left by TFDS or people
    assert len(open_source('tfds:pets:1.9.0', 'train')) == 12
    record = open_source('tfds:pets', 'train').record_name(0)
    assert record == 'tfds:pets train record 0'
    assert len(open_source('tfds:subset/10pct', 'train')) == 12
    assert len(open_source('tfds:subset/10pct:1.0.0', 'train')) == 12
    for name, message in {
        'pets:1.9.1': r"unknown version '1\.9\.1'; did you mean '1\.9\.0'",
        'pest': "'pest'.*'pets'.*tfds build pest --file_format",
        'subset': 'tfds:subset/10pct, tfds:subset/1pct',
        'subset/2pct': r"unknown config '2pct'; .* '1pct'",
        'pets/': 'write tfds:NAME',
    }.items():
        with pytest.raises(UserError, match=message) as error:
            open_source(f'tfds:{name}', 'train')
        assert '\n' not in str(error.value)


def test_newest_version_is_by_number(data_dir):
    from vit_jax.data.sources.tfds import find_prepared

    for version in ('1.9.0', '1.10.0'):
        write(data_dir, 'pets', version=version)
    assert find_prepared('pets').name == '1.10.0'


def test_nothing_prepared(data_dir):
    with pytest.raises(UserError, match=r'prepared.*tfds build mnist'):
        open_source('tfds:mnist', 'train')


def test_tfrecord_names_the_command_that_converts(data_dir):
    path = write(data_dir, 'pets')
    info = json.loads((path / 'dataset_info.json').read_text())
    (path / 'dataset_info.json').write_text(json.dumps({**info, 'fileFormat': 'tfrecord'}))
    with pytest.raises(UserError, match='stored as tfrecord') as error:
        open_source('tfds:pets', 'train')
    assert f'--dataset_version_dir={path} --out_file_format=array_record' in str(error.value)
    assert '\n' not in str(error.value)


def test_other_features_are_refused(data_dir):
    features = {'image': tfds.features.Image(), 'caption': tfds.features.Text()}
    write(
        data_dir,
        'captions',
        features=features,
        example=lambda i: {'image': png(i), 'caption': 'a'},
    )
    with pytest.raises(UserError, match=r"no 'label' .* ClassLabel;"):
        open_source('tfds:captions', 'train')


def test_broken_image_is_named(data_dir):
    def example(i):
        return {'image': b'no image' if i == 3 else png(i), 'label': 0, 'id': 'x'}

    write(data_dir, 'pets', example=example)
    source = open_source('tfds:pets', 'train')
    (batch,) = loading.eval_batches(source, parse_transforms(''), batch_size=12)
    np.testing.assert_array_equal(batch['mask'], np.arange(12) != 3)
    assert source.broken[3].startswith('tfds:pets train record 3: ')


def test_needs_no_tensorflow(data_dir):
    write(data_dir, 'pets')
    program = (
        'import sys\n'
        'from vit_jax.data.sources import open_source\n'
        'print(open_source("tfds:pets", "train")[5]["image"].mean(), "tensorflow" in sys.modules)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.stdout.strip() == '5.0 False', done.stderr


@pytest.fixture(scope='module')
def cifar10(repo):
    import os

    folders = [os.environ.get('TFDS_DATA_DIR'), repo.parent / 'shared/data/tensorflow_datasets']
    for folder in folders:
        if folder and os.path.isdir(os.path.join(folder, 'cifar10')):
            return str(folder)
    pytest.skip('cifar10 is neither in $TFDS_DATA_DIR nor in ../shared/data/tensorflow_datasets')


@pytest.mark.slow
def test_cifar10(cifar10, monkeypatch):
    monkeypatch.setenv('TFDS_DATA_DIR', cifar10)
    train, test = open_source('tfds:cifar10', 'train'), open_source('tfds:cifar10', 'test')
    assert (len(train), len(test)) == (50_000, 10_000)
    assert train.info.class_names[3] == 'cat'
    transforms = parse_transforms('pad_and_crop(4)|flip')
    batch = next(loading.train_batches(train, transforms, batch_size=64, seed=0))
    assert batch['image'].shape == (64, 32, 32, 3)
    assert batch['label'].dtype == np.int32
    assert len(np.unique(batch['label'])) == 10
    few = open_source('tfds:cifar10', 'test[:2 per class]')
    np.testing.assert_array_equal(np.bincount(few.labels()), [2] * 10)


def test_labels_that_images_were_given_anew(data_dir):
    classes = tfds.features.ClassLabel(names=['cat', 'dog', 'emu'])
    features = {
        'image': tfds.features.Image(shape=(4, 6, 3)),
        'original_label': classes,
        'real_label': tfds.features.Sequence(classes),
        'file_name': tfds.features.Text(),
    }
    given = [[], [2], [0, 1]]
    write(
        data_dir,
        'imagenet2012_real',
        features=features,
        example=lambda i: {
            'image': png(i, (4, 6, 3)),
            'original_label': i % 3,
            'real_label': given[i % 3],
            'file_name': f'{i}.JPEG',
        },
    )
    source = open_source('tfds:imagenet2012_real', 'train')
    np.testing.assert_array_equal(source.labels(), np.arange(12) % 3)
    for i in range(3):
        assert source[i]['label'] == i
        np.testing.assert_array_equal(np.flatnonzero(source[i]['real_label']), given[i])


def test_the_listing_has_the_shards_and_their_sizes(data_dir):
    path = write(data_dir, 'toy')
    before = open_source('tfds:toy', 'train').listing()
    assert before.examples != open_source('tfds:toy', 'test').listing().examples
    shard = next(path.glob('toy-train.array_record-00001*'))
    shard.write_bytes(shard.read_bytes() * 2)
    after = open_source('tfds:toy', 'train').listing()
    assert after.examples == before.examples and after.contents != before.contents
