"""Tables and bars show names as they are, on terminals too."""

import io
import sys

from rich.progress import TextColumn
from rich.text import Text

from vit_jax.runtime import console as console_lib
from vit_jax.runtime.console import Console, Progress, Table

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
    with console_lib.escaped():
        console = Console(force_terminal=True, width=80)
        with Progress(TextColumn('{task.completed}'), console=console) as bar:
            bar.add_task('', total=3)
            print(f'{RED}name\rhidden')
        print('after')
    shown = stream.getvalue()
    assert '\\u001b[31mname\\u000dhidden' in shown
    assert RED not in shown
    assert shown.endswith('after\n')
