"""Curves of a run folder, and figures that appear whole or not at all."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from vit_jax.errors import UserError
from vit_jax.storage.run_folder import read_series
from vit_jax.viz import curves, figures


def write(folder, lines):
    text = ''.join(line if isinstance(line, str) else json.dumps(line) + '\n' for line in lines)
    (folder / 'metrics.jsonl').write_text(text)


def run_lines(steps=20, every=5):
    for step in range(every, steps + 1, every):
        rates = {'train/lr': 1e-3, 'train/images_per_sec': 900.0 + step, 'train/grad_norm': 1.0}
        yield {'step': step, 'train/loss': 3.0 / step, 'train/accuracy': step / steps, **rates}
    yield {'step': steps, 'test/loss': 0.3, 'test/accuracy': 0.9}


def test_series_survive_a_crash_and_a_resumed_run(tmp_path):
    lines = [
        {'step': 10, 'train/loss': 2.0},
        {'step': 20, 'train/loss': 1.0, 'test/accuracy': 0.5},
        {'step': 20, 'train/loss': 1.5},
        '{"step": 30, "train/lo',
    ]
    write(tmp_path, lines)
    series = read_series(tmp_path)
    assert set(series) == {'train/loss', 'test/accuracy'}
    steps, values = series['train/loss']
    np.testing.assert_array_equal(steps, [10, 20])
    np.testing.assert_array_equal(values, [2.0, 1.5])


def test_panels_hold_what_belongs_together():
    once, course = (np.array([9]), np.array([0.5])), (np.array([5, 9]), np.array([0.7, 0.5]))
    names = ['test/loss', 'train/lr', 'train/loss', 'train/grad_norm', 'val/pq', 'test/accuracy']
    series = dict.fromkeys(names, course) | {'test/bleu_1_8': once, 'val/chrf': course}
    found = curves.panels(series)
    assert found == {
        'loss': ['train/loss', 'test/loss'],
        'accuracy': ['test/accuracy'],
        'lr': ['train/lr'],
        'pq': ['val/pq'],
        'chrf': ['val/chrf'],
        'bleu_1_8': ['test/bleu_1_8'],
    }
    assert list(found)[-1] == 'bleu_1_8'


def test_courses_are_drawn_before_what_was_measured_once():
    once, course = (np.array([9]), np.array([0.5])), (np.array([5, 9]), np.array([0.7, 0.5]))
    series = {f'test/once_{i}': once for i in range(20)} | {'test/pq': course}
    assert list(curves.panels(series))[:2] == ['pq', 'once_0']
    figure = curves.draw(series, curves.panels(series), 'a run')
    assert len(figure.axes) == figures.MAX_PANELS
    assert figure.get_supxlabel().startswith(f'{21 - figures.MAX_PANELS} more')


def test_a_slow_rate_has_no_prefix(tmp_path):
    assert [figures.short_rate(value) for value in (0.8, 800, 1500)] == ['0.8', '800', '1.5k']
    assert figures.title('val/miou') == figures.title('val/mIoU') == 'mIoU (val)'


@pytest.mark.slow
@pytest.mark.parametrize(
    ('steps', 'every'), [(20, 5), pytest.param(20_000, 50, marks=pytest.mark.long)]
)
def test_curves_png(tmp_path, steps, every):
    write(tmp_path, run_lines(steps, every))
    path = curves.plot_curves(tmp_path)
    assert path == tmp_path / 'curves.png'
    assert path.read_bytes().startswith(b'\x89PNG')
    assert {p.name for p in tmp_path.iterdir()} == {'curves.png', 'metrics.jsonl'}


def test_lines_carry_their_data_and_last_value(tmp_path):
    write(tmp_path, run_lines())
    series = read_series(tmp_path)
    figure = curves.draw(series, curves.panels(series), 'a run')
    loss, accuracy, lr, rate = figure.axes
    assert [a.get_title('left') for a in figure.axes] == [
        *('Loss', 'Accuracy', 'Learning rate', 'Images/s')
    ]
    train, test = loss.get_lines()
    np.testing.assert_allclose(train.get_ydata(), [0.6, 0.3, 0.2, 0.15])
    assert [t.get_text() for t in loss.get_legend().get_texts()] == ['train  0.15', 'test  0.3']
    assert train.get_color() == accuracy.get_lines()[0].get_color() != test.get_color()
    assert lr.get_ylim()[0] == rate.get_ylim()[0] == 0


def test_the_legend_tells_what_is_not_alike_in_training_and_evaluation(tmp_path):
    write(tmp_path, run_lines())
    series = read_series(tmp_path)
    config = {'task': {'mixup': 0.2, 'cutmix': 0.0, 'label_smoothing': 0.1}}
    config['step'] = {'ema_decay': 0.99}
    figure = curves.draw(series, curves.panels(series), '', curves.remarks(config, series))
    loss, accuracy, lr, _ = [
        [t.get_text() for t in a.get_legend().get_texts()] for a in figure.axes
    ]
    assert loss == ['train, with mixup, label smoothing  0.15', 'test, EMA weights  0.3']
    assert accuracy == ['train, with mixup  1', 'test, EMA weights  0.9']
    assert lr == ['train  0.001']
    plain = {'task': {'mixup': 0.0, 'label_smoothing': 0.0}, 'step': {'ema_decay': 0.0}}
    assert curves.remarks(plain, series) == {} == curves.remarks({}, series)


def test_a_diverged_evaluation_is_drawn_with_a_gap(tmp_path):
    lines = [{'step': s, 'test/loss': float('nan') if s == 50 else 1.0} for s in range(1, 101)]
    write(tmp_path, lines)
    assert curves.plot_curves(tmp_path) is not None
    series = read_series(tmp_path)
    (line,) = curves.draw(series, {'loss': ['test/loss']}, '').axes[0].get_lines()
    assert np.isnan(line.get_ydata()).sum() == 1


def test_nothing_to_draw(tmp_path):
    assert curves.plot_curves(tmp_path) is None
    write(tmp_path, [])
    assert curves.plot_curves(tmp_path) is None
    assert not (tmp_path / 'curves.png').exists()


def test_running_mean():
    values = np.array([0.0, 3.0, 6.0, 3.0, 0.0])
    np.testing.assert_allclose(curves.running_mean(values, 1), [1.5, 3, 4, 3, 1.5])
    np.testing.assert_array_equal(curves.running_mean(values, 0), values)


class BrokenFigure(Figure):
    def savefig(self, file, **_):
        file.write(b'half a picture')
        raise OSError(28, 'No space left on device')


def test_a_failed_save_keeps_the_old_picture(tmp_path):
    path = figures.save(Figure(), tmp_path / 'new' / 'a.png')
    before = path.read_bytes()
    with pytest.raises(OSError, match='No space'):
        figures.save(BrokenFigure(), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ('name', 'begins'), [('a.png', b'\x89PNG'), ('a.PDF', b'%PDF'), ('a.svg', b'<?xml')]
)
def test_the_suffix_is_the_format(tmp_path, name, begins):
    figures.check_format(name, '--out')
    assert figures.save(Figure(), tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize('name', ['a', 'a.bmp', 'png'])
def test_an_unknown_suffix_is_refused(name):
    with pytest.raises(UserError, match=r'--out .* must end in \.png'):
        figures.check_format(name, '--out')
