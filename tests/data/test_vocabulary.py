"""Subword vocabularies: the special ids, what is encoded comes back, equal bytes of equal text."""

import pickle

import numpy as np
import pytest
import sentencepiece

from vit_jax.data import vocabulary
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.models import seq2seq


def sentences(count=300):
    rng = np.random.default_rng(0)
    letters = list('aemnostdwgi')
    words = ['a', 'man', *(''.join(rng.choice(letters, 5)) for _ in range(40)), 'two', 'dogs']
    return [' '.join(rng.choice(words, rng.integers(3, 12))) + ' ü' for _ in range(count)]


@pytest.fixture(scope='module', params=vocabulary.KINDS)
def vocab(request):
    return vocabulary.train(sentences(), 60, request.param)


def test_special_ids_and_size(vocab):
    assert len(vocab) == 60
    assert vocab.pieces([0, 1, 2, 3]) == ['<pad>', '<s>', '</s>', '<unk>']


def test_what_is_encoded_comes_back(vocab):
    for sentence in sentences(20):
        ids = vocab.encode(sentence)
        assert ids.dtype == np.int32
        assert ids.min() > vocabulary.UNK, 'every character of the text has a piece'
        assert vocab.decode(ids) == sentence


def test_decoding_ends_at_the_first_end_and_skips_padding(vocab):
    one, other = vocab.encode('a man').tolist(), vocab.encode('two dogs').tolist()
    assert vocab.decode([vocabulary.BOS, *one, vocabulary.EOS, *other]) == 'a man'
    assert vocab.decode(np.array([*one, vocabulary.PAD, vocabulary.PAD])) == 'a man'
    assert vocab.decode([vocabulary.EOS]) == ''


def test_a_character_that_was_not_seen_is_unknown(vocab):
    assert vocabulary.UNK in vocab.encode('a 漢')


def test_ids_that_only_a_larger_model_has_are_unknown(vocab):
    known, unknown = vocab.encode('a man').tolist(), [len(vocab), len(vocab) + 100]
    assert vocab.decode([*known, *unknown]) == vocab.decode([*known, *[vocabulary.UNK] * 2])
    assert vocab.pieces(unknown) == ['<unk>', '<unk>']


def test_the_same_text_gives_the_same_bytes(vocab):
    kind = 'bpe' if vocab == vocabulary.train(sentences(), 60, 'bpe') else 'unigram'
    again = vocabulary.train(iter(sentences()), 60, kind)
    assert again == vocab
    assert again.digest == vocab.digest
    assert vocabulary.train(sentences(299), 60, kind).digest != vocab.digest


def test_a_vocabulary_goes_to_other_processes(vocab):
    vocab.encode('a man')
    copy = pickle.loads(pickle.dumps(vocab))
    assert copy == vocab
    np.testing.assert_array_equal(copy.encode('two dogs'), vocab.encode('two dogs'))


def test_a_file(vocab, tmp_path):
    path = tmp_path / 'v.model'
    path.write_bytes(vocab.model)
    assert vocabulary.load_vocabulary(path) == vocab


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r'no\.model.*No .* vit_jax vocab'):
        vocabulary.load_vocabulary(tmp_path / 'no.model')
    path = tmp_path / 'text.model'
    path.write_text('hello')
    with pytest.raises(UserError, match=r'text\.model.*not a SentencePiece model'):
        vocabulary.load_vocabulary(path)


def test_other_special_ids_are_refused_for_pairs(tmp_path):
    text = tmp_path / 'text'
    text.write_text('\n'.join(sentences()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / 'default'), vocab_size=50, minloglevel=2
    )
    vocab = vocabulary.load_vocabulary(tmp_path / 'default.model')
    with pytest.raises(UserError, match=r'pad -1.*bos 1.*eos 2.*unk 0.*pad 0'):
        parse_transforms('tokenize', vocab)
    (step,) = parse_transforms("tokenize('caption', 50, pad=2)", vocab).steps
    ids = step({'caption': 'a man'}, np.random.default_rng())['caption']
    assert ids[-1] == 2
    assert vocab.decode(ids) == 'a man'
    # Nor one by one, to a model that generates text with its own special ids.
    with pytest.raises(UserError, match=r'data: .* -1, bos 1'):
        vocabulary.require_ids(vocab, seq2seq.Model(vocab_size=50), 'data')


def test_padding_by_the_vocabulary_s_own_ids(tmp_path):
    vocab = vocabulary.Bytes()
    for pad, filler in (('eos', 2), ('pad', 0), (7, 7)):
        (step,) = parse_transforms(f"tokenize('caption', 5, pad={pad!r})", vocab).steps
        ids = step({'caption': 'ab'}, np.random.default_rng())['caption']
        assert ids.tolist() == [*vocab.encode('ab'), 2, filler, filler]
    for pad in ('end', -1, 260):
        with pytest.raises(UserError, match=r'vocabulary.*260 ids'):
            parse_transforms(f"tokenize('caption', 5, pad={pad!r})", vocab)


def test_padding_that_is_no_id_is_refused(vocab):
    with pytest.raises(UserError, match='pad=60: the vocabulary has 60 ids'):
        parse_transforms("tokenize('caption', 5, pad=60)", vocab)


@pytest.mark.parametrize(
    ('size', 'kind', 'message'),
    [
        (60, 'word', "unknown kind 'word'"),
        (5, 'bpe', 'vocabulary.*5 pieces.*[Vv]ocabulary.*size'),
        (50_000, 'unigram', 'vocabulary.*50000 pieces.*high'),
    ],
)
def test_mistakes(size, kind, message):
    with pytest.raises(UserError, match=message) as error:
        vocabulary.train(sentences(), size, kind)
    assert '\n' not in str(error.value)


def test_a_run_keeps_to_its_vocabulary(vocab, tmp_path):
    vocabulary.require_same(vocab, tmp_path)
    (tmp_path / 'vocab.model').write_bytes(vocab.model)
    vocabulary.require_same(vocab, tmp_path)
    for other in (vocabulary.Vocabulary(b'other'), None):
        with pytest.raises(UserError, match=r'config\.data\.vocab'):
            vocabulary.require_same(other, tmp_path)
