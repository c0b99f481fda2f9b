"""Copying and reversing digits: the two tasks are what they say, and repeatable."""

import numpy as np
import pytest

from vit_jax.data.sources import open_source, own_vocab
from vit_jax.data.sources.synthetic import FIRST_DIGIT, LENGTHS
from vit_jax.data.vocabulary import EOS
from vit_jax.errors import UserError


@pytest.mark.parametrize(('task', 'step'), [('copy', 1), ('reverse', -1)])
def test_targets(task, step):
    source = open_source(f'synthetic:{task}', 'train')
    lengths = set()
    for i in range(200):
        record = source[i]
        digits = record['source'][:-1]
        np.testing.assert_array_equal(record['target'], [*digits[::step], EOS])
        assert record['source'][-1] == EOS
        assert record['source'].dtype == record['target'].dtype == np.int32
        assert digits.min() >= FIRST_DIGIT
        assert digits.max() < source.info.vocab_size
        lengths.add(len(digits))
    assert lengths == set(range(LENGTHS[0], LENGTHS[1] + 1))


def test_records_are_functions_of_split_and_index():
    train, again = (open_source('synthetic:copy', 'train') for _ in range(2))
    test = open_source('synthetic:copy', 'test')
    rows = [tuple(train[i]['source']) for i in range(100)]
    assert rows == [tuple(again[i]['source']) for i in range(100)]
    assert len(set(rows) | {tuple(test[i]['source']) for i in range(100)}) > 190


@pytest.mark.parametrize(
    ('name', 'split', 'message'),
    [
        ('synthetic:sort', 'train', "unknown task 'sort'"),
        ('synthetic:copy', 'val', "unknown split 'val'"),
        ('synthetic:copy', 'train[:1 per class]', 'have no classes'),
    ],
)
def test_mistakes(name, split, message):
    with pytest.raises(UserError, match=message):
        open_source(name, split)


def test_sequences_as_text():
    vocab = own_vocab('synthetic:reverse')
    record = open_source('synthetic:reverse', 'test')[0]
    text, turned = (vocab.decode(record[side]) for side in ('source', 'target'))
    assert (
        text.split()
        == turned.split()[::-1]
        == [str(i - FIRST_DIGIT) for i in record['source'][:-1]]
    )
    np.testing.assert_array_equal([*vocab.encode(f' {text} '), EOS], record['source'])
    assert vocab.pieces([0, 1, EOS, 3, 4, 13]) == ['<pad>', '<s>', '</s>', '<unk>', '▁0', '▁9']
    assert vocab.decode([1, 13, 0, 14, EOS, 5]) == '9 <unk>', 'a model may have more ids'
    assert own_vocab('digits') is None


@pytest.mark.parametrize('word', ['x', '10', '-1', '314', '</s>', '٣'])
def test_words_that_are_no_digits(word):
    with pytest.raises(UserError, match=f"^'{word}'.*digit"):
        own_vocab('synthetic:copy').encode(f'3 {word} 4')
