"""Names on terminals are shown and not obeyed, and output that nobody reads is dropped."""

import io
import json
import os
import sys

import pytest
from rich.progress import TextColumn
from rich.text import Text

from vit_jax.errors import visible
from vit_jax.runtime import console
from vit_jax.runtime.console import Console, Progress, Table, escape_output

RED = '\x1b[31m'


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system='standard', width=80)


def test_styles_are_obeyed_and_names_are_not():
    console = terminal()
    console.print(Text(f'a{RED}b', 'bold'), f'c{RED}d', '[red]e[/f] :cat:', style=None)
    shown = console.file.getvalue()
    assert shown == '\x1b[1ma\\u001b[31mb\x1b[0m c\\u001b[31md [red]e[/f] :cat:\n'


def test_no_cell_is_cut_where_lines_wrap_softly():
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    table = Table(*(f'a.long.name.{i}' for i in range(20)))
    table.add_row(*(f'{i}.{10**12}' for i in range(20)))
    console.print(table)
    _, row, _ = console.file.getvalue().split('\n')
    assert row.split() == [f'{i}.{10**12}' for i in range(20)]


def test_every_row_of_a_table_is_one_line_as_wide_as_it_looks():
    console = terminal()
    table = Table('name\n', 'x')
    table.add_row(f'cat{RED}\nforged 1', Text('y', 'blue'))
    table.add_row('dog', 'z')
    console.print(table)
    lines = console.file.getvalue().split('\n')
    assert [Text.from_ansi(line).plain.rstrip() for line in lines] == [
        'name\\n                   x',
        'cat\\u001b[31m\\nforged 1  y',
        'dog                      z',
        '',
    ]


def test_words_above_a_bar_are_not_obeyed_either(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, 'stdout', stream)
    with escape_output():
        console = Console(force_terminal=True, width=80)
        with Progress(TextColumn('{task.completed}'), console=console) as bar:
            bar.add_task('', total=3)
            print(f'{RED}name\rhidden')
        print('after')
    shown = stream.getvalue()
    assert '\\u001b[31mname\\u000dhidden' in shown
    assert RED not in shown
    assert shown.endswith('after\n')


@pytest.fixture
def broken():
    """Standard output into a pipe whose reader is gone, with a buffer as outside of a terminal."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, 'w', buffering=100)
    yield stream
    stream.close()  # raises if anything is left to be written to the pipe


def test_words_into_a_broken_pipe_are_lost_without_an_error(broken, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', broken)
    with console.drop_lost_output():
        print('a' * 200)
        print('b', flush=True)
        assert not sys.stdout.isatty()
    assert sys.stdout is broken


def test_outside_of_it_the_error_is_raised(broken, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', broken)
    with pytest.raises(BrokenPipeError):
        print('a', flush=True)
    with console.drop_lost_output():
        print('b', flush=True)  # and so what was buffered finds its end


def test_words_that_are_read_arrive(capfd):
    with console.drop_lost_output():
        print('to the reader')
        print('of errors', file=sys.stderr)
    assert capfd.readouterr() == ('to the reader\n', 'of errors\n')


@pytest.mark.parametrize(
    ('text', 'shown'),
    [
        ('Größe 猫 🐈\t1\n', 'Größe 猫 🐈\t1\n'),
        ('\x1b]0;title\x07', '\\u001b]0;title\\u0007'),
        ('a\rb\x9bc\x7f', 'a\\u000db\\u009bc\\u007f'),
        ('\u202egnp.cat', '\\u202egnp.cat'),
        (os.fsdecode(b'\xff'), '\\udcff'),
    ],
)
def test_control_characters_are_visible(text, shown):
    assert visible(text) == shown == visible(shown)
    assert json.loads(visible(json.dumps(text, ensure_ascii=False))) == text


def test_all_that_is_written_is_escaped(capsys):
    with console.escape_output(), console.drop_lost_output():
        print('\x1b[2J')
        print('\x1b[2J', file=sys.stderr)
        sys.stdout.exact.write('\x1b[2J\n')
    assert capsys.readouterr() == ('\\u001b[2J\n\x1b[2J\n', '\\u001b[2J\n')
