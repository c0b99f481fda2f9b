"""A detector of your data in COCO format: its view of files, and its ids."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers.finished import made_once
from helpers.messages import mentions, says
from helpers.xla import use_one_device
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.config import load as config_lib
from vit_jax.data.records import SourceInfo
from vit_jax.data.sources import open_source
from vit_jax.inference import load
from vit_jax.trainer import build, measure

# The smoke size of the experiment is compiled.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]
ROOT = pathlib.Path(__file__).resolve().parents[2]
CATEGORIES = [{'id': 7, 'name': 'dog'}, {'id': 3, 'name': 'cat'}]


def write_coco(folder: pathlib.Path) -> None:
    """Eight images of 24 x 32 pixels, with an object each, as both splits."""
    images = [
        {'id': i, 'file_name': f'cell_{i}.png', 'height': 24, 'width': 32} for i in range(100, 108)
    ]
    objects = [
        {'id': i, 'image_id': image['id'], 'category_id': (3, 7)[i % 2], 'bbox': [2, 3, 10, 12]}
        for i, image in enumerate(images)
    ]
    content = {'images': images, 'annotations': objects, 'categories': CATEGORIES}
    folder.mkdir()
    rng = np.random.default_rng(0)
    for image in images:
        pixels = rng.integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / image['file_name'])
    for split in ('train', 'test'):
        (folder / f'instances_{split}.json').write_text(json.dumps(content))


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    def train(folder):
        write_coco(folder / 'data')
        source, changes = f'coco:{folder / "data"}', ['total=1 steps', 'every.eval=1']
        changes += ['optim.schedule.warmup=0', 'optim.schedule.cooldown=0', 'model.decoder_depth=1']
        for section in ('data', 'evals.test', 'evals.ap'):
            changes += [f'{section}.source={source}', f'{section}.workers=0']
        changes += ['evals.test.split=test', 'evals.ap.split=test']
        argv = ['train', '--config', f'{ROOT}/experiments/detr/scenes.py:smoke', '--workdir']
        flags = [f'--config.{change}' for change in changes]
        with pytest.MonkeyPatch.context() as patch:
            use_one_device(patch)
            assert cli.main([*argv, str(folder / 'run'), *flags]) == 0

    return made_once(tmp_path_factory, 'detr_on_coco', train)


@pytest.mark.parametrize(
    ('section', 'change'),
    [('data', {'annotations': []}), pytest.param('evals.ap', {}, marks=pytest.mark.long)],
)
def test_missing_annotations_are_refused(tmp_path, capsys, caplog, section, change):
    """Nor measured; the key may be missing, too."""
    write_coco(tmp_path / 'data')
    write_coco(tmp_path / 'bare')
    for file in (tmp_path / 'bare').glob('*.json'):
        content = json.loads(file.read_text())
        content.pop('annotations')
        file.write_text(json.dumps(content | change))
    argv = ['train', '--config', f'{ROOT}/experiments/detr/scenes.py:smoke']
    for name in ('data', 'evals.test', 'evals.ap'):
        folder = tmp_path / ('bare' if name == section else 'data')
        argv += [f'--config.{name}.source=coco:{folder}', f'--config.{name}.split=test']
    assert cli.main([*argv, '--workdir', str(tmp_path / 'run')]) == 2
    assert "'boxes'" in capsys.readouterr().err.splitlines()[-1]
    assert mentions(caplog.text, 'instances_test.json', 'annotations')


def test_missing_segments_are_refused(tmp_path, capsys):
    write_coco(tmp_path / 'data')
    content = json.loads((tmp_path / 'data' / 'instances_train.json').read_text())
    categories = [category | {'isthing': 1} for category in CATEGORIES]
    content |= {'annotations': [], 'categories': categories}
    (tmp_path / 'data' / 'panoptic_train.json').write_text(json.dumps(content))
    argv = ['train', '--config', f'{ROOT}/experiments/detr/scenes_panoptic.py:smoke']
    argv += ['--workdir', str(tmp_path / 'run'), '--config.data.split=train']
    assert cli.main([*argv, f'--config.data.source=panoptic:{tmp_path / "data"}']) == 2
    assert "'masks'" in capsys.readouterr().err.splitlines()[-1]


def test_a_detector_may_have_one_category(tmp_path):
    write_coco(tmp_path / 'data')
    for file in (tmp_path / 'data').glob('*.json'):
        content = json.loads(file.read_text()) | {'categories': CATEGORIES[:1]}
        content['annotations'] = [o for o in content['annotations'] if o['category_id'] == 7]
        file.write_text(json.dumps(content))
    changes = [f'{name}.source=coco:{tmp_path}/data' for name in ('data', 'evals.test', 'evals.ap')]
    changes += ['evals.test.split=test', 'evals.ap.split=test']
    config = config_lib.load(f'{ROOT}/experiments/detr/scenes.py:smoke', changes)
    training = build.build(config, jax.devices()[:1])
    assert training.config.model.num_classes == 1
    assert training.data.class_counts.tolist() == [4]


@pytest.fixture
def dogs(tmp_path):
    """`dogs(categories)`: the data, of which these categories are listed, and dogs annotated."""

    def make(categories):
        folder = tmp_path / f'{len(categories)}'
        write_coco(folder)
        file = folder / 'instances_test.json'
        content = json.loads(file.read_text()) | {'categories': categories}
        content['annotations'] = [o for o in content['annotations'] if o['category_id'] == 7]
        file.write_text(json.dumps(content))
        return ['--source', f'coco:{folder}', '--split', 'test']

    return make


def test_categories_are_numbered_as_in_training(run, dogs):
    _, source, _, split = dogs(CATEGORIES[:1])
    measured = measure.prepare(load.open_model(run), source=source, split=split)
    for evaluation in measured.evaluations.values():
        assert evaluation.data.info.class_names == ('cat', 'dog')
        assert {label for i in range(8) for label in evaluation.data.source[i]['labels']} == {1}


@pytest.mark.long
def test_a_file_may_lack_categories_of_training(run, dogs, capsys):
    all_listed, dogs_listed = (
        json.loads(call(capsys, 'evaluate', '--workdir', run, '--json', *dogs(listed)))
        for listed in (CATEGORIES, CATEGORIES[:1])
    )
    assert all_listed == dogs_listed


def test_a_category_has_one_name(run, dogs, capsys):
    argv = ['evaluate', '--workdir', str(run), *dogs([*CATEGORIES[:1], {'id': 3, 'name': 'emu'}])]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says(line, "category 3 is 'emu', but 'cat'")


@pytest.mark.fault(134)
def test_objects_of_other_categories_are_left_out(run, dogs, caplog):
    """They count as not annotated; the dogs keep their rows."""
    _, source, _, split = dogs([{'id': 9, 'name': 'emu'}, *CATEGORIES])
    file = pathlib.Path(source.removeprefix('coco:')) / 'instances_test.json'
    content = json.loads(file.read_text())
    emus = [{**dog, 'id': dog['id'] + 10, 'category_id': 9} for dog in content['annotations'][:2]]
    file.write_text(json.dumps(content | {'annotations': [*emus, *content['annotations']]}))
    measured = measure.prepare(load.open_model(run), source=source, split=split)
    assert mentions(caplog.text, 'classes', 'emu')
    for evaluation in measured.evaluations.values():
        records = [evaluation.data.source.annotations(i) for i in range(8)]
        assert [len(record['boxes']) for record in records] == [0, 1] * 4
        assert all(len(record['areas']) == len(record['labels']) for record in records)
        assert {label for record in records for label in record['labels']} == {1}


@pytest.mark.fault(134)
def test_a_detector_of_cocos_ids_is_evaluated_by_them(dogs):
    """Released detectors have an output for each id up to 90, without names in some files."""
    _, source, _, split = dogs(CATEGORIES)
    for classes in (
        SourceInfo(91, (), class_ids=tuple(range(91))),
        SourceInfo(91, tuple({3: 'cat', 7: 'dog'}.get(i, 'N/A') for i in range(91))),
    ):
        data = open_source(source, split).numbered_as(classes)
        assert {label for i in range(8) for label in data[i]['labels']} == {7}
        assert (data.info.num_classes, data.info.class_names[7]) == (91, 'dog')


@pytest.fixture(scope='module')
def wide(tmp_path_factory):
    path = tmp_path_factory.mktemp('photos') / 'wide.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 160, 3), np.uint8)).save(path)
    return path


def call(capsys, *argv):
    assert cli.main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def test_a_photograph_of_another_shape_is_seen_whole(run, wide, tmp_path, capsys):
    """Its aspect ratio is kept: the model sees 6 of 32 rows, and the rest is padding."""
    argv = ['predict', '--workdir', run, '--threshold', 0, '--json', wide]
    (image,) = json.loads(call(capsys, *argv).splitlines()[-1])['images']
    assert image['read_as'] == '160 x 30 pixels read as 32 x 32 RGB'
    # More than the 40 pixels that the shape of the data would leave of the middle.
    assert max(prediction['bbox'][2] for prediction in image['predictions']) > 45
    out = tmp_path / 'map.png'
    assert 'cropped' not in call(capsys, 'attention', '--workdir', run, wide, '--out', out)


@pytest.mark.parametrize('listed', [True, False])
def test_results_have_the_ids_of_the_data(run, tmp_path, capsys, listed):
    """The ids are from the annotations, or from file names that are ids, such as COCO's."""
    coco = pytest.importorskip('pycocotools.coco')
    annotations = run.parent / 'data' / 'instances_test.json'
    photo = run.parent / 'data' / 'cell_104.png'
    if not listed:
        photo = shutil.copy(photo, tmp_path / '000104.png')
    argv = ['predict', '--workdir', run, '--threshold', 0, '--coco', tmp_path / 'a.json', photo]
    argv += ['--annotations', annotations] if listed else []
    assert cli.main([str(word) for word in [*argv, '--json']]) == 0
    out, err = capsys.readouterr()
    assert 'category_id' not in err
    (image,) = json.loads(out.splitlines()[-1])['images']
    predictions = [(entry['category_id'], entry['class']) for entry in image['predictions']]
    assert set(predictions) <= {(3, 'cat'), (7, 'dog')}
    results = coco.COCO(annotations).loadRes(str(tmp_path / 'a.json')).dataset['annotations']
    assert [(entry['image_id'], entry['category_id']) for entry in results] == [
        (104, number) for number, _ in predictions
    ]
    assert len(results) == 8


