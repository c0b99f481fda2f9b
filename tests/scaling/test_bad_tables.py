"""Tables as they come from real studies: one line for a mistake, or a simpler form and a note."""

from __future__ import annotations

import pytest

from vit_jax.__main__ import main
from vit_jax.scaling import fit, forms

pytestmark = pytest.mark.slow  # as a whole

GOOD = [(f'r{i}', 100 * 2**i, 5 * (100 * 2**i) ** -0.3 + 0.1) for i in range(10)]


def table(tmp_path, rows):
    path = tmp_path / 'runs.csv'
    lines = [','.join(map(str, row)) for row in [('run', 'x', 'loss'), *rows]]
    path.write_text('\n'.join(lines) + '\n')
    return ['--csv', str(path), '--x', 'x', '--y', 'loss', '--bootstrap', '0', '--form', 'shifted']


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([*GOOD, ('a', 7, 'nan')], 'line 12: loss is nan, which has no logarithm'),
        ([*GOOD, ('a', 7, 'inf')], 'line 12: loss is inf, which has no logarithm'),
        ([*GOOD, ('a', 7, 0)], 'line 12: loss is 0, which has no logarithm'),
        ([*GOOD, ('a', 7, -1)], 'line 12: loss is -1, which has no logarithm'),
        ([*GOOD, ('a', -7, 1)], 'line 12: x is -7, which has no logarithm'),
        ([*GOOD, ('a', 7, 'diverged')], "--y loss: line 12 has 'diverged', which is not a number"),
        ([('a', 'ten', 1), ('b', 'ten', 2)], "--x x: line 2 has 'ten', which is not a number"),
        ([*GOOD, ('r3', 800, 0.9)], "lines 5 and 12: the run 'r3' has two values of loss at x=800"),
        ([('a', 5, 1), ('b', 5, 2), ('c', 5, 3)], '--x: x=5 is the same in all 3 rows'),
        (GOOD[:2], 'no curve can be fitted; all: 1 points cannot determine the 4 parameters'),
        ([], 'has no rows'),
    ],
)
def test_one_line_each(tmp_path, capsys, rows, message):
    assert main(['scaling', 'fit', *table(tmp_path, rows)]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count('\n') == 1 and said.out == ''


@pytest.mark.parametrize(
    ('rows', 'note'),
    [
        ([*GOOD, GOOD[2]], '1 row(s) are copies of another and count once'),
        (GOOD[:5], '4 points for the 4 parameters of shifted: fitted by irreducible instead'),
        ([(run, x, 1 / y) for run, x, y in GOOD], 'b = 0: y does not fall as x grows'),
    ],
)
def test_a_note_each(tmp_path, capsys, rows, note):
    assert main(['scaling', 'fit', *table(tmp_path, rows)]) == 0
    assert f'all: {note}' in capsys.readouterr().out


def test_no_law_of_a_search_that_does_not_settle(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fit, '_SETTLE', 0)
    assert main(['scaling', 'fit', *table(tmp_path, GOOD)]) == 2
    assert 'no curve can be fitted; all: the fit did not converge' in capsys.readouterr().err
    assert forms.find('shifted').solve is None
