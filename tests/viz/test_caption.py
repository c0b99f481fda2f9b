"""Captions above images, texts by their likelihood, and the words of attention maps."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.data import vocabulary
from vit_jax.tasks.caption import Task
from vit_jax.viz.caption import Viz
from vit_jax.viz.photo import Context, Photo

VOCAB = vocabulary.load_vocabulary('bytes')
IMAGE = np.zeros((8, 8, 3), np.uint8)
PHOTO = Photo(pathlib.Path('a.png'), IMAGE, {'image': IMAGE}, 'as it is')
IDS = np.append(VOCAB.encode('a cat'), [2, 0, 0]).astype(np.int32)


def context(*words):
    parser = argparse.ArgumentParser()
    Viz().add_flags(parser)
    flags = parser.parse_args(words)
    return Context(flags=flags, vocab=VOCAB, encode=lambda field, text: VOCAB.encode(text))


def test_a_caption_is_a_row_and_is_drawn_above_its_image():
    viz, prediction = Viz(), {'tokens': IDS, 'score': np.float32(-1.5)}
    assert viz.adapt_task(task := Task(), context()) is task
    assert viz.rows(prediction, PHOTO, context()) == [{'caption': 'a cat', 'score': -1.5}]
    (axes,) = viz.draw([prediction], [PHOTO], context()).axes
    assert axes.get_title() == 'a.png\na cat'


def test_texts_are_ordered_by_their_likelihood():
    viz, given = Viz(), context('--texts', 'cat; dog; cow', '--top', '2')
    task = viz.adapt_task(Task(), given)
    assert task.prompts == tuple(tuple(VOCAB.encode(word)) for word in ('cat', 'dog', 'cow'))
    prediction = {'likelihood': np.log([0.1, 0.3, 0.2])}
    first, second = viz.rows(prediction, PHOTO, given)
    assert (first['text'], second['text']) == ('dog', 'cow')
    assert first['probability'] == pytest.approx(0.5)
    assert second['log_likelihood'] == pytest.approx(np.log(0.2))
    (axes,) = viz.draw([prediction], [PHOTO], given).axes
    assert axes.get_title() == 'a.png\ndog'


def test_queries_are_the_predicted_tokens_up_to_the_end():
    logits = np.eye(len(VOCAB))[IDS][None]
    assert list(Viz().queries({'logits': logits}, context()).values()) == VOCAB.pieces(IDS[:6])
    assert Viz().queries({}, context()) is None
