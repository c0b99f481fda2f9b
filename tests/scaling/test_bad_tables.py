"""Tables as they come from real studies: one line for a mistake, or a simpler form and a note."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.scaling import curve_fit, forms

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
        ([*GOOD, ('a', 7, 'diverged')], ('--y', '12', "'diverged'")),
        ([('a', 'ten', 1), ('b', 'ten', 2)], ('--x', '2', "'ten'")),
        ([*GOOD, ('r3', 800, 0.9)], ('5', '12', "'r3'", 'x=800')),
        ([('a', 5, 1), ('b', 5, 2), ('c', 5, 3)], ('--x', 'x=5', '3 rows')),
        (GOOD[:2], ('2 points', '4 parameters')),
        ([], 'has no rows'),
    ],
)
def test_one_line_each(tmp_path, capsys, rows, message):
    assert main(['scaling', 'fit', *table(tmp_path, rows)]) == 2
    output = capsys.readouterr()
    assert mentions(output.err, message) and output.err.count('\n') == 1 and output.out == ''


@pytest.mark.parametrize(
    ('rows', 'note'),
    [
        ([*GOOD, GOOD[2]], ('1 row', 'copies')),
        ([*GOOD, ('a', 7, 'nan')], ('left out: a:', 'loss is nan')),
        pytest.param(
            [*GOOD, ('a', 7, 'inf')],
            ('left out: a:', 'loss is inf'),
            marks=pytest.mark.long,
        ),
        ([*GOOD, ('a', 7, 0)], ('left out: a:', 'loss is 0')),
        pytest.param(
            [*GOOD, ('a', 7, -1)],
            ('left out: a:', 'loss is -1'),
            marks=pytest.mark.long,
        ),
        ([*GOOD, ('a', 0, 1)], ('left out: a:', 'x is 0')),
        *(
            pytest.param(
                [*GOOD, ('a', 7, loss)],
                ('left out: a:', f'loss is {loss}'),
                marks=pytest.mark.long,
            )
            for loss in ('inf', -1)
        ),
        (GOOD[:5], 'error held out: '),
        (GOOD[:4], ('4 points', '4 parameters', 'shifted', 'irreducible')),
        ([(run, x, 1 / y) for run, x, y in GOOD], 'b = 0'),
    ],
)
def test_a_note_each(tmp_path, capsys, rows, note):
    assert main(['scaling', 'fit', *table(tmp_path, rows)]) == 0
    assert mentions(capsys.readouterr().out, 'all: ', note)


COMMANDS = {
    'fit': ['--x', 'C', '--y', 'loss', '--form', 'power'],
    'optimal': ['--n', 'N', '--c', 'C', '--y', 'loss'],
    'shape': ['--shape', 'N', '--t', 'C', '--y', 'loss'],
}
ROWS = [
    f'{n:g},{c:g},{2 + 0.1 * np.log(n / 1e6 / (c / 1e15) ** 0.5) ** 2 + 50 * c**-0.1:.9g}'
    for c in np.geomspace(1e15, 1e18, 4)
    for n in np.geomspace(1e5, 1e9, 6)
]
TEXT = '\n'.join(['N,C,loss', *ROWS]) + '\n'


def run(tmp_path, action, text, encoding='utf-8'):
    path = tmp_path / 'runs.csv'
    path.write_bytes(text.encode(encoding))
    return main(['scaling', action, '--csv', str(path), '--bootstrap', '0', *COMMANDS[action]])


@pytest.mark.parametrize('action', COMMANDS)
@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'has no rows'),
        ('N,C,loss\n', 'has no rows'),
        (TEXT.replace(',', ';'), "has ';' between its columns"),
        (TEXT.replace(',', '\t'), ("'\\t'", 'columns')),
        (TEXT.replace('N,', 'C,', 1), "has two columns 'C'"),
        (TEXT + '1,000,000,1e15,2\n', ('26', 'columns')),
        (TEXT + '1e5,"1,000",2\n', ("'1,000'", 'number')),
        (TEXT + '1e5,1e15,\N{MINUS SIGN}2\n', 'number'),
        (TEXT + '"1e5,1e15,2\n', 'unexpected end of data'),
        (TEXT + '9' * 200_000, 'field larger than field limit'),
        (TEXT.encode('utf-16').decode('latin-1'), 'cannot be read'),
        ('N,C,loss\n1e5,1e15,2\n', ''),
    ],
)
def test_malformed_files_are_one_line(tmp_path, capsys, action, text, message):
    encoding = 'latin-1' if text.startswith('\xff') else 'utf-8'
    assert run(tmp_path, action, text, encoding) == 2
    output = capsys.readouterr()
    assert mentions(output.err, message) and output.err.count('\n') == 1 and output.out == ''


@pytest.mark.parametrize('action', COMMANDS)
@pytest.mark.parametrize(
    'change',
    [
        lambda text: '\N{BYTE ORDER MARK}' + text,
        lambda text: text.replace(',', ', '),
        lambda text: text.replace('\n', '\r\n'),
        lambda text: '"' + text.strip().replace(',', '","').replace('\n', '"\n"') + '"',
        lambda text: text.replace('\n', ',\n'),
    ],
)
def test_tables_of_spreadsheets_are_read_alike(tmp_path, capsys, action, change):
    assert run(tmp_path, action, TEXT) == 0
    plain = capsys.readouterr()
    assert run(tmp_path, action, change(TEXT)) == 0
    assert capsys.readouterr() == plain


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([*ROWS, '1e-300,1e-300,1e-300'], ('joint', '30 orders')),
        ([row.rpartition(',')[0] + ',2' for row in ROWS], ('optimum', 'fitted')),
    ],
)
def test_no_law_of_rounding(tmp_path, capsys, rows, message):
    run(tmp_path, 'optimal', '\n'.join(['N,C,loss', *rows]))
    output = capsys.readouterr()
    assert mentions(output.out + output.err, message)


def test_no_law_of_a_search_that_does_not_settle(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(curve_fit, '_SETTLE', 0)
    curve_fit._search_once.cache_clear()
    assert main(['scaling', 'fit', *table(tmp_path, GOOD)]) == 2
    assert mentions(capsys.readouterr().err, 'fitted', 'converge')
    assert forms.find_form('shifted').solve is None
