"""Every evaluator on predictions that are not finite, and on some that are all alike.

An evaluator sees right predictions, which it measures as perfect, or the same after one array of
them was changed. Numbers that are not finite never count as right: the metrics are NaN.
"""

import functools
import json
import math
import pkgutil
from types import SimpleNamespace

import numpy as np
import pytest

from vit_jax import evaluators
from vit_jax.__main__ import main
from vit_jax.config import objects
from vit_jax.data import vocabulary
from vit_jax.data.records import SourceInfo
from vit_jax.data.sources import open_source

CLASSES, SIZE, WORST = 4, 24, {'nan': math.nan, 'inf': math.inf, 'minus inf': -math.inf}
LABELS = np.arange(SIZE) % CLASSES
TEXTS = [f'Ein Satz mit der Nummer {i} und {i * i} Worten.' for i in range(SIZE)]
ONE_HOT = np.eye(CLASSES, 6, dtype=np.float32)[LABELS]
OPTIONS = {
    'knn': {'k': 3},
    'fewshot': {'shots': (2,), 'seeds': 1, 'l2': 1.0},
    'linear_probe': {'c': (1.0, 10.0)},
    'retrieval': {'ks': (1, 2)},
}
# The arrays of a prediction that are measured; those of the fit split have a `+`.
MEASURED = {
    'bleu': ('score',),
    'coco_ap': ('boxes', 'scores'),
    'confusion': ('probs',),
    'fewshot': ('features', '+features'),
    'knn': ('features', '+features'),
    'linear_probe': ('features', '+features'),
    'mask_ap': ('masks', 'scores'),
    'mean_iou': ('segmentation',),
    'panoptic_quality': ('masks', 'scores'),
    'real': ('probs',),
    'retrieval': ('features', 'text'),
    'several_labels': ('probs',),
    'subset_accuracy': ('probs',),
    'zero_shot': ('features', '+text'),
}
BYTES = {'frechet', 'restoration'}  # measure bytes, and the `finite` of `generate`
CASES = {'patch_knn', 'patch_probe'}  # of patches, in test_patch_probe.py
# A classifier that always says the same is right for 1 / 4; the background is a third of a scene.
GUESSES = dict.fromkeys(('linear_probe', 'knn', 'fewshot'), 1 / CLASSES)
GUESSES |= {'panoptic_quality': 0.35, 'mean_iou': 0.35, 'several_labels': 0.4}
SCENES = ('coco_ap', 'mask_ap', 'mean_iou', 'panoptic_quality')
CHANGES = [(name, array, how) for name in MEASURED for array in MEASURED[name] for how in WORST]


class Source(list):
    """The first scenes, drawn once, or texts."""

    title = 'some'

    def annotations(self, index):
        return self[index]

    def labels(self):
        return LABELS


@functools.cache
def scenes():
    source = open_source('scenes', 'test')
    return Source(source.annotations(i) for i in range(SIZE)), source.info


@functools.cache
def vocab():
    return vocabulary.train(TEXTS * 3, 80, 'bpe')


def data_of(name):
    """The data set of an evaluator."""
    if name in SCENES:
        return SimpleNamespace(**dict(zip(('source', 'info'), scenes(), strict=True)))
    texts = [{'source': text, 'target': text} for text in TEXTS]
    return SimpleNamespace(
        source=Source(texts),
        info=SourceInfo(CLASSES, tuple('abcd'), multilabel=name == 'several_labels'),
        spec={'real_label': None},
        vocab=vocab() if name == 'bleu' else None,
        text=lambda index: texts[index],
    )


def predictions_of(name):
    """Right predictions, of the fit split with a `+`."""
    if name == 'bleu':
        tokens = np.zeros((SIZE, 80), np.int32)
        for row, text in zip(tokens, TEXTS, strict=True):
            ids = [*vocab().encode(text), vocabulary.EOS]
            row[: len(ids)] = ids
        return {'tokens': tokens, 'score': np.zeros(SIZE, np.float32)}
    if name == 'coco_ap':
        found = {'boxes': (SIZE, 20, 4), 'scores': (SIZE, 20)}
        found = {key: np.zeros(shape, np.float32) for key, shape in found.items()}
        found['labels'] = np.zeros((SIZE, 20), np.int32)
        for i, record in enumerate(scenes()[0]):
            count, (height, width) = len(record['boxes']), record['size']
            found['boxes'][i, :count] = record['boxes'] / [width, height, width, height]
            found['scores'][i, :count], found['labels'][i, :count] = 0.9, record['labels']
        return found
    if name in SCENES:
        return panoptic_predictions()
    some = ONE_HOT + np.random.default_rng(0).normal(0, 0.01, ONE_HOT.shape).astype(np.float32)
    found = {'features': some, '+features': some, 'probs': some[:, :CLASSES]}
    return found | {'text': ONE_HOT, '+text': ONE_HOT}


