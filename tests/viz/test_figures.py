"""What all figures share."""

import numpy as np
import pytest
from helpers.messages import says
from matplotlib.figure import Figure

from vit_jax.viz import charts, figures


def test_pictures_for_people():
    gray = np.random.default_rng(0).integers(0, 256, (4, 6, 1), np.uint8)
    picture = figures.as_picture(gray, side=10)
    assert picture.shape == (12, 18, 3)
    np.testing.assert_array_equal(picture[1::3, 1::3], gray.repeat(3, axis=2))
    floats = np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 4, 3)
    picture = figures.as_picture(floats)
    assert (picture.dtype, picture.min(), picture.max()) == (np.uint8, 0, 255)
    assert (np.diff(picture.ravel().astype(int)) > 0).all()


@pytest.mark.parametrize(('channels', 'shown'), [(2, [0, 0, 0]), (4, [0, 1, 2]), (12, [0, 1, 2])])
def test_pictures_of_other_channels_show_the_first(channels, shown):
    image = np.random.default_rng(0).integers(0, 256, (4, 6, channels), np.uint8)
    np.testing.assert_array_equal(figures.as_picture(image), image[..., shown])


@pytest.mark.parametrize(
    'name', ['IMG_20240131_174502_' * 3 + 'final.jpg', 'a photo of a cat on a sofa, ' * 2, 'W' * 40]
)
def test_a_long_title_is_broken_into_lines_that_fit(name):
    figure = figures.new_figure((4, 2))
    left, right = figure.subplots(1, 2)
    figures.show_image(left, np.zeros((2, 2, 3)), name)
    figures.style(right, name)
    figures.heading(figure, name)
    figures.pixels(figure)
    for text, inches in ((left.title, 2), (figure._suptitle, 4)):
        extent = text.get_window_extent()
        assert '\n' in text.get_text() and extent.x0 >= 0 and extent.width <= inches * figure.dpi
        assert text.get_text().replace('\n', '').replace(' ', '') == name.replace(' ', '')
    assert '\n' in right.get_title(loc='left')


def test_a_title_of_many_lines_loses_its_middle():
    text = figures.wrap('first ' + 50 * 'middle ' + 'last', 1.5, 8)
    assert text.count('\n') < figures.MAX_LINES
    assert text.startswith('first') and text.endswith('last') and '…' in text


def test_characters_without_a_font_are_boxes_with_one_line(tmp_path, monkeypatch, caplog, recwarn):
    monkeypatch.setattr(figures, '_reported', set())
    figures._fonts_of.cache_clear()
    figure = Figure()
    figure.suptitle('\N{MUSICAL SYMBOL G CLEF}')
    figure.text(0, 0, '\N{HIRAGANA LETTER NO}')  # in Matplotlib's STIX, and not in its DejaVu Sans
    for _ in range(2):
        figures.save(figure, tmp_path / 'a.png')
    figures._fonts_of.cache_clear()
    assert not recwarn.list
    assert says(
        [record.getMessage() for record in caplog.records], '\N{MUSICAL SYMBOL G CLEF}', 'Noto'
    )
    assert len(figure.texts[0].get_fontfamily()) > 1


def test_names_are_no_tex_but_formulas_are(tmp_path):
    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], label='_$x_{$')
    axes.plot([1, 2], label='cost $5 or $6')
    axes.plot([1, 2])
    axes.errorbar([0, 1], [1, 2], [1, 1], fmt='none', capsize=2)
    axes.set_title('\x1b[31m$\\nosuch$')
    axes.set_xticks([0, 1], ['$^$', 'b'])
    figures.legend(axes)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ['_$x_{$', 'cost $5 or $6']
    formula = axes.set_ylabel('$x^{2}$')
    figures.set_formula(formula)
    figures.save(figure, tmp_path / 'a.svg')
    assert axes.get_title() == '\\u001b[31m$\\nosuch$'
    svg = (tmp_path / 'a.svg').read_text()
    for text in (*labels, '$^$', axes.get_title()):
        assert f'<!-- {text} -->' in svg
    assert '<!-- $x^{2}$ -->' in svg
    assert formula.get_parse_math()


def test_a_confusion_matrix_shows_the_accuracy():
    matrix = np.array([[3, 1], [0, 4]])
    title = charts.draw_confusion(matrix, ['cat', 'dog'], 'pets').get_suptitle()
    assert 'pets' in title and '0.875' in title
