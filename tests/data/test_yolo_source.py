"""`yolo:PATH`: boxes of text files are those of the same data in COCO format."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.config import load, recipes
from vit_jax.data import sources
from vit_jax.data.records import UnknownSplit
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune

LAYOUTS = {'ultralytics': ('images/{}', 'labels/{}'), 'roboflow': ('{}/images', '{}/labels')}
NAMES = {'a line': '[cat, dog]', 'numbers': '\n  0: cat\n  1: dog\n'}


@pytest.fixture
def coco(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three images: two objects, one, and none."""
    root = tmp_path / 'coco'
    (root / 'images').mkdir(parents=True)
    images, boxes = [], [(0, [2, 4, 8, 6], 1), (0, [0, 0, 20, 10], 0), (1, [5, 5, 10, 10], 1)]
    for i, (width, height) in enumerate([(20, 10), (40, 30), (16, 16)]):
        pixels = np.full((height, width, 3), 40 * i, np.uint8)
        Image.fromarray(pixels).save(root / 'images' / f'{i}.png')
        images.append({'id': i, 'file_name': f'{i}.png', 'width': width, 'height': height})
    annotations = [
        {'id': n, 'image_id': i, 'category_id': c, 'bbox': b}
        for n, (i, b, c) in enumerate(boxes, 1)
    ]
    categories = [{'id': 0, 'name': 'cat'}, {'id': 1, 'name': 'dog'}]
    content = {'images': images, 'annotations': annotations, 'categories': categories}
    (root / 'instances_train.json').write_text(json.dumps(content))
    return root


def write_yolo(coco: pathlib.Path, root: pathlib.Path, layout: str, names: str) -> None:
    content = json.loads((coco / 'instances_train.json').read_text())
    images, labels = (root / folder.format('train') for folder in LAYOUTS[layout])
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    (root / 'data.yaml').write_text(f'nc: 2\nnames: {NAMES[names]}')
    sizes = {}
    for image in content['images']:
        name = image['file_name']
        (images / name).write_bytes((coco / 'images' / name).read_bytes())
        sizes[image['id']] = image['width'], image['height']
    for a in content['annotations']:
        (x, y, w, h), (width, height) = a['bbox'], sizes[a['image_id']]
        shares = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
        with (labels / f'{a["image_id"]}.txt').open('a') as file:
            file.write(' '.join(map(str, (a['category_id'], *shares))) + '\n')


@pytest.mark.parametrize(('layout', 'names'), [('ultralytics', 'a line'), ('roboflow', 'numbers')])
def test_records_are_those_of_the_same_data_in_coco_format(coco, tmp_path, layout, names):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, layout, names)
    ours, expected = (
        sources.open_source(f'{kind}:{path}', 'train')
        for kind, path in (('yolo', root), ('coco', coco))
    )
    assert len(ours) == len(expected) == 3
    assert ours.info.class_names == expected.info.class_names == ('cat', 'dog')
    for i in range(3):
        one, other = ours[i], expected[i]
        assert one.keys() == other.keys() >= {'image', 'boxes', 'labels'}
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-6, atol=1e-5, err_msg=key)
    with pytest.raises(UnknownSplit, match='train'):
        sources.open_source(f'yolo:{root}', 'tran')
    digest = ours.listing()
    (next(root.rglob('1.txt'))).write_text('0 0.5 0.5 0.1 0.1\n')
    assert sources.open_source(f'yolo:{root}', 'train').listing() != digest


@pytest.mark.parametrize('line', ['2 0.5 0.5 0.1 0.1', '0 0.5 0.5 0.1', '0 nan 0.5 0.1 0.1', 'cat'])
def test_a_line_that_is_not_a_box_is_named(coco, tmp_path, line):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'ultralytics', 'a line')
    (root / 'labels' / 'train' / '1.txt').write_text(f'0 0.5 0.5 0.1 0.1\n{line}\n')
    with pytest.raises(UserError, match=r'1\.txt, line 2'):
        sources.open_source(f'yolo:{root}', 'train')


def test_a_folder_of_another_layout_is_refused(tmp_path):
    for folder in (tmp_path / 'none', tmp_path):
        with pytest.raises(UserError, match='folder'):
            sources.open_source(f'yolo:{folder}', 'train')
    (tmp_path / 'data.yaml').write_text('names: 3')
    with pytest.raises(UserError, match='names'):
        sources.open_source(f'yolo:{tmp_path}', 'train')


def test_own_boxes_name_the_key_that_is_wrong(coco, tmp_path, capsys):
    words = ['train', 'detr/finetune:auto', '--workdir', str(tmp_path / 'run')]
    data, start = f'--config.data.source=coco:{coco}', '--config.init.from=/none.safetensors'
    assert main([*words, data, start]) == 2
    assert 'config.init.from' in capsys.readouterr().err
    config = recipes.run_file('detr/own:smoke', 'get_config', '--config')
    with config.unlocked():
        config.data.update(source=f'yolo:{tmp_path}/none', split=None)
        config.evals.val.split = None
    with pytest.raises(UserError, match=r'config\.data\.source'):
        fine_tune.complete_config(load.edit(config, []))