def panoptic_predictions():
    records, info = scenes()
    size = np.array([record['size'] for record in records], np.int32)
    frame = size.max(0)
    queries = max(len(record['labels']) for record in records)
    found = {
        'masks': np.full((SIZE, queries, *frame), -5, np.float32),
        'scores': np.zeros((SIZE, queries), np.float32),
        'labels': np.zeros((SIZE, queries), np.int32),
        'segmentation': np.full((SIZE, *frame), -1, np.int32),
    }
    for i, record in enumerate(records):
        count = len(record['labels'])
        height, width = record['size']
        found['masks'][i, :count, :height, :width] = np.where(record['masks'], 50, -50)
        classes = (record['masks'] * (1 + record['labels'])[:, None, None]).sum(0) - 1
        found['segmentation'][i, :height, :width] = classes
        found['scores'][i, :count], found['labels'][i, :count] = 0.9, record['labels']
    things = ~np.isin(found['labels'], info.stuff)
    return found | {'things': things, 'frame': np.tile(frame, (SIZE, 1)), 'size': size}


def measured(name, changes=None):
    """The metrics of right predictions with some arrays replaced, in batches of seven."""
    evaluator = objects.evaluator_class(name)(**OPTIONS.get(name, {}))
    data = data_of(name)
    evaluator.open(data, data)
    evaluator.start()
    predictions = predictions_of(name) | (changes or {})
    batch = {
        'index': np.arange(SIZE),
        'label': np.eye(CLASSES, dtype=int)[LABELS] if name == 'several_labels' else LABELS,
        'caption': np.arange(SIZE)[:, None] % CLASSES,
        'image_id': LABELS,
        'real_label': np.eye(CLASSES, dtype=bool)[LABELS],
    }
    for prefix, take in (('+', evaluator.fit), ('', evaluator.update)):
        arrays = {k.lstrip('+'): x for k, x in predictions.items() if k.startswith(prefix)}
        arrays |= {k: x for k, x in predictions.items() if not prefix and not k.startswith('+')}
        for rows in (slice(i, i + 7) for i in range(0, SIZE, 7)):
            take({k: x[rows] for k, x in arrays.items()}, {k: x[rows] for k, x in batch.items()})
    found = evaluator.result()
    assert set(found) >= set(evaluator.names()) > set()
    return {k: x for k, x in found.items() if not k.startswith(('AR_1', 'linear_probe_c'))}


def test_every_evaluator_has_a_case():
    names = {module.name for module in pkgutil.iter_modules(evaluators.__path__)}
    assert {name for name in names if not name.startswith('_')} - {'base'} == CASES | BYTES | set(
        MEASURED
    )


@pytest.mark.parametrize('name', MEASURED)
def test_right_predictions_are_perfect(name):
    most = 100 if name == 'bleu' else 1
    assert measured(name) == {k: pytest.approx(most) for k in measured(name)}


@pytest.mark.fault(111)
@pytest.mark.parametrize(('name', 'array', 'how'), CHANGES)
def test_metrics_of_what_is_not_finite_are_nan(name, array, how):
    """All of an array, half of it, or one number of the last example."""
    right = predictions_of(name)[array]
    half = np.arange(right.size).reshape(right.shape) % 2 == 0
    last = np.zeros_like(half)
    last.flat[-1] = True
    for where in (np.ones_like(half), half, last):
        found = measured(name, {array: np.where(where, np.float32(WORST[how]), right)})
        assert all(math.isnan(value) for value in found.values()), found


@pytest.mark.fault(111)
@pytest.mark.parametrize('name', [name for name in MEASURED if name != 'bleu'])
@pytest.mark.parametrize('value', [0.0, 0.5])
def test_predictions_that_are_all_alike_are_at_best_guesses(name, value):
    arrays = predictions_of(name)
    changes = {k: np.full_like(arrays[k], value) for k in MEASURED[name] if k != 'scores'}
    found = measured(name, changes)
    assert all(x <= GUESSES.get(name, 0.05) + 1e-9 for x in found.values()), found


def test_translations_that_are_all_alike_are_bad():
    tokens = predictions_of('bleu')['tokens']
    for same in (np.zeros_like(tokens), np.broadcast_to(tokens[:1], tokens.shape)):
        assert measured('bleu', {'tokens': same})['bleu'] < 60


CONFIG = """
from helpers import linear
def get_config(arg=None):
    config = linear.get_config()
    config.model.name = 'my_lab.overflowing'
    config.total = '2 steps'
    config.evals.knn = dict(config.evals.test, evaluator='knn', fit='train', k=3)
    config.evals.classes = dict(config.evals.test, evaluator='confusion')
    config.checkpoint = dict(keep_best='classes/mean_class_accuracy')
    return config
"""
MODEL = """
import jax.numpy as jnp
from helpers import linear
class Model(linear.Model):
    def __call__(self, image, train=False):
        found = super().__call__(image, train)['logits']
        found = found if train else jnp.where(image.mean((1, 2)) > image.mean(), jnp.nan, found)
        return {'logits': found, 'pre_logits': found}
"""


@pytest.mark.fault(111)
@pytest.mark.slow
def test_a_run_whose_outputs_are_not_finite_has_no_accuracy(
    tmp_path, monkeypatch, one_device, capsys
):
    (tmp_path / 'my_lab').mkdir()
    (tmp_path / 'my_lab/overflowing.py').write_text(MODEL)
    (tmp_path / 'config.py').write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    run = str(tmp_path / 'run')
    assert main(['train', '--config', str(tmp_path / 'config.py'), '--workdir', run]) == 0
    capsys.readouterr()
    assert main(['evaluate', '--workdir', run, '--allow', 'my_lab', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ('test/accuracy', 'test/loss', 'knn/knn_accuracy', 'classes/mean_class_accuracy'):
        assert math.isnan(found[name]), name
