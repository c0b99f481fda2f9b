"""The scripts that compile for TPUs and GPUs and write tables into documents."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def script(repo, monkeypatch):
    """`script('pages')`: a module of tests/bench."""
    monkeypatch.syspath_prepend(str(repo / 'tests' / 'bench'))
    monkeypatch.setattr(sys, 'argv', [str(repo / 'tests' / 'bench' / 'tpu.py')])
    return importlib.import_module


@pytest.fixture
def tpu(script, tmp_path, monkeypatch):
    """tests/bench/tpu.py, with a page of its own that has both tables, empty."""
    tpu = script('tpu')
    page = tmp_path / 'page.md'
    tables = (f'<!-- {name}, made by {tpu.SCRIPT} -->\n<!-- end -->\n' for name in TABLES)
    page.write_text('before\n' + 'between\n'.join(tables) + 'after\n')
    monkeypatch.setattr(tpu, 'PAGE', page)
    monkeypatch.setattr(script('pages').metadata, 'version', lambda name: '1.2')
    return tpu


TABLES = ('blocks', 'steps')
CHOSEN = 'encoder pallas'


def rows_of(page):
    return [line for line in page.read_text().splitlines() if line.startswith('| `')]


def test_rows_are_written_in_their_order_and_all_else_stays(tpu, monkeypatch, capsys):
    seen = []

    def cost(step, cycles):
        seen.append((step.block, step.attention, cycles))
        return tpu.tpu_block.Cost(0.002, 3 * 10**9, 10**9, *([4 * 10**6] * 2 if cycles else ()))

    monkeypatch.setattr(tpu.tpu_block, 'cost', cost)
    tpu.main('--cycles', CHOSEN)
    tpu.main('encoder xla', CHOSEN)
    assert seen == [
        *[('encoder', 'pallas', True), ('encoder', 'xla', False), ('encoder', 'pallas', False)]
    ]
    assert rows_of(tpu.PAGE) == [
        '| `encoder xla`, 128 on v5e | 2.00 | 3.00 | 1.00 |  |  |',
        '| `encoder pallas`, 128 on v5e | 2.00 | 3.00 | 1.00 | 4.00 | 4.00 |',
    ]
    text = tpu.PAGE.read_text()
    assert text.startswith('before\n<!-- blocks') and text.endswith('<!-- end -->\nafter\n')
    assert 'jax 1.2, libtpu 1.2' in text and '\nbetween\n' in text


def test_cycles_of_another_schedule_are_forgotten(tpu):
    old = ['name', '2.00', '3.00']
    assert tpu.with_cycles_kept(['name', '2.00', ''], old, 1) == old
    assert tpu.with_cycles_kept(['name', '2.01', ''], old, 1) == ['name', '2.01', '']
    assert tpu.with_cycles_kept(['name', '2.00', '4.00'], old, 1)[-1] == '4.00'
    assert tpu.with_cycles_kept(['name', '2.00', ''], None, 1)[-1] == ''


def test_every_row_has_a_name_of_its_own(tpu):
    names = [*map(tpu.name_of, tpu.BLOCKS), *map(tpu.step_name, tpu.STEPS)]
    assert len({*names}) == len(names)


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec('libtpu'), reason="no libtpu: pip install -e '.[preflight]'"
)
def test_a_block_is_compiled_by_its_schedule(script):
    block = script('tpu_block')
    xla, kernel = (block.cost(block.Step('detr', by, 4)) for by in ('xla', 'pallas'))
    assert 0 < kernel.seconds < xla.seconds
    assert 0 < kernel.moved < xla.moved
    assert xla.cycles is None


@pytest.fixture
def gpu_recipes(script, tmp_path, monkeypatch):
    """tests/bench/gpu_recipes.py with a page of its own; GPUs of 10 GiB, without the compiler."""
    made = script('gpu_recipes')
    page = tmp_path / 'gpu.md'
    page.write_text(f'before\n<!-- h100, made by {made.SCRIPT} -->\n<!-- end -->\nafter\n')
    monkeypatch.setattr(made, 'PAGE', page)
    monkeypatch.setattr(script('pages').metadata, 'version', lambda name: '1.2')

    def preflight(config, target, program):
        parts, state = config.get('step', {}).get('accum_steps', 1), 2 * 2**30
        rows = config.batch_size / target.chips / parts
        held = int(rows * 2**30 / 16)
        report = SimpleNamespace(
            memory={'parameters': state, made.preflight.TEMPORARIES: held},
            needed=state + held,
            usable=10 * 2**30,
            fits=state + held <= 10 * 2**30,
            rematerialized=0,
            link=1e-3,
        )
        run = SimpleNamespace(seconds=0.5, mfu=0.4, chip_hours=7)
        return [report], run

    monkeypatch.setattr(made.preflight, 'preflight', preflight)
    return made


def test_steps_that_do_not_fit_into_gpus_are_divided(gpu_recipes):
    """Of 64 GiB, a part of 1,024 rows may hold 8: eight parts are tried next, and fit."""
    recipe = 'vit/imagenet2012.py:fast'
    assert not gpu_recipes.write_rows('h100', [recipe])
    (row,) = rows_of(gpu_recipes.PAGE)
    cells = ['10.0 in 8 parts', '500.0 (40%)', '10.0', '500.0 (40%)', '1.0', '7']
    assert row == f'| `{recipe}` | 1,024 | {" | ".join(cells)} |'
    assert gpu_recipes.PAGE.read_text().startswith('before\n')
    tried = SimpleNamespace(memory={gpu_recipes.preflight.TEMPORARIES: 9}, needed=20, usable=10)
    assert gpu_recipes.more_parts(tried, 4) == 8, 'no number of parts helps a state too large'
