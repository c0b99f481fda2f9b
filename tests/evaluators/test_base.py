"""What holds for every evaluator."""

import sys
import types

import numpy as np
import pytest
from helpers.datasets import dataset

from vit_jax.config import objects
from vit_jax.errors import UserError
from vit_jax.evaluators import base, fewshot, knn, linear_probe


class Constant(base.Evaluator):
    """An evaluator that relies on the defaults."""

    def update(self, predictions, batch):
        pass

    def result(self):
        return {'one': 1.0}


def test_the_defaults_suffice():
    evaluator = Constant()
    assert (evaluator.learns, evaluator.signature) == (False, '')
    evaluator.open(dataset(3, 2))
    evaluator.start()
    evaluator.update({}, {})
    assert evaluator.result() == {'one': 1.0}


@pytest.mark.parametrize(
    'evaluator',
    [fewshot.Evaluator((2,), seeds=1), knn.Evaluator(3), linear_probe.Evaluator((0.1, 10.0))],
    ids=lambda evaluator: evaluator.__class__.__module__,
)
def test_a_pass_knows_nothing_of_the_pass_before(evaluator):
    noise, labels = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3

    def begin(distance):
        evaluator.start()
        centers = distance * np.eye(3, 4)[labels]
        evaluator.fit({'features': centers + noise}, {'label': labels})
        evaluator.update({'features': centers + noise[::-1]}, {'label': labels})

    def measured(distance):
        begin(distance)
        return evaluator.result()

    evaluator.open(dataset(60, 3), dataset(60, 3))
    expected = measured(9.0)
    assert measured(0.0) != expected
    begin(0.0)  # and no result is asked for, as after an error
    assert measured(9.0) == expected


class WithoutBase:
    learns = False

    def update(self, predictions, batch):
        pass

    def result(self):
        return {}


@pytest.mark.parametrize('found', [WithoutBase, lambda: Constant()])
def test_an_evaluator_without_the_base_class_is_refused_by_name(found, monkeypatch):
    package, module = types.ModuleType('my_lab'), types.ModuleType('my_lab.measure')
    package.__path__, module.Evaluator = [], found
    module.__spec__ = types.SimpleNamespace(name='my_lab.measure')
    monkeypatch.setitem(sys.modules, 'my_lab', package)
    monkeypatch.setitem(sys.modules, 'my_lab.measure', module)
    with pytest.raises(UserError, match=r'my_lab\.measure.*vit_jax\.evaluators\.base\.Evalua') as e:
        objects.evaluator_class('my_lab.measure')
    assert '\n' not in str(e.value)


def test_the_base_class_is_no_choice():
    with pytest.raises(UserError, match=r"'base'.*\(valid: bleu, (?!.*base).*\)"):
        objects.evaluator_class('base')


@pytest.mark.parametrize('name', ['knn', 'fewshot', 'linear_probe'])
def test_what_is_said_to_come_is_what_comes(name):
    options = {'knn': {'k': 3}, 'fewshot': {'shots': (1, 3)}, 'linear_probe': {'c': (1.0,)}}
    evaluator = {'knn': knn, 'fewshot': fewshot, 'linear_probe': linear_probe}[name].Evaluator(
        **options[name]
    )
    features, labels = np.random.default_rng(0).normal(size=(12, 3)), np.arange(12) % 2
    assert tuple(evaluator.measure(features, labels, features, labels)) == evaluator.names()
