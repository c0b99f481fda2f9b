"""Words that nobody reads any more, and names that terminals would obey."""

import json
import os
import sys

import pytest

from vit_jax.errors import visible
from vit_jax.runtime import console


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
    with console.unheard():
        print('a' * 200)
        print('b', flush=True)
        assert not sys.stdout.isatty()
    assert sys.stdout is broken


def test_outside_of_it_the_error_is_raised(broken, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', broken)
    with pytest.raises(BrokenPipeError):
        print('a', flush=True)
    with console.unheard():
        print('b', flush=True)  # and so what was buffered finds its end


def test_words_that_are_read_arrive(capfd):
    with console.unheard():
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
    with console.escaped(), console.unheard():
        print('\x1b[2J')
        print('\x1b[2J', file=sys.stderr)
        sys.stdout.exact.write('\x1b[2J\n')
    assert capsys.readouterr() == ('\\u001b[2J\n\x1b[2J\n', '\\u001b[2J\n')
