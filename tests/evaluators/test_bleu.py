"""BLEU of translations, beside what sacrebleu gives for the same text."""

import sys

import numpy as np
import pytest
import sacrebleu

from vit_jax.data import vocabulary
from vit_jax.errors import UserError
from vit_jax.evaluators import bleu

TARGETS = [
    'Ein Hund läuft über die grüne Wiese.',
    'Zwei Männer spielen Schach in einem Park.',
    'Eine Frau liest.',
    'Der Junge wirft dem großen Hund einen roten Ball zu.',
]
WRITTEN = [
    'Ein Hund läuft über die Wiese.',
    'Zwei Männer spielen in einem Park Schach.',
    'Eine Frau liest.',
    'Der Junge wirft dem Hund einen Ball zu.',
]
SOURCES = ['a dog runs there', 'two men play', 'one two three four five six', 'a b c d e f g']


@pytest.fixture(scope='module')
def vocab():
    return vocabulary.train([*TARGETS, *WRITTEN] * 3, 60, 'bpe')


class Source(list):
    title = 'some text'


class Dataset:
    def __init__(self, texts, vocab):
        self.source, self.vocab = Source(texts), vocab

    def text(self, index):
        return self.source[index]


def evaluated(vocab, edges=(), targets=TARGETS, written=WRITTEN):
    """An evaluator that has seen all translations, the later ones first, in two batches."""
    evaluator = bleu.Evaluator(edges)
    texts = [{'source': s, 'target': t} for s, t in zip(SOURCES, targets, strict=True)]
    evaluator.open(Dataset(texts, vocab))
    evaluator.start()
    see(evaluator, vocab, written)
    return evaluator


def see(evaluator, vocab, written):
    for examples in ([3, 1], [2, 0]):
        tokens = np.zeros((2, 80), np.int32)
        for row, example in enumerate(examples):
            ids = vocab.encode(written[example])
            tokens[row, : len(ids) + 1] = [*ids, vocabulary.EOS]
        evaluator.update({'tokens': tokens}, {'index': np.array(examples)})


def test_the_corpus_is_that_of_sacrebleu(vocab):
    evaluator = evaluated(vocab)
    reference = sacrebleu.BLEU()
    expected = reference.corpus_score(WRITTEN, [TARGETS]).score
    assert 20 < expected < 80
    assert evaluator.result() == {
        'bleu': pytest.approx(expected, abs=1e-9),
        'chrf': pytest.approx(sacrebleu.corpus_chrf(WRITTEN, [TARGETS]).score, abs=1e-9),
    }
    assert evaluator.signature == str(reference.get_signature())
    assert 'case:mixed' in evaluator.signature and 'tok:13a' in evaluator.signature


def test_all_captions_of_an_image_are_its_references(vocab):
    """An image with two captions counts once."""
    texts = [{'caption': t, 'image_id': i} for t, i in zip(TARGETS, 'aabc', strict=True)]
    evaluator = bleu.Evaluator(reference='caption')
    evaluator.open(Dataset(texts, vocab))
    evaluator.start()
    written = [TARGETS[1], TARGETS[1], *WRITTEN[2:]]
    see(evaluator, vocab, written)
    references = [TARGETS[0], *TARGETS[2:]], [TARGETS[1], None, None]
    expected = sacrebleu.BLEU().corpus_score(written[1:], references).score
    assert evaluator.result() == {
        'bleu': pytest.approx(expected, abs=1e-9),
        'chrf': pytest.approx(sacrebleu.corpus_chrf(written[1:], references).score, abs=1e-9),
    }
    assert 'nrefs:var' in evaluator.signature


def test_lower_case_is_said(vocab):
    evaluator = evaluated(vocab, targets=[t.lower() for t in TARGETS])
    assert 'case:lc' in evaluator.signature
    expected = sacrebleu.BLEU(lowercase=True).corpus_score(WRITTEN, [TARGETS]).score
    assert evaluator.result()['bleu'] == pytest.approx(expected, abs=1e-9)


def test_classes_of_lengths_are_corpora_of_their_own(vocab):
    evaluator = evaluated(vocab, edges=(3, 4, 5))
    result = evaluator.result()
    assert result.keys() <= {*evaluator.names()}
    assert result.keys() == {'bleu', 'chrf', 'bleu_1_3', 'bleu_4_4', 'bleu_6_up'}
    for name, examples in (('bleu_1_3', [1]), ('bleu_4_4', [0]), ('bleu_6_up', [2, 3])):
        pairs = [WRITTEN[i] for i in examples], [[TARGETS[i] for i in examples]]
        assert result[name] == pytest.approx(sacrebleu.BLEU().corpus_score(*pairs).score)


@pytest.mark.parametrize(
    ('text', 'tokenizer'),
    [
        ('一只狗跑过绿色的草地，两个人在公园里下棋。', 'zh'),
        ('犬が緑の草原を走り、二人の男が公園で遊んでいる。', 'char'),
        ('สุนัขวิ่งผ่านทุ่งหญ้าสีเขียว', 'char'),
        ('개가 푸른 풀밭을 가로질러 달린다 그리고 남자', '13a'),
    ],
)
def test_a_copy_is_perfect_in_any_script(text, tokenizer, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)  # no MeCab
    evaluator = bleu.Evaluator()
    evaluator.open(Dataset([{'source': 'a b', 'target': text}], vocabulary.Bytes()))
    assert f'tok:{tokenizer}' in evaluator.signature
    evaluator.start()
    tokens = np.array([[*evaluator._vocab.encode(text), vocabulary.EOS]])
    evaluator.update({'tokens': tokens}, {'index': np.zeros(1, int)})
    assert evaluator.result()['bleu'] == pytest.approx(100)


def test_tokenizers_can_be_chosen(vocab):
    evaluator = bleu.Evaluator(tokenize='char')
    evaluator.open(Dataset([{'source': 'a', 'target': 'b'}], vocab))
    assert 'tok:char' in evaluator.signature
    with pytest.raises(UserError, match=r"'zhh'.*zh"):
        bleu.Evaluator(tokenize='zhh').open(Dataset([{'source': 'a', 'target': 'b'}], vocab))


def test_every_pass_starts_anew(vocab):
    evaluator = evaluated(vocab, written=TARGETS)
    assert evaluator.result()['bleu'] == pytest.approx(100)
    evaluator.start()
    see(evaluator, vocab, WRITTEN)
    assert evaluator.result() == evaluated(vocab).result()


def test_data_without_text(vocab):
    with pytest.raises(UserError, match=r'some text.*config\.data\.vocab'):
        bleu.Evaluator().open(Dataset([{}, {}], vocab))


@pytest.mark.parametrize('edges', [(10, 5), (0, 5), (5, 5)])
def test_edges_grow(edges):
    with pytest.raises(UserError, match='edges='):
        bleu.Evaluator(edges)


def test_a_task_without_tokens(vocab):
    evaluator = bleu.Evaluator()
    evaluator.open(Dataset([{'source': 'a', 'target': 'b'}], vocab))
    with pytest.raises(UserError, match="'tokens'"):
        evaluator.update({'probs': np.zeros((1, 2))}, {'index': np.zeros(1, int)})


def test_without_sacrebleu(vocab, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sacrebleu', None)
    with pytest.raises(UserError, match=r"pip install -e '.\[translate\]'"):
        bleu.Evaluator().open(Dataset([{'source': 'a', 'target': 'b'}], vocab))
