"""Sweep files: exact points, ranges, and mistakes that are seen before anything runs."""

import dataclasses
import json

import pytest
from helpers.experiments import examples

from vit_jax.errors import UserError
from vit_jax.sweeps import space
from vit_jax.sweeps.space import Sweep, choice, grid, log_uniform, star, uniform

BASE = {'config': 'experiments/vit/digits.py:smoke', 'metric': 'test/accuracy'}


def test_a_grid_is_every_combination_once():
    points = grid({'a': [1, 2], 'b': ['x', 'y', 'z']})
    assert points[:2] == [{'a': 1, 'b': 'x'}, {'a': 1, 'b': 'y'}]
    assert len(points) == len({tuple(p.values()) for p in points}) == 6


def test_a_star_varies_one_dimension_at_a_time():
    points = star({'a': 1, 'b': 2, 'c': 3}, {'a': [0, 1, 5], 'b': [4]})
    assert points == [
        {'a': 1, 'b': 2, 'c': 3},
        {'a': 0, 'b': 2, 'c': 3},
        {'a': 5, 'b': 2, 'c': 3},
        {'a': 1, 'b': 4, 'c': 3},
    ]


def test_false_is_another_value_than_0():
    assert [p['a'] for p in star({'a': 0}, {'a': [0.5, False, 0]})] == [0, 0.5, False]
    search = Sweep(**BASE, space={'a': choice(0, 0.5, False)}, points=[{'a': False}], trials=9)
    values = ['optim.x=0', 'optim.x=0.5', 'optim.x=False']
    assert [*space.overrides({'optim.x': search.points[0]['a']})] == values[2:]
    corners = [space.overrides({'optim.x': p['a']})[0] for p in space.corners(search)]
    assert corners == values
    points = Sweep(**BASE, points=grid({'a': [True, 1, 2]}))
    assert points.dimensions() == {'a': choice('True', 1, 2)}
    assert Sweep(**BASE, points=grid({'a': [True, False]})).points == [{'a': True}, {'a': False}]


def test_a_search_starts_with_its_points():
    sweep = Sweep(**BASE, space={'a': uniform(0.0, 1.0)}, points=[{'a': 0.5}], trials=3)
    assert sweep.queue() == [{'a': 0.5}, {}, {}]


def test_dimensions_of_points_are_the_values_that_they_have():
    sweep = Sweep(**BASE, points=star({'a': 1, 'b': 2}, {'a': [0, 5]}))
    assert sweep.dimensions() == {'a': choice(1, 0, 5), 'b': choice(2)}


def test_a_sweep_survives_json():
    dimensions = {'a': log_uniform(1e-5, 0.1), 'b': choice('x', 2), 'c': uniform(1, 9)}
    sweep = Sweep(**BASE, space=dimensions, trials=5, pruner='median', seed=3)
    stored = json.loads(json.dumps(space.to_json(sweep)))
    assert space.from_json(stored) == dataclasses.replace(sweep, points=[])


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({}, 'points.*space'),
        ({'points': [{'a': 1}], 'search': 'tpee'}, "did you mean 'tpe'"),
        ({'points': [{'a': 1}], 'pruner': 'hyper'}, "did you mean 'hyperband'"),
        ({'points': [{'a': 1}], 'direction': 'max'}, 'unknown direction'),
        ({'points': [{'a': 1}, {'b': 1}]}, 'dimensions'),
        ({'points': [{'a': (1, 2)}]}, 'numbers and strings'),
        ({'points': [{'a': 1}], 'trials': 4}, 'needs a space'),
        ({'space': {'a': uniform(0, 1)}, 'trials': 1, 'points': [{'a': 0}] * 2}, 'trials=1 .* 2'),
        ({'space': {'a': uniform(0, 1)}, 'trials': 1, 'points': [{'a': 2}]}, 'outside'),
        ({'space': {'a': log_uniform(0.0, 1.0)}, 'trials': 1}, 'positive'),
        ({'space': {'a': uniform(2.0, 1.0)}, 'trials': 1}, 'in order'),
        ({'space': {'a': choice()}, 'trials': 1}, 'no values'),
        ({'space': {'a': uniform(0, 1)}, 'trials': 1, 'search': 'cmaes'}, 'two ranges'),
    ],
)
def test_a_mistake_is_named(fields, words):
    with pytest.raises(UserError, match=words):
        Sweep(**BASE, **fields)


def test_a_ray_needs_a_center():
    with pytest.raises(UserError, match=r"did you mean 'model\.width'"):
        star({'model.width': 1}, {'model.widht': [2]})


def test_a_file_without_a_sweep_is_refused(tmp_path, repo):
    with pytest.raises(UserError, match='no file'):
        space.load_sweep('none.py')
    with pytest.raises(UserError, match='no function get_sweep'):
        space.load_sweep(f'{repo}/experiments/vit/digits.py')
    (tmp_path / 'file.py').write_text('def get_sweep(arg):\n    return 1\n')
    with pytest.raises(UserError, match='get_sweep of'):
        space.load_sweep(f'{tmp_path}/file.py')


def sweep_files(repo):
    return [p for p in (repo / 'experiments').rglob('*.py') if 'def get_sweep(' in p.read_text()]


@pytest.mark.slow
@pytest.mark.long
def test_every_sweep_of_the_experiments_can_be_created(repo, tmp_path, monkeypatch):
    study = pytest.importorskip('vit_jax.sweeps.study')
    monkeypatch.chdir(repo)
    files = sweep_files(repo)
    assert files
    for path in files:
        for i, arg in enumerate(('', *examples(path, 'get_sweep'))):
            sweep = space.load_sweep(f'{path}:{arg}')
            made = study.create(sweep, 'name', folder=tmp_path / f'{path.stem}{i}')
            assert len(made.trials()) == len(sweep.queue())
