"""`attention` of a run that translates, and what other commands say to it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.messages import mentions
from helpers.sequences import perturbed
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.commands import attention as command
from vit_jax.errors import UserError
from vit_jax.inference.load import open_run
from vit_jax.inference.predict import batch_of_one, predict_with_attention
from vit_jax.inference.text import sentence_reader
from vit_jax.interop.trained import fields
from vit_jax.models import rnn_seq2seq, seq2seq
from vit_jax.viz import attention_pictures
from vit_jax.viz.attention_pictures import choose_stack, sentence_axes, stack_weights

pytestmark = pytest.mark.slow  # as a whole

SENTENCE = 'Two dogs play.'


LOOKED = {}


def maps_of(run, source, target):
    """Compute the attention maps between two sentences, with a program compiled once."""
    key = (run.model, tuple(source), tuple(target))
    if key not in LOOKED:
        LOOKED[key] = predict_with_attention(
            run, batch_of_one({'source': source, 'target': target})
        )[1]
    return LOOKED[key]


def weights_of(run, source, target, pattern=''):
    """Select the weights [L H Q K] of a stack of these maps."""
    return stack_weights(choose_stack(maps_of(run, source, target), pattern))


@pytest.fixture(scope='module')
def run(translating_run):
    """That run with two layers of random weights."""
    loaded = open_run(translating_run)
    sizes = {'width': 16, 'depth': 2, 'num_heads': 2, 'mlp_dim': 16, 'dropout': 0.0}
    model = seq2seq.Model(loaded.config.model.vocab_size, **sizes)
    return dataclasses.replace(loaded.adapted(model=model), params=perturbed(model))


@pytest.fixture(scope='module')
def lstm_run(run):
    """The same with an LSTM of random weights."""
    model = rnn_seq2seq.Model(run.config.model.vocab_size, width=8, embed_dim=8)
    named = run.with_groups(model={'name': 'rnn_seq2seq', **fields(model)})
    return dataclasses.replace(named, params=perturbed(model))


def ids_of(run, *sentences):
    reader = sentence_reader(run)
    return [reader.read(sentence).ids for sentence in sentences]


def test_one_picture(run, translating_run, tmp_path, capsys):
    out = tmp_path / 'map.png'
    argv = ['attention', '--workdir', str(translating_run), '--out', str(out), SENTENCE]
    for flags in ([], ['Zwei Hunde.', '--self', '--head', '1', '--layer', '0']):
        assert cli.main([*argv, *flags]) == 0
        output = capsys.readouterr().out
        assert output.startswith(f'{out}: 1 layers x 2 heads, ')
        with Image.open(out) as picture:
            assert min(picture.size) > 300
    (source,) = ids_of(run, SENTENCE)
    assert output == f'{out}: 1 layers x 2 heads, {len(source)} x {len(source)} tokens\n'


@pytest.mark.slow
def test_digits(reversing_run, tmp_path, capsys):
    out = tmp_path / 'map.png'
    argv = ['attention', '--workdir', str(reversing_run), '--out', str(out)]
    assert cli.main([*argv, '3 1 4 1 5', '5 1 4']) == 0
    assert capsys.readouterr().out == f'{out}: 1 layers x 4 heads, 4 x 6 tokens; 5 1 4\n'
    assert cli.main([*argv, '3 1 4', '3 1 x']) == 2
    assert "tokenize: 'x'" in capsys.readouterr().err


def test_weights_do_not_look_at_what_follows(run):
    """The row of a token is from before the token is read, and rows before it do not change."""
    source, target = ids_of(run, SENTENCE, 'Zwei Hunde spielen.')
    weights = weights_of(run, source, target)
    assert weights.shape == (2, 2, len(target), len(source))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    other = np.append(target[:-2], [9, 2]).astype(np.int32)
    changed = weights_of(run, source, other)
    np.testing.assert_allclose(changed[:, :, :-1], weights[:, :, :-1], atol=1e-6)
    assert np.abs(changed[:, :, -1] - weights[:, :, -1]).max() > 1e-4


def test_self_attention_is_of_the_source(run):
    source, target = ids_of(run, SENTENCE, 'Zwei Hunde.')
    weights = weights_of(run, source, target, 'encoder')
    assert weights.shape == (2, 2, len(source), len(source))
    other = weights_of(run, source, target[::-1].copy(), 'encoder')
    np.testing.assert_array_equal(weights, other)


def test_the_decoder_looks_at_the_tokens_before(run, translating_run, tmp_path, capsys):
    source, target = ids_of(run, SENTENCE, 'Zwei Hunde.')
    weights = weights_of(run, source, target, 'decoder/block_[01]$')
    assert weights.shape == (2, 2, len(target), len(target))
    assert not np.triu(weights, 1).any()
    (self_attention,) = choose_stack(maps_of(run, source, target), 'decoder/block_1$')
    (who, rows), (whom, columns) = sentence_axes(self_attention, source, target)
    assert (who, whom) == ('target', 'target before')
    np.testing.assert_array_equal(rows, target)
    np.testing.assert_array_equal(columns[1:], target[:-1])
    out = str(tmp_path / 'map.png')
    argv = ['--workdir', str(translating_run), '--map', 'decoder/block_.$', '--out', out]
    assert cli.main(['attention', *argv, SENTENCE, 'Zwei Hunde.']) == 0
    assert f'{len(target)} x {len(target)} tokens' in capsys.readouterr().out


def test_an_lstm(lstm_run):
    source, target = ids_of(lstm_run, SENTENCE, 'Zwei Hunde.')
    weights = weights_of(lstm_run, source, target)
    assert weights.shape == (1, 1, len(target), len(source))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    argv = ['RUN', '--out', 'a.png', SENTENCE]
    args = command.make_parser(argv).parse_args(argv)
    figure, line = command.draw_text(lstm_run, args)
    assert line.startswith('1 layers x 1 heads, ')
    assert figure.axes[0].get_images()[0].get_array().shape[1] == len(source)
    with pytest.raises(UserError, match=r"attention.*'encoder'.*decoder/cross"):
        weights_of(lstm_run, source, target, 'encoder')


def test_labels_are_the_pieces():
    rows = ['\u2581Fu\u00df', 'ball', '\u2581', '$x$', '</s>']
    columns = ['\u2581foot', 'ball', '</s>']
    figure = attention_pictures.draw_token_map(
        np.eye(5, 3), rows, columns, names=('target', 'source')
    )
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        'Fu\u00df',
        'ball',
        '␣',
        '$x$',
        '</s>',
    ]
    assert [t.get_text() for t in axes.get_xticklabels()] == ['foot', 'ball', '</s>']
    assert axes.get_yticks(minor=True).tolist() == [-0.5, 1.5, 3.5]
    figure.draw_without_rendering()


def test_mistakes_are_one_line(translating_run, smoke_run, tmp_path, capsys):
    out = str(tmp_path / 'map.png')
    text = ['attention', '--workdir', str(translating_run), '--out', out]
    image = ['attention', '--workdir', str(smoke_run), '--out', out]
    for argv, message in [
        ([*text, ' '], ('source', 'sentence')),
        ([*text, 'A dog.', ''], ('target', 'sentence')),
        ([*text, 'A dog. ' * 20], 'longer than the 15 tokens'),
        (
            [*text, 'A dog.', 'Ein Hund.', '--head', '2'],
            ('head 2', '0 to 1'),
        ),
        ([*text, 'A dog.', 'Ein Hund.', '--layer', '1'], ('layer', '1')),
        ([*text, 'A dog.', '--query', '0,0'], ('--query', '--image-size')),
        ([*text, 'A', 'B', 'C'], "unexpected 'C'"),
        ([*image, 'a.png', '--self'], '--self'),
        ([*image, 'a.png', 'b.png'], "unexpected 'b.png'"),
        (['predict', '--workdir', str(translating_run), 'a.png'], ('translate', 'sentences')),
    ]:
        assert cli.main(argv) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count('\n')) == ('', 1)
        assert mentions(captured.err, message)
    assert not (tmp_path / 'map.png').exists()
