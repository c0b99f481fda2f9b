"""A run whose words nobody reads any more goes on."""

import os
import sys

import pytest

from vit_jax.runtime import output


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
    with output.unheard():
        print('a' * 200)
        print('b', flush=True)
        assert not sys.stdout.isatty()
    assert sys.stdout is broken


def test_outside_of_it_the_error_is_raised(broken, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', broken)
    with pytest.raises(BrokenPipeError):
        print('a', flush=True)
    with output.unheard():
        print('b', flush=True)  # and so what was buffered finds its end


def test_words_that_are_read_arrive(capfd):
    with output.unheard():
        print('to the reader')
        print('of errors', file=sys.stderr)
    assert capfd.readouterr() == ('to the reader\n', 'of errors\n')
