"""Boxes in the formats of YOLO, Pascal VOC, Roboflow and CVAT are those of the same COCO file."""

import itertools
import json
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.config import load, recipes
from vit_jax.data import numbering, sources
from vit_jax.data.records import UnknownSplit
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune

# Folders of the images and of the boxes of a split, by who writes them.
LAYOUTS = {
    'ultralytics': ('images/{}', 'labels/{}'),
    'roboflow': ('{}/images', '{}/labels'),
    'flat': ('images', 'labels'),
    'cvat': ('obj_{}_data', 'obj_{}_data'),
    'voc': ('JPEGImages', 'Annotations'),
    'voc_roboflow': ('{}', '{}'),
    'voc_labelimg': ('.', '.'),
    'voc_lower': ('images', 'annotations'),
}
NAMES = {
    'a line': ('data.yaml', 'nc: 2\nnames: [cat, dog]\ntrain: ../train/images\n'),
    'numbers': ('data.yaml', 'names:\n  0: cat\n  1: dog\n'),
    'classes.txt': ('classes.txt', 'cat\ndog\n'),
    'obj.names': ('obj.names', 'cat\ndog\n'),
}


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


def copy_images(coco: pathlib.Path, root: pathlib.Path, layout: str, split: str = 'train') -> tuple:
    """Copy the images; return the content of the COCO file, and the folder for the boxes."""
    content = json.loads((coco / 'instances_train.json').read_text())
    images, boxes = (root / folder.format(split) for folder in LAYOUTS[layout])
    for folder in (images, boxes):
        folder.mkdir(parents=True, exist_ok=True)
    for image in content['images']:
        name = image['file_name']
        (images / name).write_bytes((coco / 'images' / name).read_bytes())
    return content, boxes


