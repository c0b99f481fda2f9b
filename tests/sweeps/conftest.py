"""What the tests of sweeps share: a free port, the working directory, runs without training."""

import socket

import jax
import pytest
from helpers.studies import METRIC

from vit_jax.trainer import train


@pytest.fixture
def free_port():
    """Of 127.0.0.1; free a moment ago."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def at_the_root(repo, monkeypatch):
    """Configs are named from there."""
    monkeypatch.chdir(repo)


@pytest.fixture(autouse=True)
def programs_stay(monkeypatch):
    """Workers free what they compiled after each trial, which would be that of other tests, too."""
    monkeypatch.setattr(jax, 'clear_caches', lambda: None)


@pytest.fixture
def fake_training(monkeypatch):
    """`fake_training(f)`: a run's metric is f(config, step) at the steps 1, 2, 3, or others."""

    def install(f, steps=(1, 2, 3)):
        def run(config, folder, report, **_):
            for step in steps:
                results = {METRIC: f(config, step)}
                if report(step, results) and step < steps[-1]:
                    raise train.Pruned
            return results

        monkeypatch.setattr(train, 'train', run)

    return install
