"""The notebook of the documentation runs, and its outputs are those of its code."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest

from vit_jax.config import load

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOK = json.loads((ROOT / 'docs' / 'tour.ipynb').read_text())
CELLS = [cell for cell in NOTEBOOK['cells'] if cell['cell_type'] == 'code']


def code(cell):
    return ''.join(cell['source'])


@pytest.mark.long
@pytest.mark.slow
def test_the_tour_runs(tmp_path, monkeypatch, one_device, capsys, drawn_curves):
    monkeypatch.chdir(ROOT / 'docs')
    names: dict = {}
    for cell in CELLS:
        text = code(cell).replace("'runs/tour'", repr(str(tmp_path / 'tour')))
        exec(text.replace('60 epochs', '8 steps').replace('depth=3', 'depth=1'), names)
    assert pathlib.Path.cwd() == ROOT and os.listdir(tmp_path) == ['tour']
    assert names['result'].keys() >= {'test/accuracy', 'test/loss'}
    assert names['logits'].shape == (6, 10) and names['gradient'].shape == (8, 8, 1)
    assert {'curves.png', 'attention.png'} <= set(os.listdir(tmp_path / 'tour'))
    assert 'predicted' in capsys.readouterr().out


def test_the_tour_runs_outside_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(code(CELLS[0]), {})
    (config,) = re.findall(r"vit_jax.train\('([^']*)'", code(CELLS[1]))
    assert pathlib.Path.cwd() == tmp_path
    assert load.load(config).model.name == 'vit'


def test_the_tour_was_executed_from_top_to_bottom():
    assert [cell['execution_count'] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell['outputs']]
    assert not any(output['output_type'] == 'error' for output in outputs)
    assert sum('image/png' in output.get('data', {}) for output in outputs) == 2
    assert len(json.dumps(NOTEBOOK)) < 400_000
