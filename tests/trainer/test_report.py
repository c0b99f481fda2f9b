"""The hook that sees the evaluations of a run and may end it."""

import json

import jax
import pytest

from vit_jax.config import load
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
