"""`compare`: several runs in one table and one picture."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.viz import comparison


def write(folder: pathlib.Path, seconds: float, losses: list[float]) -> str:
    """A run that logs every 10 steps and evaluates with it."""
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text('{"batch_size": 8, "model": {"name": "vit"}}')
    lines = []
    for i, loss in enumerate(losses, 1):
        rates = {'train/step_sec': seconds * i, 'train/images_per_sec': 8 / (seconds * i)}
        rates |= {'train/lr': 3e-5 * i}
        lines += [{'step': 10 * i, 'train/loss': loss, **rates}]
        lines += [{'step': 10 * i, 'test/loss': loss + 1, 'test/signature': 'as always'}]
    lines += [{'step': 10 * len(losses), 'bleu/bleu_1_8': 30.0 * seconds, 'bleu/bleu_9_up': 20.0}]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(folder)


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> list[str]:
    return [
        write(tmp_path / 'slow', 1.2, [3.0, 2.0, 1.0]),
        write(tmp_path / 'fast', 0.6, [3.0, 2.5, 2.2]),
    ]


def test_a_row_has_the_cost_and_results_of_a_run(folders, capsys) -> None:
    argv = ['compare', *folders, '--metric', 'test/loss', '--reach', '3.2', '--json']
    assert main(argv) == 0
    slow, fast = json.loads(capsys.readouterr().out)
    assert slow['run'] == 'slow' and slow['steps'] == 30 and slow['parameters'] is None
    # 10 steps of 1.2 s, 10 of 2.4 s and 10 of 3.6 s.
    assert slow['minutes'] == pytest.approx(72 / 60) and fast['minutes'] == pytest.approx(36 / 60)
    assert slow['images/s'] == pytest.approx(8 / 2.4)
    assert (slow['test/loss'], fast['test/loss']) == (2.0, 3.2)
    assert (slow['steps to 3.2'], fast['steps to 3.2']) == (20, 30)
    assert slow['minutes to 3.2'] == pytest.approx(36 / 60)


def test_small_numbers_are_not_rounded_to_zero(folders, capsys) -> None:
    assert main(['compare', *folders, '--metric', 'train/lr']) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ['train/lr', '9e-05', '9e-05']


def test_a_value_that_is_not_reached_is_a_dash(folders, capsys) -> None:
    assert main(['compare', *folders, '--metric', 'test/loss', '--reach', '2.5']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ['slow', 'fast']
    assert next(line.split() for line in lines if line.startswith('steps to')) == [
        *('steps', 'to', '2.5', '30', '-')
    ]


def test_a_run_that_begins_past_the_value_reached_it_there(folders, capsys) -> None:
    argv = ['compare', *folders, '--metric', 'test/loss', '--reach', '4.5', '--json']
    assert main(argv) == 0
    assert [row['steps to 4.5'] for row in json.loads(capsys.readouterr().out)] == [10, 10]


def test_the_direction_of_unknown_metrics_follows_the_runs(folders) -> None:
    histories = comparison.read(folders)
    for history, values in zip(histories, ([1, 5], [4, 3]), strict=True):
        history.series['purity'] = np.array([1, 2]), np.array(values, float)
    assert not comparison.smaller_is_better(histories, 'purity')
    assert comparison.smaller_is_better(histories[1:], 'purity')


def test_by_default_all_that_is_evaluated_first_what_all_have(folders, capsys) -> None:
    with pathlib.Path(folders[0], 'metrics.jsonl').open('a') as file:
        file.write(json.dumps({'step': 30, 'a/loss': 1.5}) + '\n')
    assert main(['compare', *folders, '--json']) == 0
    slow, fast = json.loads(capsys.readouterr().out)
    assert [k for k in slow if '/' in k] == [
        *('images/s', 'test/loss', 'bleu/bleu_1_8', 'bleu/bleu_9_up', 'a/loss')
    ]
    assert (slow['a/loss'], fast['a/loss']) == (1.5, None)
    histories = comparison.read(folders)
    many = comparison.draw(histories, ['test/loss'] * 11)
    assert len(many.axes) == 9 and many.get_supxlabel().startswith('2 more')


def test_growing_metrics_are_reached_from_below(folders) -> None:
    (history,) = comparison.read(folders[:1])
    history.series['accuracy'] = np.array([1, 2, 3]), np.array([0.1, 0.5, 0.4])
    assert history.first_step_at('accuracy', 0.45, falls=False) == 2
    assert history.first_step_at('accuracy', 0.6, falls=False) is None


def test_the_picture_has_histories_over_time_and_bars(folders, tmp_path, capsys) -> None:
    histories = comparison.read(folders)
    figure = comparison.draw(histories, ['test/loss', 'bleu/bleu_*'], 'minutes')
    history, bars = figure.axes
    np.testing.assert_allclose(history.lines[0].get_xdata(), np.array([12, 36, 72]) / 60)
    assert [bar.get_height() for bar in bars.patches] == [36.0, 20.0, 18.0, 20.0]
    assert [label.get_text() for label in bars.get_xticklabels()] == ['1–8', '9 up']
    del histories[0].series['bleu/bleu_9_up']
    (gap,) = comparison.draw(histories, ['bleu/bleu_*']).axes
    assert [text.get_text() for text in gap.texts] == ['36', '', '18', '20']
    out = tmp_path / 'compared.png'
    assert main(['compare', *folders, '--metric', 'bleu/*', '--out', str(out)]) == 0
    assert out.read_bytes().startswith(b'\x89PNG')


def test_bars_of_different_units_have_separate_axes(folders) -> None:
    histories = comparison.read(folders)
    for history in histories:
        history.series['bleu/chrf'] = np.array([30]), np.array([55.0])
    figure = comparison.draw(histories, ['bleu/*', 'test/loss'])
    assert [axes.get_title('left') for axes in figure.axes] == [
        *('BLEU (bleu)', 'chrF (bleu)', 'Loss (test)')
    ]
    assert [len(axes.patches) for axes in figure.axes] == [4, 2, 0]


def test_runs_of_equal_names_are_named_by_their_folders(tmp_path) -> None:
    folders = [write(tmp_path / name / 'run', 1.0, [1.0]) for name in 'ab']
    assert [history.name for history in comparison.read(folders)] == folders


def test_numbered_runs_are_named_with_the_folder_above(tmp_path) -> None:
    folders = [write(tmp_path / 'width' / name, 1.0, [1.0]) for name in ('16', '64')]
    assert [history.name for history in comparison.read(folders)] == ['width/16', 'width/64']


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--metric', 'test/los'], ("'test/los'", "'test/loss'")),
        (['--metric', 'bleu/x*'], "'bleu/x*'"),
        (['--out', 'a.gif'], ("--out 'a.gif'", '.png')),
    ],
)
def test_mistakes_are_one_line(folders, flags, message, capsys) -> None:
    assert main(['compare', *folders, *flags]) == 2
    assert mentions(capsys.readouterr().err, 'error:', message)


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys) -> None:
    assert main(['compare', str(tmp_path)]) == 2
    assert 'logged metrics' in capsys.readouterr().err