def write_yolo(coco: pathlib.Path, root: pathlib.Path, layout: str, names: str) -> None:
    content, labels = copy_images(coco, root, layout)
    (root / NAMES[names][0]).write_text(NAMES[names][1])
    sizes = {image['id']: (image['width'], image['height']) for image in content['images']}
    for a in content['annotations']:
        (x, y, w, h), (width, height) = a['bbox'], sizes[a['image_id']]
        shares = ((x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
        if layout == 'flat':  # one as a polygon in the box, and one with a confidence
            x, y, w, h = x / width, y / height, w / width, h / height
            polygon = (x, y, x + w, y + h / 2, x + w / 2, y + h)
            shares = polygon if a['id'] == 1 else (*shares, 0.9)
        with (labels / f'{a["image_id"]}.txt').open('a') as file:
            file.write(' '.join(map(str, (a['category_id'], *shares))) + '\n')


def write_voc(coco: pathlib.Path, root: pathlib.Path, layout: str, first: int = 0) -> None:
    """Write XML files; with `first=1` in the challenge's own way."""
    content, folder = copy_images(coco, root, layout)
    source = f'<source><annotation>{"PASCAL VOC2007" if first else "Unknown"}</annotation></source>'
    for image in content['images']:
        objects = ''
        for a in content['annotations']:
            if a['image_id'] == image['id']:
                x, y, w, h = a['bbox']
                corners = {'xmin': x + first, 'ymin': y + first, 'xmax': x + w, 'ymax': y + h}
                box = ''.join(f'<{k}>{v}</{k}>' for k, v in corners.items())
                part = '<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>'
                name = ('cat', 'dog')[a['category_id']]
                objects += f'<object><name>{name}</name>{part}<bndbox>{box}</bndbox></object>'
        sides = ''.join(f'<{k}>{image[k]}</{k}>' for k in ('width', 'height'))
        size = f'<size>{sides}</size>' * (image['id'] > 0)
        (folder / f'{image["id"]}.xml').write_text(
            f'<annotation>{source}{size}{objects}</annotation>'
        )
    if layout == 'voc':
        lists = root / 'ImageSets' / 'Main'
        lists.mkdir(parents=True)
        (lists / 'train.txt').write_text('0\n1\n2\n')
        (lists / 'val.txt').write_text('2\n')
        (lists / 'cat_train.txt').write_text('0 1\n1 -1\n')


def write_roboflow(coco: pathlib.Path, root: pathlib.Path, split: str = 'train') -> None:
    """Write a COCO file beside the images, with a category for the project."""
    content, folder = copy_images(coco, root, 'voc_roboflow', split)
    for row in (*content['categories'], *content['annotations']):
        row['id' if 'name' in row else 'category_id'] += 1
    others = [row | {'supercategory': 'pets'} for row in content['categories']]
    content['categories'] = [{'id': 0, 'name': 'pets', 'supercategory': 'none'}, *others]
    (folder / '_annotations.coco.json').write_text(json.dumps(content))


def write_cvat(coco: pathlib.Path, root: pathlib.Path) -> None:
    content, _ = copy_images(coco, root, 'ultralytics', 'default')
    content['annotations'] = [
        {**row, 'segmentation': [], 'iscrowd': 0, 'attributes': {'occluded': False}}
        for row in content['annotations']
    ]
    (root / 'annotations').mkdir()
    (root / 'annotations' / 'instances_default.json').write_text(json.dumps(content))


WRITERS = {
    'yolo ultralytics': lambda *at: write_yolo(*at, 'ultralytics', 'a line'),
    'yolo roboflow': lambda *at: write_yolo(*at, 'roboflow', 'numbers'),
    'yolo label studio': lambda *at: write_yolo(*at, 'flat', 'classes.txt'),
    'yolo cvat': lambda *at: write_yolo(*at, 'cvat', 'obj.names'),
    'voc lists': lambda *at: write_voc(*at, 'voc', first=1),
    'voc roboflow': lambda *at: write_voc(*at, 'voc_roboflow'),
    'voc labelimg': lambda *at: write_voc(*at, 'voc_labelimg'),
    'voc lower': lambda *at: write_voc(*at, 'voc_lower'),
    'coco roboflow': write_roboflow,
    'coco cvat': write_cvat,
}


@pytest.mark.parametrize('written', WRITERS)
def test_records_are_those_of_the_same_data_in_coco_format(coco, tmp_path, written):
    kind, root = written.partition(' ')[0], tmp_path / 'own'
    WRITERS[written](coco, root)
    ours, expected = (
        sources.open_source(name, 'train') for name in (f'{kind}:{root}', f'coco:{coco}')
    )
    assert len(ours) == len(expected) == 3
    assert ours.info.class_names == expected.info.class_names == ('cat', 'dog')
    for i in range(3):
        one, other = ours[i], expected[i]
        assert one.keys() == other.keys() >= {'image', 'boxes', 'labels'}
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-6, atol=1e-5, err_msg=key)
    assert fine_tune.source_splits(f'{kind}:{root}') == (
        ('train', 'val') if written == 'voc lists' else fine_tune.HELD_OUT_OF_ALL
    )
    with pytest.raises(UnknownSplit, match='train'):
        sources.open_source(f'{kind}:{root}', 'tran')


def test_classes_of_other_formats_are_matched_by_name(coco, tmp_path):
    file = coco / 'instances_train.json'
    file.write_text(file.read_text().replace('"name": "cat"', '"name": "emu"'))  # emu, dog
    write_voc(coco, tmp_path / 'voc', 'voc')
    write_yolo(coco, tmp_path / 'yolo', 'ultralytics', 'a line')
    for xml in tmp_path.rglob('*.xml'):
        xml.write_text(xml.read_text().replace('cat', 'emu'))  # dog, emu
    (tmp_path / 'yolo' / 'data.yaml').write_text('names: [emu, dog, fox]\n')
    infos = {
        kind: sources.open_source(f'{kind}:{tmp_path / kind}', 'train').info
        for kind in ('coco', 'voc', 'yolo')
    }
    numbers = [numbering.class_numbers(infos['voc'], infos[kind], '') for kind in ('coco', 'yolo')]
    assert [array.tolist() for array in numbers] == [[1, 0], [1, 0]]


def test_a_listing_changes_with_the_boxes(coco, tmp_path):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'ultralytics', 'a line')
    ours = sources.open_source(f'yolo:{root}', 'train')
    digest = ours.listing()
    (next(root.rglob('1.txt'))).write_text('0 0.5 0.5 0.1 0.1\n')
    assert sources.open_source(f'yolo:{root}', 'train').listing() != digest


def test_splits_are_those_of_data_yaml(coco, tmp_path):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'ultralytics', 'a line')
    for folder in ('images', 'labels'):
        (root / folder / 'train').rename(root / folder / 'train2017')
    (root / 'data.yaml').write_text('names: [cat, dog]\npath: coco\nval: ./images/train2017/')
    for split in ('val', 'train2017'):
        assert sources.open_source(f'yolo:{root}', split).class_counts().tolist() == [1, 2]
    with pytest.raises(UnknownSplit, match='train2017'):
        sources.open_source(f'yolo:{root}', 'train')


def test_absolute_folders_of_data_yaml_are_splits(coco, tmp_path):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'ultralytics', 'a line')
    (root / 'data.yaml').write_text(f'names: [cat, dog]\nval: {root}/images/train\n')
    assert len(sources.open_source(f'yolo:{root}', 'val')) == 3


@pytest.mark.parametrize('value', ['val.txt', '[images/a, images/b]', 'images/*'])
def test_splits_that_list_files_in_data_yaml_are_refused(coco, tmp_path, value):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'flat', 'a line')
    (root / 'data.yaml').write_text(f'names: [cat, dog]\nval: {value}\n')
    with pytest.raises(UserError, match='val') as error:
        sources.open_source(f'yolo:{root}', 'train')  # it would hold the images of val too
    assert not isinstance(error.value, UnknownSplit)


