"""Texts that are matched with images: the flags of `predict`, its rows and its picture."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.data.transforms import parse_transforms
from vit_jax.data.vocabulary import EOS, Bytes
from vit_jax.errors import UserError
from vit_jax.tasks.siglip import Task
from vit_jax.viz import figures, siglip
from vit_jax.viz.photo import Context, Photo

IMAGE = np.zeros((6, 6, 3), np.uint8)
BYTES = Bytes()
PHOTO = Photo(pathlib.Path('a.png'), IMAGE, {'image': IMAGE}, '')


def flags(*words):
    parser = argparse.ArgumentParser()
    siglip.Viz().add_flags(parser)
    return parser.parse_args(words)


def encode(field, text):
    (step,) = parse_transforms(f"tokenize('{field}', 8)", BYTES).steps
    return step({field: text}, np.random.default_rng())[field]


def adapted(*words, encode=encode):
    viz = siglip.Viz()
    context = Context(flags=flags(*words), vocab=BYTES, encode=encode)
    return viz, viz.adapt_task(Task(), context), context


def test_texts_become_ids_of_the_model_s_length():
    _, task, _ = adapted('--texts', 'a cat; a very long dog')
    cat, dog = np.array(task.prompts)
    assert cat.tolist() == [*Bytes().encode('a cat').tolist(), EOS, 0, 0]
    assert len(dog) == 8 and dog[-1] == EOS
    assert Bytes().decode(dog) == 'a very '


def test_names_of_classes_are_put_into_the_prompt(tmp_path):
    file = tmp_path / 'cats.txt'
    file.write_text('\ufefflion\n\ntiger\n')
    assert siglip.read_texts(flags('--classes', str(file))) == [
        'a photo of a lion',
        'a photo of a tiger',
    ]
    found = siglip.read_texts(flags('--classes', str(file), '--prompts', 'the {}'))
    assert found == ['the lion', 'the tiger']


def test_rows_are_the_most_similar_texts():
    viz, _, context = adapted('--texts', 'a;b;c', '--top', '2')
    prediction = {'similarity': np.array([0.1, 0.9, 0.4]), 'probs': np.array([0.01, 0.8, 0.2])}
    rows = viz.rows(prediction, PHOTO, context)
    assert [row['text'] for row in rows] == ['b', 'c']
    assert rows[0] == {'text': 'b', 'probability': 0.8, 'similarity': 0.9}
    figure = viz.draw([prediction, prediction], [PHOTO, PHOTO], context)
    assert len(figure.axes) == 3 and figures.pixels(figure).shape[2] == 3
    labels = [t.get_text() for t in figure.axes[0].get_xticklabels()]
    assert labels == ['a', 'b', 'c']


def test_examples_of_a_run_are_matched_with_one_another():
    fields = {'image': IMAGE, 'caption': np.append(Bytes().encode('cat'), EOS)}
    photo = Photo(pathlib.Path('a.png'), IMAGE, fields, '')
    prediction = {'features': np.ones(3) / 3, 'text': np.ones(3)}
    context = Context(vocab=Bytes())
    figure = siglip.Viz().show([prediction, prediction], [photo, photo], context)
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ['cat', 'cat']
    assert {t.get_text() for t in figure.axes[0].texts} == {'1.00'}


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ([], '--texts .* --classes'),
        (['--texts', 'a; '], 'a text is empty'),
        (['--texts', 'a;b;a'], "text 'a'"),
        (['--classes', 'nowhere.txt'], '--classes nowhere.txt'),
        (['--classes', 'x', '--prompts', 'a photo'], 'has no {} for the class name'),
    ],
)
def test_invalid_texts_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        adapted(*flags)


def test_no_vocabulary():
    with pytest.raises(UserError, match='vocabulary'):
        adapted('--texts', 'a', encode=None)
