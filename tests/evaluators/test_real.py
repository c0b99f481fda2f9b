"""Accuracy on labels of which an image may have several, or none."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.evaluators.real import Evaluator

RIGHT = [[2], [0, 3], [], [1]]
ANSWERS = [2, 3, 0, 0]  # right, right, does not count, wrong


class Files:
    """The validation images 1 to 4 of ImageNet, in another order."""

    title = 'folder:imagenet validation'
    order = (3, 1, 4, 2)

    def __init__(self, name='val/n0144/ILSVRC2012_val_{:08}.JPEG'):
        self._name = name

    def __len__(self):
        return len(self.order)

    def record_name(self, index):
        return self._name.format(self.order[index])


def data(source, **spec):
    return SimpleNamespace(source=source, spec=spec)


def measured(evaluator, images, classes=5, **fields):
    """In two batches, the images in this order."""
    evaluator.start()
    for rows in (slice(0, 3), slice(3, None)):
        probs = 0.1 + 0.6 * np.eye(classes)[[ANSWERS[i] for i in images]]
        batch = {'index': np.arange(len(images)), **fields}
        evaluator.update({'probs': probs[rows]}, {k: v[rows] for k, v in batch.items()})
    return evaluator.result()


@pytest.fixture
def labels(tmp_path):
    path = tmp_path / 'real.json'
    path.write_text(json.dumps(RIGHT))
    return str(path)


def test_labels_of_the_source():
    right = np.array([[c in classes for c in range(5)] for classes in RIGHT])
    evaluator = Evaluator()
    evaluator.open(data(Files(), real_label=None))
    for _ in range(2):  # a pass knows nothing of the one before
        assert measured(evaluator, range(4), real_label=right) == {'real_accuracy': 2 / 3}


def test_labels_of_a_file_go_by_the_number_of_the_image(labels):
    evaluator = Evaluator(labels)
    evaluator.open(data(Files()))
    found = measured(evaluator, [number - 1 for number in Files.order], 1000)
    assert found == {'real_accuracy': 2 / 3}
    assert set(found) == set(evaluator.names())


def test_no_image_has_a_label():
    right = np.zeros((4, 5), bool)
    evaluator = Evaluator()
    evaluator.open(data(Files(), real_label=None))
    assert measured(evaluator, range(4), real_label=right) == {}


def test_data_without_such_labels(labels, tmp_path):
    with pytest.raises(UserError, match=r"'real_label'; .*tfds:imagenet2012_real"):
        Evaluator().open(data(Files(), label=None))
    with pytest.raises(UserError, match=r'cat3\.png: .* ImageNet'):
        Evaluator(labels).open(data(Files('cat{}.png')))
    with pytest.raises(UserError, match=r'labels has 4 images, .* 30'):
        Evaluator(labels).open(data(Files('ILSVRC2012_val_{:07}0.JPEG')))
    with pytest.raises(UserError, match=r"labels='.*absent.json'"):
        Evaluator(str(tmp_path / 'absent.json'))
    (tmp_path / 'other.json').write_text('[[1], [1000]]')
    with pytest.raises(UserError, match=r'labels=.*0 to 999'):
        Evaluator(str(tmp_path / 'other.json'))


def test_a_model_of_other_classes(labels):
    evaluator = Evaluator(labels)
    evaluator.open(data(Files()))
    with pytest.raises(UserError, match=r'labels .*1000 classes, .* 5'):
        measured(evaluator, range(4))


def test_a_task_without_probabilities():
    with pytest.raises(UserError, match="'probs'"):
        Evaluator().update({'boxes': np.zeros((1, 2))}, {})


def test_labels_of_another_file_have_another_digest(labels, tmp_path):
    other = tmp_path / 'other.json'
    other.write_text(json.dumps([*RIGHT[:3], [2]]))
    assert Evaluator(labels).digest() != Evaluator(str(other)).digest()
    assert Evaluator().digest() == ''
