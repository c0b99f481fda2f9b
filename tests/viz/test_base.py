"""Defaults of what shows a task: they do for images, for texts, and for both in one example."""

import pathlib

import numpy as np
import pytest
from matplotlib.figure import Figure

from vit_jax.errors import UserError
from vit_jax.viz.base import Viz
from vit_jax.viz.photo import Context, Photo


class Letters:
    """A vocabulary of letters: 1 is `a`."""

    def encode(self, text):
        return np.array([ord(letter) - ord('a') + 1 for letter in text], np.int32)

    def decode(self, ids):
        return ''.join(chr(ord('a') + int(i) - 1) for i in ids)

    def pieces(self, ids):
        return list(self.decode(ids))


IMAGE = np.zeros((8, 8, 3), np.uint8)
IDS = {'caption': np.array([2, 1, 4])}
WORDS = Context(vocab=Letters())


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def test_images_of_a_batch_have_their_texts_above_them():
    examples = [{'image': IMAGE, 'label': np.array(3), **IDS}] * 2
    assert titles(Viz().draw_batch([IMAGE] * 2, examples, WORDS)) == ['bad', 'bad']
    assert titles(Viz().draw_batch([IMAGE] * 2, examples, Context())) == ['', '']


def test_texts_of_a_batch_are_a_table():
    (axes,) = Viz().draw_batch(None, [IDS, {'caption': np.array([3])}], WORDS).axes
    assert [text.get_text() for text in axes.texts] == ['caption', 'bad', 'c']


def test_a_batch_of_neither_is_refused():
    with pytest.raises(UserError, match='caption'):
        Viz().draw_batch(None, [IDS], Context())


def test_examples_of_a_run_are_a_picture_or_rows_of_text():
    photo = Photo(pathlib.Path('a.png'), IMAGE, {'image': IMAGE}, '')
    found = {'scores': np.array([0.5, 1.5]), 'tokens': np.array([5])}
    shown = Viz().show([found], [photo], WORDS)
    assert isinstance(shown, Figure)
    assert Viz().show([found], [IDS], WORDS) == [{'caption': 'bad', 'tokens': 'e'}]
    assert Viz().draw_attention(IDS, {}, [], WORDS) is None


def test_attention_is_drawn_by_a_method_under_its_former_name():
    class Former(Viz):
        def look(self, example, outputs, maps, context):
            return 'drawn'

    assert Former().draw_attention(IDS, {}, [], WORDS) == 'drawn'


def test_a_prediction_is_summed_up_by_its_arrays():
    photo = Photo(pathlib.Path('a.png'), IMAGE, {'image': IMAGE}, '')
    found = {'scores': np.array([0.5, 1.5]), 'nothing': np.zeros((0, 4))}
    (row,) = Viz().rows(found, photo, Context())
    assert row == {'array': 'scores', 'shape': [2], 'mean': 1.0, 'min': 0.5, 'max': 1.5}
