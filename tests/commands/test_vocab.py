"""`vocab`: the file it writes is what a config takes."""

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.data import vocabulary
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    choices = [''.join(rng.choice(list('ABCdefgh'), 4)) for _ in range(30)]
    lines = ['\t'.join(' '.join(rng.choice(choices, 5)) for _ in range(2)) for _ in range(100)]
    (tmp_path / 'pairs.tsv').write_text('\n'.join(lines))
    return f'text:{tmp_path}/pairs.tsv'


@pytest.mark.parametrize('kind', vocabulary.KINDS)
def test_both_sides_share_the_vocabulary(tmp_path, text, capsys, kind):
    path = tmp_path / 'v.model'
    assert main(['vocab', text, '--size', '40', '--kind', kind, '--output', str(path)]) == 0
    vocab, source = vocabulary.load_vocabulary(path), open_source(text, 'train')
    assert len(vocab) == 40
    lengths = []
    for i in range(len(source)):
        for sentence in source[i].values():
            ids = vocab.encode(sentence)
            lengths.append(len(ids) + 1)
            assert vocabulary.UNK not in ids
            assert vocab.decode(ids) == sentence
    expected = f'40 pieces from 200 sentences, which have {np.mean(lengths):.1f} on average'
    assert f'{expected} and {max(lengths)} at most' in capsys.readouterr().out


def test_a_field_of_records_with_images(tmp_path, capsys):
    path, source = tmp_path / 'v.model', 'helpers.two_towers.source:'
    words = [source, '--size', '24', '--output', str(path)]
    assert main(['vocab', *words, '--field', 'captoin']) == 2
    assert mentions(capsys.readouterr().err, "'captoin'", 'caption')
    assert main(['vocab', *words, '--field', 'caption']) == 0
    assert '24 pieces from 256 sentences' in capsys.readouterr().out
    vocab = vocabulary.load_vocabulary(path)
    assert vocab.decode(vocab.encode('a white cross')) == 'a white cross'


def test_lower_case(tmp_path, text):
    path = tmp_path / 'v.model'
    main(['vocab', text, '--size', '40', '--lower', '--output', str(path)])
    pieces = vocabulary.load_vocabulary(path).pieces(range(4, 40))
    assert all(piece == piece.lower() for piece in pieces)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, text, capsys):
    path = tmp_path / 'v.model'
    path.write_bytes(b'precious')
    assert main(['vocab', text, '--output', str(path)]) == 2
    assert 'already exists' in capsys.readouterr().err
    assert path.read_bytes() == b'precious'
    path.unlink()
    assert main(['vocab', text, '--size', '4', '--output', str(path)]) == 2
    assert mentions(capsys.readouterr().err, '4 pieces', '4')
    assert main(['vocab', text, '--size', '100000', '--output', str(path)]) == 2
    assert 'too high' in capsys.readouterr().err
    assert main(['vocab', text, '--output', f'{text[5:]}/v.model']) == 2
    assert mentions(capsys.readouterr().err, 'folder')
    assert {p.name for p in tmp_path.iterdir()} == {'pairs.tsv'}


def test_images_have_no_vocabulary(tmp_path):
    from vit_jax.commands import vocab

    with pytest.raises(UserError, match=r"digits train: .* 'source'"):
        vocab.main(['digits', '--output', str(tmp_path / 'v.model')])


@pytest.mark.parametrize(
    ('words', 'expected'),
    [([], '狗，跑过草地。'), (['--normalization', 'nmt_nfkc'], '狗,跑过草地。')],
)
def test_punctuation_of_chinese_stays(tmp_path, words, expected):
    pairs, path = tmp_path / 'pairs.tsv', tmp_path / 'vocab.model'
    pairs.write_text('a dog\t狗，跑过草地。\n' * 20, encoding='utf-8')
    options = ['--field', 'target', '--size', '12', *words, '--out', str(path)]
    assert main(['vocab', f'text:{pairs}', *options]) == 0
    vocab = vocabulary.load_vocabulary(path)
    assert vocab.decode(vocab.encode('狗，跑过草地。')) == expected
