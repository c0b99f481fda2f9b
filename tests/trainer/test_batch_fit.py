"""`evaluate --batch-size fit`."""

import json

import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.runtime import environment
from vit_jax.trainer import batch_fit, measure


@pytest.mark.slow
def test_the_largest_batch_depends_on_the_memory(smoke_run, monkeypatch):
    prepared = measure.prepare(load.open_run(smoke_run))
    (evaluation,) = prepared.evaluations.values()
    shards, examples = prepared.steps.layout.num_shards, len(evaluation.data.source)
    whole = batch_fit.largest_batch(prepared)
    assert examples <= whole < examples + shards, 'all of them fit'
    monkeypatch.setattr(batch_fit, 'memory', lambda *_: 2.0**20)
    some = batch_fit.largest_batch(prepared)
    assert shards <= some < whole and some % shards == 0
    monkeypatch.setattr(batch_fit, 'memory', lambda *_: 1.0)
    with pytest.raises(UserError, match=f'not even {shards} examples fit into 1 bytes'):
        batch_fit.largest_batch(prepared)


@pytest.mark.slow
def test_results_are_those_of_any_batch_size(smoke_run, capsys):
    found = []
    for size in ('32', 'fit'):
        assert main(['evaluate', '--workdir', str(smoke_run), '--json', '--batch-size', size]) == 0
        shown = capsys.readouterr()
        found.append(json.loads(shown.out))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert 'batches of ' in shown.err
    for wrong, said in (
        ('0', 'at least 1'),
        ('many', "'many'"),
    ):
        assert main(['evaluate', '--workdir', str(smoke_run), '--batch-size', wrong]) == 2
        assert mentions(capsys.readouterr().err, '--batch-size', said)


class Device:
    def __init__(self, platform, stats=None):
        self.platform, self.device_kind, self.memory_stats = platform, platform, lambda: stats


def test_the_memory_is_that_of_the_device_or_of_the_host(monkeypatch):
    assert batch_fit.memory(Device('gpu', {'bytes_limit': 1000}), 8) == pytest.approx(900)
    monkeypatch.setattr(environment, 'available_memory', lambda: 1600)
    assert batch_fit.memory(Device('cpu'), 8) == pytest.approx(100)
    with pytest.raises(UserError, match=r'memory.*METAL'):
        batch_fit.memory(Device('METAL'), 1)


def test_memory_of_a_host_is_limited_by_its_groups(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, 'OWN_CGROUPS', tmp_path / 'own')
    monkeypatch.setattr(environment, 'CGROUPS', tmp_path)
    monkeypatch.setattr(environment, 'MEMINFO', tmp_path / 'meminfo')
    assert environment.available_memory() is None
    (tmp_path / 'meminfo').write_text('MemTotal: 9 kB\nMemAvailable: 4 kB\n')
    assert environment.available_memory() == 4096
    (tmp_path / 'own').write_text('0::/pod\n')
    (tmp_path / 'pod').mkdir()
    for limit, left in (('max', 4096), ('3000', 2000), ('500', 0)):
        (tmp_path / 'pod' / 'memory.max').write_text(f'{limit}\n')
        (tmp_path / 'pod' / 'memory.current').write_text('1000\n')
        assert environment.available_memory() == left
