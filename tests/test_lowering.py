"""Every system's programs can be lowered for TPUs: no operation in them is one of CPUs alone."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

from vit_jax.config import load as config_lib
from vit_jax.profiling.benchmark import real_rows
from vit_jax.trainer import build as build_lib

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Sequences need a vocabulary that is trained first, which `synthetic:` data have already.
PATHS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / 'experiments').rglob('*.py')
    if 'def get_config(' in path.read_text()
)


def systems():
    """One smoke config for every pair of a model and a task."""
    found = {}
    for path in PATHS:
        config = config_lib.load(f'{ROOT / path}:smoke')
        found.setdefault((config.model.name, config.task.name), path)
    return [pytest.param(path, id='-'.join(names)) for names, path in found.items()]


def lower(step, *args):
    return step.trace(*args).lower(lowering_platforms=('tpu',)).as_text()


@pytest.mark.parametrize('path', systems())
def test_every_system_is_lowered_for_tpus(path):
    config = config_lib.load(f'{ROOT / path}:smoke')
    training = build_lib.build(config, jax.devices()[:1])
    program, kind = training.program, training.data.shapes[-1]
    batch = {k: np.zeros((kind.rows, *s.shape), s.dtype) for k, s in kind.spec.items()}
    assert 'stablehlo' in lower(program.train_step, program.abstract_state, batch)
    variables, rows = program.abstract_state.variables, batch | real_rows(kind.rows)
    steps = [program.eval_steps.evaluate]
    if any('evaluator' in entry for entry in config.evals.values()):
        steps.append(program.eval_steps.predict)  # matching, decoding
    for step in steps:
        assert 'stablehlo' in lower(step, variables, rows)
