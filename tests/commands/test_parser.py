"""A mistake in the flags of any command."""

import pytest

from vit_jax import __main__ as cli


@pytest.mark.parametrize(
    'words',
    [
        'train --config experiments/vit/digits.py --workdri runs/a',
        'colorize --workdri=runs/a a.png',
        'predict --workdri runs/a a.png',
        'sweep work a --workdri runs/a',
    ],
)
def test_an_unknown_flag_is_named_before_what_is_missing(words, capsys):
    assert cli.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown flag '--workdri'; did you mean '--workdir'?" in line


def test_words_after_two_hyphens_are_no_flags(capsys):
    assert cli.main(['predict', '--top', '3', 'a.png']) == 2
    assert 'give one of --workdir DIR and --checkpoint FILE' in capsys.readouterr().err
    assert cli.main(['colorize', '--workdir', 'none', '--', '--a.png']) == 2
    assert 'unknown flag' not in capsys.readouterr().err


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('v5e-7', 'no slice of v5e has 7 chips; the nearest: v5e-4 and v5e-8'),
        ('v4-7', 'no slice of v4 has 7 cores, two a chip; the nearest: v4-2 and v4-8'),
    ],
)
def test_a_slice_that_is_not_there(name, says, repo, capsys):
    config = f'{repo}/experiments/vit/digits.py:smoke'
    assert cli.main(['preflight', '--topology', name, '--config', config]) == 2
    assert says in capsys.readouterr().err