def test_hidden_folders_are_not_splits(coco, tmp_path):
    write_yolo(coco, tmp_path / 'yolo', 'flat', 'a line')
    (tmp_path / 'yolo' / 'images' / '.ipynb_checkpoints').mkdir()
    assert len(sources.open_source(f'yolo:{tmp_path / "yolo"}', 'train')) == 3


def test_keypoints_after_a_box_are_ignored(coco, tmp_path):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'ultralytics', 'a line')
    (root / 'data.yaml').write_text('names: [cat, dog]\nkpt_shape: [2, 3]\n')
    (root / 'labels' / 'train' / '2.txt').write_text('0 .5 .5 .25 .25 .1 .1 2 .9 .9 2\n')
    assert sources.open_source(f'yolo:{root}', 'train')[2]['boxes'].tolist() == [[6, 6, 10, 10]]


def test_a_byte_order_mark_is_skipped(coco, tmp_path):
    write_yolo(coco, tmp_path / 'yolo', 'ultralytics', 'classes.txt')
    write_voc(coco, tmp_path / 'voc', 'voc')
    for file in [*tmp_path.rglob('*.txt'), *tmp_path.rglob('*.xml')]:
        file.write_bytes(b'\xef\xbb\xbf' + file.read_bytes().replace(b'\n', b'\r\n'))
    for kind in ('yolo', 'voc'):
        source = sources.open_source(f'{kind}:{tmp_path / kind}', 'train')
        assert source.info.class_names == ('cat', 'dog')
        assert source.class_counts().tolist() == [1, 2]


def test_folders_below_those_of_voc_are_splits(coco, tmp_path):
    root = tmp_path / 'voc'
    write_voc(coco, root, 'voc_lower')
    for folder, suffix in (('images', '.png'), ('annotations', '.xml')):
        for name, split in (('0', 'train'), ('1', 'train'), ('2', 'val')):
            (root / folder / split).mkdir(exist_ok=True)
            file = root / folder / f'{name}{suffix}'
            file.rename(root / folder / split / file.name)
    lengths = [len(sources.open_source(f'voc:{root}', split)) for split in ('train', 'val')]
    assert lengths == [2, 1]


@pytest.mark.parametrize('line', ['2 0.5 0.5 0.1 0.1', '0 0.5 0.5 0.1', '0 nan 0.5 0.1 0.1', 'cat'])
def test_a_line_that_is_not_a_box_is_named(coco, tmp_path, line):
    root = tmp_path / 'yolo'
    write_yolo(coco, root, 'ultralytics', 'a line')
    (root / 'labels' / 'train' / '1.txt').write_text(f'0 0.5 0.5 0.1 0.1\n{line}\n')
    with pytest.raises(UserError, match=r'1\.txt, line 2'):
        sources.open_source(f'yolo:{root}', 'train')


def test_a_folder_of_another_layout_is_refused(tmp_path):
    for kind, folder in itertools.product(('yolo', 'voc', 'coco'), (tmp_path / 'none', tmp_path)):
        with pytest.raises(UserError, match=str(folder)):
            sources.open_source(f'{kind}:{folder}', 'train')
    (tmp_path / 'data.yaml').write_text('names: 3')
    with pytest.raises(UserError, match='names'):
        sources.open_source(f'yolo:{tmp_path}', 'train')


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda root: (root / 'Annotations' / '1.xml').write_text('<annotation>'), '1.xml'),
        (lambda root: (root / 'Annotations' / '1.xml').unlink(), 'train lists 1'),
        (lambda root: (root / 'JPEGImages' / '1.png').unlink(), '1.xml has no image'),
        (
            lambda root: (root / 'Annotations' / '1.xml').write_text(
                '<annotation><object><name>cat</name></object></annotation>'
            ),
            "1.xml: object 'cat'",
        ),
        (
            lambda root: (root / 'Annotations' / '1.xml').write_text(
                (root / 'Annotations' / '1.xml').read_text().replace('<name>dog</name>', '')
            ),
            '1.xml',
        ),
    ],
)
def test_a_file_of_voc_that_is_wrong_is_named(coco, tmp_path, change, message):
    root = tmp_path / 'voc'
    write_voc(coco, root, 'voc')
    change(root)
    with pytest.raises(UserError, match=re.escape(message)):
        sources.open_source(f'voc:{root}', 'train')


def test_difficult_objects_of_voc_are_crowds(coco, tmp_path):
    write_voc(coco, tmp_path / 'voc', 'voc_labelimg')
    file = tmp_path / 'voc' / '1.xml'
    file.write_text(file.read_text().replace('<part>', '<difficult>1</difficult><part>'))
    source = sources.open_source(f'voc:{tmp_path / "voc"}', 'train')
    assert [source[i]['crowd'].tolist() for i in range(3)] == [[False, False], [True], []]


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