@pytest.mark.parametrize(('form', 'folder'), [('yolo', 'images'), ('voc', 'JPEGImages')])
def test_written_boxes_are_read_back(run, tmp_path, capsys, form, folder):
    photos = [run.parent / 'data' / f'cell_{i}.png' for i in (100, 104)]
    argv = ['predict', '--workdir', run, '--threshold', 0, '--format', form, '--json', *photos]
    out = tmp_path / 'found'
    images = json.loads(call(capsys, *argv, '--out', out).splitlines()[-1])['images']
    (out / folder).mkdir()
    for photo in photos:
        shutil.copy(photo, out / folder)
    source = open_source(f'{form}:{out}', 'train')
    for i, image in enumerate(images):
        found = source.annotations(i)
        boxes = [row['bbox'] for row in image['predictions']]
        expected = [[x, y, x + w, y + h] for x, y, w, h in boxes]
        np.testing.assert_allclose(found['boxes'], expected, atol=0.01)
        names = [source.info.class_names[label] for label in found['labels']]
        assert names == [row['class'] for row in image['predictions']]
    assert cli.main([str(word) for word in [*argv, '--out', out]]) == 2
    assert 'exists' in capsys.readouterr().err


def test_boxes_in_cocos_format_are_those_of_its_flag(run, tmp_path, capsys):
    argv = ['predict', '--workdir', run, run.parent / 'data' / 'cell_104.png', '--threshold', 0]
    argv += ['--annotations', run.parent / 'data' / 'instances_test.json']
    call(capsys, *argv, '--coco', tmp_path / 'a.json')
    call(capsys, *argv, '--format', 'coco', '--out', tmp_path / 'b.json')
    assert (tmp_path / 'a.json').read_text() == (tmp_path / 'b.json').read_text()
    assert cli.main([str(word) for word in [*argv, '--format', 'yolo']]) == 2
    assert '--out' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('flags', 'says'),
    [
        ([], 'image'),
        (['--annotations', 'DATA/instances_test.json'], '--annotations'),
        (['--annotations', 'DATA/cell_100.png'], 'is not in COCO format'),
        (['--annotations', 'DATA/none.json'], 'No such file'),
    ],
)
def test_images_without_an_id(run, wide, tmp_path, capsys, flags, says):
    flags = [flag.replace('DATA', str(run.parent / 'data')) for flag in flags]
    argv = ['predict', '--workdir', run, '--coco', tmp_path / 'a.json', wide, *flags]
    assert cli.main([str(word) for word in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, says)
    assert not (tmp_path / 'a.json').exists()
