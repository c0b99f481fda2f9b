"""Classes by their texts: the nearest mean of prompts."""

import types

import numpy as np
import pytest

from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.evaluators import zero_shot

NAMES = ('cat', 'dog', 'cow', 'hen', 'pig', 'fox')
TEXT = "tokenize('caption', 16)"


def dataset(names=NAMES):
    return types.SimpleNamespace(
        info=types.SimpleNamespace(num_classes=len(NAMES), class_names=names)
    )


def evaluator(**keywords):
    return zero_shot.Evaluator(text=TEXT, **keywords)


def source(made, data):
    keys = made.fit_data(data)
    return open_source(keys['source'], keys['split'])


def test_prompts_are_every_name_in_every_template():
    made = evaluator(templates=('a {}', 'the {} of {}'))
    prompts = source(made, dataset())
    assert len(prompts) == 12
    assert [prompts[i]['caption'] for i in (0, 1, 2)] == ['a cat', 'the cat of cat', 'a dog']
    assert [prompts[i]['label'] for i in (0, 1, 2)] == [0, 0, 1]
    np.testing.assert_array_equal(prompts.labels(), np.arange(12) // 2)
    keys = made.fit_data(dataset())
    assert keys['transforms'] == TEXT and keys['classes'] is None


def test_names_are_written_as_in_texts(tmp_path, caplog):
    names = ('dark_red', 'cow', 'hen__a', 'iPhone', 'fox', 'pig')
    prompts = source(evaluator(templates=('{}',)), dataset(names))
    found = [prompts[i]['caption'] for i in range(6)]
    assert found == ['dark red', 'cow', 'hen a', 'iPhone', 'fox', 'pig']
    assert len(caplog.messages) == 1 and 'iPhone' in caplog.messages[0]
    file = tmp_path / 'names.txt'
    file.write_text('red_cat\ndog\ncow\nhen\npig\nfox\n')
    prompts = source(evaluator(templates=('{}',), names=str(file)), dataset())
    assert prompts[0]['caption'] == 'red cat'


@pytest.mark.parametrize(
    ('names', 'said'),
    [(('cat', 'n01440764'), 'n01440764'), (('dark_red', 'dark red'), 'dark_red')],
)
def test_names_that_no_text_has_are_refused(names, said):
    with pytest.raises(UserError, match=said):
        zero_shot.as_words(names, 'names', '--classes')


def test_accuracy_is_that_of_the_nearest_mean():
    rng = np.random.default_rng(0)
    texts = rng.normal(size=(12, 4)).astype(np.float32)
    images, label = rng.normal(size=(50, 4)).astype(np.float32), rng.integers(0, 6, 50)
    made = evaluator()
    for _ in range(2):  # a pass leaves nothing for the next
        made.start()
        for i in (0, 5):
            part = slice(i, i + (5 if not i else 7))
            made.fit({'text': texts[part]}, {'label': (np.arange(12) // 2)[part]})
        for part in (slice(0, 30), slice(30, 50)):
            made.update({'features': images[part]}, {'label': label[part]})
        found = made.result()
    means = texts.reshape(6, 2, 4).mean(1)
    scores = images @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    expected = scores.argmax(1) == label
    assert found['zero_shot_accuracy'] == pytest.approx(expected.mean())
    top5 = (scores.argsort(1)[:, 1:] == label[:, None]).any(1)
    assert found['zero_shot_top5'] == pytest.approx(top5.mean())


def test_names_from_a_file(tmp_path):
    file = tmp_path / 'names.txt'
    file.write_text('\ufeff' + '\n'.join(f'the {name}' for name in NAMES) + '\n\n')
    prompts = source(evaluator(names=str(file), templates=('{}',)), dataset())
    assert prompts[0]['caption'] == f'the {NAMES[0]}'
    assert prompts[5]['caption'] == 'the fox'
    file.write_text('cat\n')
    with pytest.raises(UserError, match=r'has 1 lines, .* 6 classes'):
        evaluator(names=str(file)).fit_data(dataset())
    with pytest.raises(UserError, match='class names'):
        evaluator(names=str(tmp_path / 'none')).fit_data(dataset())


def test_names_of_a_file_that_are_those_of_the_data_are_matched_by_name(tmp_path):
    file = tmp_path / 'names.txt'
    file.write_text('\n'.join(reversed(NAMES)))
    prompts = source(evaluator(names=str(file), templates=('{}',)), dataset())
    assert [prompts[i]['caption'] for i in range(6)] == list(NAMES)
    file.write_text('\n'.join(['dog', 'tomcat', *NAMES[2:]]))
    with pytest.raises(UserError, match=r"line 1: 'dog' is class 1 .* class 0"):
        evaluator(names=str(file)).fit_data(dataset())


@pytest.mark.parametrize(
    ('keywords', 'names', 'message'),
    [
        ({}, ('cat', 'cat', 'dog', 'a', 'b', 'c'), "classes.*'cat'"),
        ({}, (' ', 'cow', 'dog', 'a', 'b', 'c'), 'class.*empty'),
        ({'templates': ('a photo',)}, NAMES, r"'a photo'.*\{\}"),
        ({'templates': ()}, NAMES, 'a template'),
    ],
)
def test_ambiguous_class_names_are_refused(keywords, names, message):
    with pytest.raises(UserError, match=message):
        source(evaluator(**keywords), dataset(names))


def test_what_it_needs():
    with pytest.raises(UserError, match='names'):
        evaluator().fit_data(dataset(()))
    with pytest.raises(UserError, match="'text'"):
        evaluator().fit({'features': np.ones(1)}, {'label': np.ones(1)})
    with pytest.raises(UserError, match="'label'"):
        evaluator().update({'features': np.ones((1, 2))}, {})
    names = ('[1.5]', '[null]', '"abc"', '[' * 100_000)
    odd = [f'{{"names": {value}, "templates": ["a {{}}"]}}' for value in names]
    for path in ('cats', '{"names": ["a"]}', '3', *odd):
        with pytest.raises(UserError, match='source prompts: write'):
            open_source(f'prompts:{path}', 'all')
