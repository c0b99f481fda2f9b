"""Hooks: `report` sees the evaluations of a run, callbacks each step; both may end it."""

import json

import jax
import numpy as np
import pytest

from vit_jax.config import load
from vit_jax.inference import load as inference_load
from vit_jax.trainer import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compiled_once')]


@pytest.fixture
def config(repo):
    return load.load(f'{repo}/tests/helpers/linear.py')


def run(config, folder, report):
    return train.train(config, folder, devices=jax.devices()[:1], report=report)


def test_report_sees_every_evaluation_and_cannot_end_a_run_that_is_complete(config, tmp_path):
    seen = {}

    def report(step, results):
        seen[step] = results
        return step == 20

    assert run(config, tmp_path, report) == seen[20]
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    evaluated = {r.pop('step'): r for r in rows if 'test/accuracy' in r}
    assert seen == evaluated
    assert sorted(seen) == [10, 20]


def test_report_ends_a_run(config, tmp_path):
    with pytest.raises(train.Pruned, match='after step 10/20'):
        run(config, tmp_path, lambda step, results: True)
    assert not (tmp_path / 'result.json').exists()
    assert '"step": 10' in (tmp_path / 'metrics.jsonl').read_text().splitlines()[-1]


def test_callbacks_see_each_step_log_and_end_a_run(config, tmp_path):
    """Bit for bit the run without them, up to the step at which one ends it."""
    steps, results = [], {}

    def watch(loop):
        steps.append(loop.step)
        if loop.evaluated:
            results[loop.step] = loop.results

    def finish(loop):
        if loop.step == 12:
            loop.write({'own/double': 2.0 * loop.step})
            loop.end('enough')

    devices = jax.devices()[:1]
    found = train.train(config, tmp_path / 'a', devices=devices, callbacks=[watch, finish])
    assert steps == list(range(1, 13)) and found == results[10]
    lines = (tmp_path / 'a' / 'metrics.jsonl').read_text().splitlines()
    assert {'step': 12, 'own/double': 24.0} in map(json.loads, lines)
    assert json.loads((tmp_path / 'a' / 'result.json').read_text())['ended'] == 'enough'
    with pytest.raises(train.Preempted):
        train.train(config, tmp_path / 'b', devices=devices, stop_at=12)
    names = [folder / 'checkpoints' / '12' for folder in (tmp_path / 'a', tmp_path / 'b')]
    ours, theirs = (checkpoint_leaves(name) for name in names)
    assert len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def checkpoint_leaves(folder):
    return jax.tree.leaves(inference_load.read(folder, allowed=['helpers']).variables)


def test_an_error_in_a_callback_ends_a_run_that_resumes(config, tmp_path):
    def fail(loop):
        if loop.step == 15:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train.train(config, tmp_path, devices=jax.devices()[:1], callbacks=[fail])
    seen = []
    options = {'devices': jax.devices()[:1], 'callbacks': [lambda loop: seen.append(loop.step)]}
    assert train.train(config, tmp_path, **options)['test/accuracy'] >= 0
    assert seen[-1] == 20 and seen[0] > 1
