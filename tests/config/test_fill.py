"""Sizes that the config leaves open come from the data, and have to suffice."""

import pathlib

import pytest

from vit_jax.config import fill
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError


def test_classes_come_from_the_data(repo: pathlib.Path) -> None:
    config = config_lib.load(f'{repo}/experiments/vit/digits.py')
    fill.num_classes(config, 10)
    assert config.model.num_classes == 10
    with pytest.raises(UserError, match='11 classes'):
        fill.num_classes(config, 11)


def test_the_vocabulary_fills_the_size_of_the_model(repo: pathlib.Path) -> None:
    config = config_lib.load(f'{repo}/experiments/vit/digits.py', ['model.num_classes=10'])
    fill.vocab_size(config, 8000)  # a model of images has none
    assert 'vocab_size' not in config.model
    with config.unlocked():
        config.model.vocab_size = None
    fill.vocab_size(config, 0)
    assert config.model.vocab_size is None
    fill.vocab_size(config, 8000)
    assert config.model.vocab_size == 8000
    with pytest.raises(UserError, match=r'vocab_size=8000: .* has 8001 ids'):
        fill.vocab_size(config, 8001)
