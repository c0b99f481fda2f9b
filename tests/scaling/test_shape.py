"""Star sweeps: known exponents and optimal shapes are recovered; bad tables give one line."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from helpers.messages import mentions, says

from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.scaling import plots_optimal, shape

C = 0.4
CENTER = {'width': 512.0, 'depth': 16.0, 'mlp': 2048.0}
TRUE = {
    name: shape.ShapeLaw(alpha, a, beta, b, 0.0, C, 0.0)
    for name, (alpha, a, beta, b) in {
        'width': (9.0, 0.9, 0.3, 0.6),
        'depth': (0.9, 0.7, 1.0, 0.4),
        'mlp': (6.0, 0.6, 0.2, 0.5),
    }.items()
}
COLUMNS = shape.StarColumns(tuple(CENTER), 't', 'loss', 'examples')


def loss(at, t):
    terms = [law.value(np.array([at[name]]), t)[0] for name, law in TRUE.items()]
    return 0.1 + 2 * t**-C + float(sum(terms))


def runs(noise=0.0, seed=0):
    """Five sizes of each dimension, five budgets each."""
    rng, rows = np.random.default_rng(seed), []
    for name, middle in CENTER.items():
        for size in middle * np.array([1 / 8, 1 / 4, 1 / 2, 1, 2]):
            for t in (1e2, 1e3, 1e4, 1e5, 1e6):
                at = CENTER | {name: float(size)}
                y = loss(at, t) * np.exp(noise * rng.standard_normal())
                examples = t / (2 * at['width'] ** 1.5 * at['depth'])
                rows.append(at | {'t': t, 'loss': y, 'examples': examples})
    return [{key: repr(float(value)) for key, value in row.items()} for row in rows]


def test_known_optima_come_back_without_noise():
    star = shape.read_star(runs(), COLUMNS)
    assert star.center == CENTER and star.notes == ()
    shapes = shape.fit_shapes(star)
    for name, law in TRUE.items():
        assert shapes.exponent(name) == (pytest.approx(law.s, rel=1e-3), [])
        assert shapes.best(name, 1e8)[0] == pytest.approx(law.best(1e8), rel=1e-2)
    assert shapes.rmse < 1e-6
    start = {name: law.best(1e4) for name, law in TRUE.items()}
    expected = {name: law.best(1e7) for name, law in TRUE.items()}
    assert shapes.scaled(start, 1e3) == pytest.approx(expected, rel=1e-2)
    assert star.cost(CENTER) == pytest.approx(2 * 512**1.5 * 16, rel=1e-6)


def test_the_closed_form_is_the_minimum():
    law = TRUE['width']
    x = np.geomspace(law.best(1e5) / 4, law.best(1e5) * 4, 20_001)
    assert x[np.argmin(law.value(x, 1e5))] == pytest.approx(law.best(1e5), rel=1e-3)
    assert law.best(1e8) / law.best(1e5) == pytest.approx(1e3**law.s)


@pytest.mark.slow
def test_bands_hold_the_exponents():
    shapes = shape.fit_shapes(shape.read_star(runs(noise=0.005, seed=1), COLUMNS), bootstrap=20)
    inside = 0
    for name, law in TRUE.items():
        s, (low, high) = shapes.exponent(name)
        assert s == pytest.approx(law.s, rel=0.12)
        inside += low <= law.s <= high
        low, high = shapes.best(name, 1e8)[1]
        inside += low <= law.best(1e8) <= high
    assert inside >= 5


def test_runs_off_the_rays_and_without_values_are_left_out():
    rows = runs()
    rows += [CENTER | {'width': 64.0, 'depth': 2.0, 't': 1e4, 'loss': 9.0, 'examples': 1.0}]
    rows += [dict(rows[3]) | {'loss': 'nan'}, dict(rows[3]) | {'loss': '', 'run': 'a'}]
    rows += [dict(rows[3]) | {'finished': 0, 'run': 'b'}]
    star = shape.read_star([{k: str(v) for k, v in row.items()} for row in rows], COLUMNS)
    assert len(star.notes) == 4
    assert says(star.notes[0], f'line {len(rows) - 1}: left out', 'loss is nan')
    assert says(star.notes[1], 'a: left out', 'no loss')
    assert says(star.notes[2], 'b: left out', 'not finished')
    assert mentions(star.notes[3], '1', 'dimension')
    assert sum(len(ray.x) for ray in star.rays.values()) == len(runs()) + 30


def test_a_dimension_that_only_helps_has_no_optimum():
    rows = runs()
    for row in rows:
        better = 3.0 * float(row['depth']) ** -0.5 + 5.0 * float(row['t']) ** -0.4 + 0.2
        row['loss'] = repr(better)
    shapes = shape.fit_shapes(shape.read_star(rows, shape.StarColumns(('depth',), 't', 'loss')))
    assert shapes.laws == {}
    assert says(shapes.notes, 'depth: no optimum')


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (lambda rows: [row | {'t': '100'} for row in rows], ('width', '1 budgets')),
        (lambda rows: [row | {'mlp': '9'} for row in rows], ('mlp', '1 sizes')),
        (lambda rows: rows[:25:4], 'runs'),
        (lambda rows: [row | {'loss': '0'} for row in rows], ('no row', 'line 2')),
        (lambda rows: [row | {'width': 'wide'} for row in rows], ("'wide'", 'number')),
        (lambda rows: [{'t': '1', 'loss': '2'}], "--shape: unknown column 'width'"),
    ],
)
def test_bad_tables_are_one_line(spoil, message):
    columns = shape.StarColumns(('width',) if 'runs' in message else COLUMNS.shape, 't', 'loss')
    rows = spoil(runs())
    with pytest.raises(UserError) as caught:
        shape.read_star(rows, columns)
    assert mentions(str(caught.value), message) and '\n' not in str(caught.value)


def test_a_search_that_does_not_converge_gives_no_law(monkeypatch):
    monkeypatch.setattr(shape, '_ROUNDS', 1)
    with pytest.raises(UserError, match='did not converge'):
        shape.fit_shapes(shape.read_star(runs(noise=0.1), COLUMNS))


def test_the_picture_has_the_optimum_of_each_budget():
    star = shape.read_star(runs(), COLUMNS)
    axes = plots_optimal.draw_shape(star, shape.fit_shapes(star), COLUMNS, target=1e7).axes
    assert [panel.get_title(loc='left') for panel in axes] == [
        'width ~ t^0.267',
        'depth ~ t^0.364',
        'mlp ~ t^0.364',
    ]
    (mark,) = [line for line in axes[0].lines if line.get_marker() == '*']
    assert mark.get_xdata() == pytest.approx(TRUE['width'].best(1e7), rel=1e-2)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    path = tmp_path / 'star.csv'
    with path.open('w') as file:
        writer = csv.DictWriter(file, runs()[0])
        writer.writeheader()
        writer.writerows(runs())
    argv = ['scaling', 'shape', '--csv', str(path), '--shape', 'width,depth,mlp', '--t', 't']
    argv += ['--y', 'loss', '--examples', 'examples', '--bootstrap', '0', '--target', '1e7']
    start = ','.join(str(law.best(1e4)) for law in TRUE.values()) + '@1e4'
    assert main([*argv, '--start', start, '--json']) == 0
    summary = json.loads(capsys.readouterr().out)
    optimum = {name: dimension['optimum'] for name, dimension in summary['dimensions'].items()}
    assert optimum == pytest.approx(summary['scaled'], rel=1e-2)
    assert summary['examples'] == pytest.approx(
        1e7 / (2 * optimum['width'] ** 1.5 * optimum['depth']), rel=1e-3
    )
    assert main([*argv, '--output', str(tmp_path / 'star.png')]) == 0
    output = capsys.readouterr().out
    assert 'x* ~ t^s' in output and mentions(output, 'depth', 'optimum')
    assert (tmp_path / 'star.png').stat().st_size > 1000
    for extra, expected in (
        (['--start', '1,2'], '--start'),
        (['--start', '1,2@3'], ('3', 'positive')),
        (['--target', '-1'], '--target -1: must be positive'),
        (['--shape', ''], '--shape'),
    ):
        assert main([*argv, *extra]) == 2
        error = capsys.readouterr().err
        assert mentions(error, expected) and error.count('\n') == 1
