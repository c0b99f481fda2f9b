"""The record of a run's time: its parts fill the time, whatever ended its processes."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.storage import times
from vit_jax.viz import charts

KILLED = [
    {'start': 1000.0, 'step': 0},
    {'at': 1010.0, 'step': 0, 'start': 7.0, 'restore': 1.0, 'compile': 2.0},
    {'at': 1030.0, 'step': 10, 'steps': 16.0, 'data': 4.0},
    {'at': 1032.0, 'step': 10, 'saving': 2.0},
    {'at': 1052.0, 'step': 20, 'steps': 18.0, 'data': 2.0},
    {'at': 1055.0, 'step': 20, 'evaluation': 3.0},
    {'alive': 1054.0, 'part': 'evaluation'},
    {'alive': 1056.0, 'part': 'steps'},
]
RESUMED = [
    {'start': 1100.0, 'step': 10},
    {'at': 1105.0, 'step': 10, 'start': 5.0},
    {'at': 1125.0, 'step': 20, 'steps': 20.0},
    {'at': 1126.0, 'step': 20, 'saving': 1.0},
]


def write(folder: pathlib.Path, *lines: dict) -> times.Account:
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / 'times.jsonl').write_text(text)
    account = times.read(folder)
    assert account is not None
    return account


def spent(account: times.Account) -> dict[str, float]:
    return {name: pytest.approx(x) for name, x in account.seconds.items() if x}


def test_the_parts_of_one_process(tmp_path):
    account = write(tmp_path, *KILLED)
    assert account.wall == pytest.approx(56) and account.starts == 1
    assert spent(account) == {
        'steps': 35, 'data': 6, 'evaluation': 3, 'saving': 2, 'start': 7, 'restore': 1, 'compile': 2
    }  # fmt: skip
    assert account.goodput == pytest.approx(35 / 56)


def test_a_kill_costs_the_work_after_the_last_save_and_the_time_until_the_next_start(tmp_path):
    account = write(tmp_path, *KILLED, *RESUMED)
    assert account.wall == pytest.approx(126) and account.starts == 2
    lost = 18 + 2 + 3 + 1
    assert account.seconds['lost'] == pytest.approx(lost)
    assert account.seconds['between'] == pytest.approx(1100 - 1056)
    assert account.seconds['steps'] == pytest.approx(16 + 20)


def test_a_start_that_goes_further_back_loses_more(tmp_path):
    anew = [{'start': 1200.0, 'step': 0}, {'at': 1201.0, 'step': 5, 'steps': 1.0}]
    account = write(tmp_path, *KILLED, *RESUMED, *anew)
    assert account.seconds['steps'] == pytest.approx(1.0)
    assert account.seconds['lost'] == pytest.approx(16 + 4 + 2 + 24 + 21)
    assert account.wall == pytest.approx(201)


def test_a_line_of_steps_before_and_after_the_save_is_divided(tmp_path):
    lines = [{'start': 0.0, 'step': 0}, {'at': 10.0, 'step': 10, 'steps': 10.0}]
    account = write(tmp_path, *lines, {'start': 20.0, 'step': 4})
    assert spent(account) == {'steps': 4, 'lost': 6, 'between': 10}


def test_damaged_lines_leave_a_gap_that_is_named(tmp_path, caplog):
    write(tmp_path, *KILLED)
    whole = (tmp_path / 'times.jsonl').read_text().splitlines()
    bad = ['[]', '{"at": NaN, "step": 1}', '{"at": 1e400, "step": 1}', '{"at": 5, "step": "x"}']
    bad += [
        '{"at": 1, "step": true}',
        '{"alive": 9, "part": "nap"}',
        '{"at": 1, "step": 1, "?": 1}',
    ]
    (tmp_path / 'times.jsonl').write_text('\n'.join([*whole[:2], *bad, *whole[3:5], '{"at": 10']))
    account = times.read(tmp_path)
    assert account.seconds['unknown'] == pytest.approx(20) and account.wall == pytest.approx(52)
    assert mentions(caplog.text, len(bad), 'damaged', 'skipped')


@pytest.mark.parametrize('text', ['', 'nonsense\n', '{"at": 1.0, "step": 3}\n'])
def test_no_record(tmp_path, text):
    (tmp_path / 'times.jsonl').write_text(text)
    assert times.read(tmp_path) is None


def test_clocks_that_disagree_give_no_negative_time(tmp_path):
    behind = [{'start': 900.0, 'step': 20}, {'at': 910.0, 'step': 21, 'steps': 10.0}]
    account = write(tmp_path, *KILLED, *behind)
    assert account.seconds['between'] == 0 and account.wall == pytest.approx(66)
    charts.draw_goodput({'run': account})


@pytest.mark.parametrize('bins', [1, 7, 240])
def test_stretches_of_the_picture_hold_all_of_the_time(tmp_path, bins):
    account = write(tmp_path, *KILLED, *RESUMED)
    found = times.bin_seconds(account, bins)
    each = [sum(parts.values()) for parts in found]
    np.testing.assert_allclose(each, account.wall / bins, rtol=1e-9)
    for name, seconds in account.seconds.items():
        assert sum(parts.get(name, 0.0) for parts in found) == pytest.approx(seconds)
