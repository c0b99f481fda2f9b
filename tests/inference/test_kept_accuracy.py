"""Accuracy of a classifier on colorized, gray and original images."""

import types

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.evaluators.base import OtherModel
from vit_jax.inference import kept_accuracy
from vit_jax.ops import colors

RED, GREEN = (200, 40, 40), (40, 200, 40)
LABELS = np.array([0, 1, 0, 1, 0], np.int32)
SOURCE = [{'image': np.full((4, 4, 3), (RED, GREEN)[i], np.uint8)} for i in LABELS]
DATA = types.SimpleNamespace(source=SOURCE, info=SourceInfo(2, ('red', 'green')))


class Source(list):
    """Records with a title."""


def redness(images):
    """Says red where red is above green; what is neither is green."""
    red, green = images[..., 0].mean((1, 2)), images[..., 1].mean((1, 2))
    return {'probs': np.stack([red - green, np.full_like(red, 1e-3)], axis=-1)}


MODEL = OtherModel(redness, ('probs',), 'classify', '', ('red', 'green'))


@pytest.fixture
def evaluator():
    found = kept_accuracy.Evaluator('runs/a')
    found.read_models(lambda path: MODEL)
    found.open(DATA)
    found.start()
    return found


def batch(index):
    return {'index': np.array(index, np.int32), 'label': LABELS[index]}


def test_three_accuracies(evaluator):
    """Three of five are given the right color; without any, all are taken for green."""
    wrong = np.stack([SOURCE[i]['image'] for i in (1, 0, 2, 3, 4)])
    gray = np.asarray(colors.to_bytes(colors.to_gray(wrong / np.float32(255))))
    assert gray.std() > 0
    evaluator.update({'image': wrong[:3]}, batch([0, 1, 2]))
    evaluator.update({'image': wrong[3:]}, batch([3, 4]))  # a smaller batch
    found = evaluator.result()
    assert tuple(found) == evaluator.names()
    assert found == {
        'accuracy_colorized': 3 / 5,
        'accuracy_grey': 2 / 5,
        'accuracy_original': 1,
    }
    evaluator.start()
    assert evaluator.result()['accuracy_original'] == 0


def test_of_several_samples_the_first_is_judged(evaluator):
    images = np.stack([record['image'] for record in SOURCE])
    samples = np.stack([images[::-1], images], axis=1)
    samples[1, 0] = images[0]
    finite = np.ones((5, 2), bool)
    evaluator.update({'image': images, 'samples': samples, 'finite': finite}, batch(range(5)))
    assert evaluator.result()['accuracy_colorized'] == 4 / 5
    finite[0, 0] = False
    evaluator.update({'image': images, 'samples': samples, 'finite': finite}, batch(range(5)))
    assert np.isnan(evaluator.result()['accuracy_original'])


def test_classes_of_the_same_names_are_matched_by_name(evaluator, caplog):
    flags = Source(SOURCE)
    flags.title = 'flags'
    evaluator.open(types.SimpleNamespace(source=flags, info=SourceInfo(2, ('green', 'red'))))
    images = np.stack([record['image'] for record in SOURCE])
    evaluator.update({'image': images}, {**batch([0, 1, 2, 3, 4]), 'label': 1 - LABELS})
    assert evaluator.result()['accuracy_original'] == 1
    assert mentions(caplog.text, '2 classes', 'matched')


def test_mistakes(evaluator):
    with pytest.raises(UserError, match=r'images.*predicts'):
        evaluator.update({}, batch([0]))
    other = types.SimpleNamespace(source=SOURCE, info=SourceInfo(3, ('red', 'green', 'blue')))
    with pytest.raises(UserError, match=r'has 2 classes \(red, .* 3 \(blue, '):
        evaluator.open(other)
    with pytest.raises(UserError, match=r"classifier.*'runs/a'"):
        evaluator.read_models(lambda path: MODEL._replace(class_names=()))
