"""Data from anybody: what they list stays in their folder, and what they name is not imported."""

import json
import pathlib
import subprocess
import sys

import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.__main__ import main

DIGITS = 'experiments/vit/digits.py:smoke'
NAMES = ['../../secret.png', '/secret.png', 'a/../../../secret.png', '..', '', 'a\0.png', 5]
TFDS = 'tensorflow_datasets.core.features.'


@pytest.fixture(autouse=True)
def at_the_root(repo, monkeypatch):
    monkeypatch.chdir(repo)


def refused(source, split, capsys):
    """The one line by which the command `data` ends."""
    words = [f'--config.data.source={source}', f'--config.data.split={split}']
    assert main(['data', '--config', DIGITS, *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ''
    (line,) = shown.err.splitlines()
    return line


def write_coco(folder: pathlib.Path, kind, image, **annotation):
    """One image, and one that is a secret beside the data."""
    (folder / 'data' / 'val').mkdir(parents=True)
    (folder / 'data' / f'{kind}_val').mkdir()
    for file in ('secret.png', 'data/val/a.png', f'data/{kind}_val/a.png'):
        Image.new('RGB', (4, 3)).save(folder / file)
    content = {
        'categories': [{'id': 1, 'name': 'cat', 'isthing': 1}],
        'images': [
            {'id': 1, 'file_name': 'a.png', 'height': 3, 'width': 4},
            {'id': 2, 'file_name': image, 'height': 3, 'width': 4},
        ],
        'annotations': [{'image_id': i, 'segments_info': [], **annotation} for i in (1, 2)],
    }
    if kind == 'instances':
        content['annotations'] = []
    (folder / 'data' / f'{kind}_val.json').write_text(json.dumps(content))
    return folder / 'data'


@pytest.mark.fault(66)
@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('source', ['coco', 'panoptic'])
def test_images_outside_of_their_folder(tmp_path, capsys, source, name):
    if isinstance(name, str) and name.startswith('/'):
        name = f'{tmp_path}{name}'
    kind = {'coco': 'instances', 'panoptic': 'panoptic'}[source]
    folder = write_coco(tmp_path, kind, name, file_name='a.png')
    assert mentions(
        refused(f'{source}:{folder}', 'val', capsys), 'file_name', f'{name!r}', 'outside', 'folder'
    )


@pytest.mark.fault(66)
@pytest.mark.parametrize('name', NAMES)
def test_segments_outside_of_their_folder(tmp_path, capsys, name):
    folder = write_coco(tmp_path, 'panoptic', 'a.png', file_name=name)
    assert mentions(refused(f'panoptic:{folder}', 'val', capsys), 'outside', 'folder')


@pytest.mark.fault(66)
@pytest.mark.parametrize('name', ['../../../secret', '/dev/zero', 'variables/../../secret'])
def test_a_manifest_that_lists_what_is_outside_of_its_step(tmp_path, smoke_run, capsys, name):
    step = max((smoke_run / 'checkpoints').iterdir(), key=lambda path: int(path.name))
    copy = tmp_path / 'run' / 'checkpoints' / step.name
    copy.parent.mkdir(parents=True)
    copy.mkdir()
    for path in step.iterdir():
        if path.name != 'manifest.json':
            (copy / path.name).symlink_to(path)
    (tmp_path / 'run' / 'config.json').symlink_to(smoke_run / 'config.json')
    content = json.loads((step / 'manifest.json').read_text())
    content['files'][name] = 'sha256 0, 0 bytes'
    (copy / 'manifest.json').write_text(json.dumps(content))
    assert main(['evaluate', '--workdir', str(tmp_path / 'run')]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, 'manifest.json', f'{name!r}', 'outside', 'step')


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """The file that the module `stranger`, which is on the path, writes when it is imported."""
    mark = tmp_path / 'imported'
    (tmp_path / 'code').mkdir()
    (tmp_path / 'code' / 'stranger.py').write_text(f'open({str(mark)!r}, "w").close()\n')
    monkeypatch.syspath_prepend(tmp_path / 'code')
    yield mark
    sys.modules.pop('stranger', None)


def write_tfds(folder, monkeypatch, features, info=None):
    """The descriptions of `tfds:odd`, of which nothing else is there."""
    place = folder / 'tfds' / 'odd' / '1.0.0'
    place.mkdir(parents=True)
    monkeypatch.setenv('TFDS_DATA_DIR', str(folder / 'tfds'))
    (place / 'features.json').write_text(json.dumps(features))
    split = {'name': 'train', 'shardLengths': ['1']}
    about = {'name': 'odd', 'version': '1.0.0', 'fileFormat': 'array_record', 'splits': [split]}
    (place / 'dataset_info.json').write_text(json.dumps(about | (info or {})))


def among(feature):
    """A feature among those of images with labels."""
    image = {'dtype': 'uint8', 'shape': {'dimensions': ['4', '3', '3']}}
    label = {'numClasses': '10'}
    own = {
        'image': {'pythonClassName': f'{TFDS}image_feature.Image', 'image': image},
        'label': {'pythonClassName': f'{TFDS}class_label_feature.ClassLabel', 'classLabel': label},
    }
    return {
        'pythonClassName': f'{TFDS}features_dict.FeaturesDict',
        'featuresDict': {'features': {**own, 'odd': feature}},
    }


QUOTED = '{"features": {"odd": {"pythonClassName": "stranger.Feature", "text": {}}}}'


@pytest.mark.fault(67)
@pytest.mark.parametrize(
    'features',
    [
        {'pythonClassName': 'stranger.Feature', 'text': {}},
        among({'pythonClassName': 'stranger.Feature', 'text': {}}),
        among({'python_class_name': 'stranger.Feature', 'text': {}}),
        {'type': 'stranger.Feature', 'content': {}},
        {
            'type': f'{TFDS}features_dict.FeaturesDict',
            'proto_cls': 'tensorflow_datasets.FeaturesDict',
            'content': QUOTED,
        },
    ],
)
def test_classes_of_features_are_those_of_tfds(tmp_path, monkeypatch, capsys, stranger, features):
    pytest.importorskip('tensorflow_datasets')
    write_tfds(tmp_path, monkeypatch, features)
    line = refused('tfds:odd', 'train', capsys)
    assert 'features.json' in line and "'stranger.Feature'" in line
    assert not stranger.exists()


@pytest.mark.fault(67)
def test_features_that_the_other_description_names(tmp_path, monkeypatch, capsys, stranger):
    pytest.importorskip('tensorflow_datasets')
    features = {'pythonClassName': 'stranger.Feature', 'text': {}}
    text = {'pythonClassName': f'{TFDS}text_feature.Text', 'text': {}}
    write_tfds(tmp_path, monkeypatch, among(text), {'features': features})
    assert "dataset_info.json names 'stranger.Feature'" in refused('tfds:odd', 'train', capsys)
    assert not stranger.exists()


@pytest.mark.fault(66)
@pytest.mark.parametrize('template', ['../../../secret-{SPLIT}-{SHARD_X_OF_Y}', '/secret-{SPLIT}'])
def test_shards_of_tfds_outside_of_their_folder(tmp_path, monkeypatch, capsys, template):
    pytest.importorskip('tensorflow_datasets')
    split = {'name': 'train', 'shardLengths': ['1'], 'filepathTemplate': template}
    text = {'pythonClassName': f'{TFDS}text_feature.Text', 'text': {}}
    write_tfds(tmp_path, monkeypatch, among(text), {'splits': [split]})
    line = refused('tfds:odd', 'train', capsys)
    assert 'secret' in line and line.endswith(f'outside of {tmp_path}/tfds/odd/1.0.0')


@pytest.mark.fault(67)
def test_a_description_of_nothing_is_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip('tensorflow_datasets')
    write_tfds(tmp_path, monkeypatch, {'pythonClassName': f'{TFDS}text_feature.Nothing'})
    assert 'cannot be read (' in refused('tfds:odd', 'train', capsys)


# The last three are imported by worker processes before all else.
LIBRARIES = ('typing', 'ast', 'json', 'numpy', 'yaml', 'pickle', 'socket', 'multiprocessing')


LAUNCH = ['launch', 'slurm', '--dry-run', '--', 'train', '--workdir', 'a', '--config']
COUNT = ['data', '--config.data.workers=1', '--config.data.cache=False', '--batches=1', '--config']


@pytest.mark.slow
@pytest.mark.fault(67)
@pytest.mark.parametrize(
    'words', [LAUNCH, pytest.param(COUNT, marks=[pytest.mark.long, pytest.mark.process])]
)
def test_files_in_the_working_directory_stand_in_for_no_library(tmp_path, repo, monkeypatch, words):
    for name in LIBRARIES:
        (tmp_path / f'{name}.py').write_text('raise SystemExit(9)\n')
    monkeypatch.setenv('PYTHONPATH', str(repo))
    monkeypatch.delenv('PYTHONSAFEPATH', raising=False)
    command = [sys.executable, '-m', 'vit_jax', *words, f'{repo}/{DIGITS}']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout
