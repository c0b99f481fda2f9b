"""The keys of a config: fields of sections, and what models, tasks and evaluators declare."""

import dataclasses
import pathlib

import pytest
from ml_collections import ConfigDict

from vit_jax.config import load, objects, schema

DIGITS = 'experiments/vit/digits.py'
KEYS = {
    'optim.schedule': 'name warmup cooldown timescale boundaries factor power init final '
    'cooldown_form',
    'optim.decay_schedule': 'name warmup cooldown timescale boundaries factor power init final '
    'cooldown_form',
    'step': 'accum_steps ema_decay ema_schedule ema_start ema_warmup max_skips sam sam_schedule',
    'step.sam': 'rho alpha',
    'every': 'log eval checkpoint examples',
    'checkpoint': 'keep_last keep_every keep_steps keep_best',
    'parallel': 'strategy fsdp tensor slices rules min_split_size',
    'data': 'source split classes transforms vocab buckets sizes workers threads cache '
    'stall_seconds count plan',
    'init': 'from posemb select classes into',
    'branch': 'from step',
}


@pytest.fixture
def config(repo: pathlib.Path) -> ConfigDict:
    return load.load(f'{repo}/{DIGITS}')


@pytest.mark.parametrize('section', KEYS)
def test_keys_of_sections_are_their_fields(config: ConfigDict, section: str) -> None:
    assert set(schema.parameters(config, section)) == set(KEYS[section].split())


def test_keys_of_an_optimizer_are_those_of_optax(config: ConfigDict) -> None:
    keys = set(schema.parameters(config, 'optim'))
    assert {'name', 'lr', 'weight_decay', 'schedule', 'layer_decay', 'b1', 'b2', 'eps'} <= keys
    assert not keys & {'params', 'total_steps', 'to_steps', 'learning_rate', 'mask', 'kwargs'}


def test_keys_of_model_and_task_are_their_fields(config: ConfigDict) -> None:
    for section, cls in (('model', objects.model_class), ('task', objects.task_class)):
        fields = {f.name for f in dataclasses.fields(cls(config[section].name))} - {'parent'}
        assert set(schema.parameters(config, section)) == fields | {'name'}


def test_keys_of_an_entry_depend_on_its_evaluator() -> None:
    def keys(**entry) -> set[str]:
        return set(schema.parameters({'evals': {'x': entry}}, 'evals.x'))

    data = set(KEYS['data'].split())
    entry = data | {'evaluator', 'every', 'batch_size', 'ema_decay'}
    assert keys() == entry
    assert keys(evaluator='knn') == entry | {'fit', 'k', 'temperature'}
    assert keys(evaluator='bleu') == entry | {'edges', 'reference', 'tokenize'}
