"""`robustness`: ImageNet's robustness sets in the layouts of their archives."""

from __future__ import annotations

import csv
import dataclasses
import json
import os

import numpy as np
import pytest
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.trainer import robustness

pytestmark = pytest.mark.usefixtures('one_device')
SIDE = 8
A_CLASSES = (6, 11, 999)  # classes 6 and 11 of 200 in ImageNet-A, and ImageNet's last
REAL = [[6], [11, 6], []]


@pytest.fixture(scope='module')
def theirs():
    transformers = pytest.importorskip('transformers')
    torch = pytest.importorskip('torch')
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=SIDE,
        patch_size=4,
        num_labels=1000,
    )
    model = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight)
    return model


@pytest.fixture(scope='module')
def checkpoint(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp('model')
    theirs.save_pretrained(folder)
    processor = {'image_processor_type': 'ViTImageProcessor', 'size': {'height': 8, 'width': 8}}
    (folder / 'preprocessor_config.json').write_text(json.dumps(processor))
    return folder


def pixels(number):
    return np.random.default_rng(number).integers(0, 255, (SIDE, SIDE, 3), np.uint8)


def save(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(number)).save(path)


@pytest.fixture(scope='module')
def sets(tmp_path_factory):
    """Three images of each class of A, the first three in val, 1,000 in V2, and fog."""
    root, ids = tmp_path_factory.mktemp('sets'), robustness.imagenet_ids()
    for place, label in enumerate(A_CLASSES):
        for copy in range(3):
            save(root / 'imagenet-a' / ids[label] / f'{copy}.png', 3 * place + copy)
        name = f'ILSVRC2012_val_{place + 1:08}.png'
        save(root / 'val' / ids[label] / name, 3 * place)
        for severity in range(1, 6):
            save(root / 'ImageNet-C' / 'weather' / 'fog' / str(severity) / ids[label] / name, place)
    (root / 'real.json').write_text(json.dumps(REAL))
    variant = root / 'imagenetv2-top-images-format-val'
    for label in range(1000):
        (variant / str(label)).mkdir(parents=True)
        os.link(root / 'val' / ids[6] / 'ILSVRC2012_val_00000001.png', variant / f'{label}/a.png')
    return root


def logits(theirs, numbers):
    """Scores of transformers' own model, [N, 1000]."""
    import torch

    images = np.stack([pixels(n) for n in numbers]).transpose(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        return theirs(torch.from_numpy(images.astype(np.float32))).logits.numpy()


def test_sets_are_measured_as_by_transformers(theirs, checkpoint, sets, tmp_path, capsys):
    files = tmp_path / 'sets.png', tmp_path / 'sets.csv'
    words = [checkpoint, sets, '--out', files[0], '--table', files[1], '--json']
    assert cli.main(['robustness', *map(str, words)]) == 0
    results = json.loads(capsys.readouterr().out)
    rows = {(row['set'], row['severity']): row for row in results['sets']}
    labels = np.repeat(A_CLASSES, 3)
    scores = logits(theirs, range(9))
    masked = np.array(A_CLASSES)[scores[:, A_CLASSES].argmax(1)]
    assert (masked != scores.argmax(1)).any()  # the mask matters
    assert rows['ImageNet-A', None]['accuracy'] == (masked == labels).mean()
    assert (rows['ImageNet-A', None]['classes'], rows['ImageNet-A', None]['images']) == (3, 9)
    whole = scores[[0, 3, 6]].argmax(1)
    correct = [whole[i] in REAL[i] for i in range(2)]  # the third image has no label
    assert rows['ImageNet-ReaL', None]['accuracy'] == np.mean(correct)
    assert rows['ImageNet-V2 top-images', None]['accuracy'] == 1 / 1000  # one image, every class
    foggy = np.array(A_CLASSES)[logits(theirs, range(3))[:, A_CLASSES].argmax(1)]
    error = 1 - (foggy == A_CLASSES).mean()
    assert results['corruption_errors'] == {'fog': pytest.approx(error / 0.819324)}
    assert files[0].stat().st_size > 0
    table = list(csv.DictReader(files[1].open()))
    assert [float(row['accuracy']) for row in table] == [r['accuracy'] for r in results['sets']]


def test_corruption_errors_are_normalized_by_those_of_alexnet():
    """The authors' numbers; fog and snow are calculated by hand."""
    rows = [
        {'corruption': name, 'severity': severity, 'accuracy': 1 - error}
        for name, error in robustness.ALEXNET_ERRORS.items()
        for severity in range(1, 6)
    ]
    assert robustness.corruption_errors(rows)['mCE'] == pytest.approx(1)
    for row in rows:
        if row['corruption'] == 'fog':
            row['accuracy'] = 1 - row['severity'] / 10
        if row['corruption'] == 'snow':
            row['accuracy'] = 1
    errors = robustness.corruption_errors(rows)
    assert errors['fog'] == pytest.approx(1.5 / (5 * 0.819324))
    assert errors['mCE'] == pytest.approx((13 + 1.5 / 4.09662) / 15)
    assert 'mCE' not in robustness.corruption_errors(rows[1:])
    assert len(robustness.ALEXNET_ERRORS) == 15


def test_prepared_data_of_tfds_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
    with pytest.raises(UserError, match=str(tmp_path)):
        robustness.find_sets('tfds')
    for name in ('imagenet_a', 'imagenet_v2/topimages', 'imagenet2012_corrupted/fog_3'):
        (tmp_path / name / '1.0.0').mkdir(parents=True)
        (tmp_path / name / '1.0.0' / 'features.json').touch()
    names = [(one.name, one.source, one.severity) for one in robustness.find_sets('tfds')]
    assert names == [
        ('ImageNet-V2 top-images', 'tfds:imagenet_v2/topimages', 0),
        ('ImageNet-A', 'tfds:imagenet_a', 0),
        ('ImageNet-C', 'tfds:imagenet2012_corrupted/fog_3', 3),
    ]


@pytest.mark.parametrize(
    ('transforms', 'expected'),
    [
        ('resize_small(256)|central_crop(224)', 'central_crop((224, 224))'),
        ("resize((224, 224), 'bicubic')", 'central_crop((224, 224))'),
        ("resize_small(438, 'bicubic')|central_crop(384)", "resize((384, 384), 'bicubic')"),
    ],
)
def test_images_of_224_pixels_are_not_cropped_again(transforms, expected):
    assert robustness.without_crop(transforms) == expected


def test_other_classes_and_folders_are_rejected(repo, checkpoint, sets, tmp_path, capsys):
    assert cli.main(['robustness', str(checkpoint), str(tmp_path)]) == 2
    assert 'imagenet-a' in capsys.readouterr().err
    assert cli.main(['robustness', str(repo / 'tests/golden/run_digits'), str(sets)]) == 2
    assert '10 classes' in capsys.readouterr().err
    model = load.read(checkpoint)
    assert robustness.with_wordnet_ids(model).class_names[6] == 'n01498041'  # stingray
    other = dataclasses.replace(model, class_names=('cat', *model.class_names[1:]))
    with pytest.raises(UserError, match='tench'):
        robustness.with_wordnet_ids(other)
    ids = robustness.imagenet_ids()
    moved = dataclasses.replace(model, class_names=(ids[1], ids[0], *ids[2:]))
    with pytest.raises(UserError, match='order'):
        next(robustness.measure(moved, robustness.find_sets(str(sets))))
