"""Run folders as rows: sizes, costs and metrics, as far as the folder tells them."""

import csv
import io
import json

import pytest
from helpers.messages import says

from vit_jax.errors import UserError
from vit_jax.scaling import runs


def make_run(folder, width=64, steps=100, meta=None, lines=None, **sections):
    """A run folder of plain files, with one checkpoint if `meta` is given."""
    folder.mkdir(parents=True)
    config = {'batch_size': 32, 'seed': 0, 'model': {'name': 'vit', 'width': width}, **sections}
    (folder / 'config.json').write_text(json.dumps(config))
    if lines is None:
        lines = [
            {'step': steps // 2, 'train/step_sec': 0.5, 'train/loss': 2.0},
            {'step': steps, 'train/step_sec': 0.1, 'train/loss': 1.0},
            {'step': steps, 'test/accuracy': 0.75, 'test/loss': float('nan')},
        ]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    if meta is not None:
        make_checkpoint(folder / 'checkpoints' / str(steps), steps, {'config': config, **meta})
    return folder


def make_checkpoint(directory, step, meta):
    (directory / 'meta').mkdir(parents=True)
    (directory / 'variables').mkdir()
    (directory / 'commit_success.txt').touch()
    (directory / 'manifest.json').write_text(json.dumps({'step': step, 'files': {}}))
    (directory / 'meta' / 'metadata').write_text(json.dumps(meta))
    shapes = {('params', 'kernel'): [3, 4], ('params', 'scale'): [], ('collections', 'mean'): [9]}
    tree = {
        str(path): {
            'key_metadata': [{'key': key} for key in path],
            'value_metadata': {'write_shape': shape},
        }
        for path, shape in shapes.items()
    }
    (directory / 'variables' / '_METADATA').write_text(json.dumps({'tree_metadata': tree}))


def test_a_row_tells_size_cost_and_result(tmp_path):
    meta = {'hardware': '8 x TPU v4 (jit)', 'num_examples': 1000}
    folder = make_run(tmp_path / 'a', meta=meta)
    (row,) = runs.collect([folder], lambda meta: 7 * 32)
    expected = {
        'run': str(folder),
        'model': 'vit',
        'hardware': '8 x TPU v4 (jit)',
        'finished': 0,
        'steps': 100,
        'batch_size': 32,
        'parameters': 13,
        'examples_seen': 3200,
        'data_size': 1000,
        'epochs': 3.2,
        'flops': 7 * 3200,
        'train/step_sec': 0.1,
        'train/loss': 1.0,
        'test/accuracy': 0.75,
        'test/loss': None,
    }
    assert row.pop('chip_hours') == pytest.approx(8 * (50 * 0.5 + 50 * 0.1) / 3600)
    assert row == expected


@pytest.mark.parametrize(
    ('hardware', 'chips'),
    [
        *(('2 x TPU v3 (pmap)', 1), ('1 x cpu (jit)', 1), ('4 x NVIDIA H100', 0)),
        ('4 x TPU v3 on 2 slices (jit)', 2),
    ],
)
def test_chips_are_counted_not_cores(tmp_path, hardware, chips):
    folder = make_run(tmp_path / 'a', meta={'hardware': hardware})
    (row,) = runs.collect([folder], lambda meta: None)
    assert (row['chip_hours'] or 0) == pytest.approx(chips * 30 / 3600)


def test_tokens_and_sentences_are_counted(tmp_path):
    """Whatever the batch size, which counts padding: 3 s at one rate, then 5 s at another."""
    rates = ('train/step_sec', 'train/sentences_per_sec', 'train/tokens_per_sec')
    lines = [
        {'step': step, **dict(zip(rates, values, strict=True))}
        for step, values in ((10, (0.3, 4.0, 50.0)), (60, (0.1, 5.0, 70.0)))
    ]
    folder = make_run(tmp_path / 'a', meta={}, lines=lines, data={'buckets': [8, 16]})
    (row,) = runs.collect([folder], lambda meta: 0.5)
    assert (row['examples_seen'], row['tokens_seen']) == (12 + 25, 150 + 350)
    assert (row['steps'], row['flops']) == (100, 50)
    folder = make_run(tmp_path / 'b', lines=[], data={'buckets': [8, 16]})
    (row,) = runs.collect([folder], lambda meta: 0.5)
    assert (row['examples_seen'], row['tokens_seen']) == (None, None)


def test_unknown_cells_stay_empty(tmp_path):
    (row,) = runs.collect([make_run(tmp_path / 'a', lines=[])], lambda meta: 7)
    unknown = ('parameters', 'data_size', 'epochs', 'flops', 'chip_hours', 'hardware')
    assert [row[name] for name in unknown] == [None] * 6
    assert row['examples_seen'] == 0


def test_folders_of_runs_and_what_differs_between_them(tmp_path):
    for width in (64, 128):
        make_run(tmp_path / 'grid' / f'w{width}', width=width)
    rows = runs.collect([tmp_path, tmp_path / 'grid' / 'w64'], lambda meta: None)
    assert [row['config.model.width'] for row in rows] == [128, 64]
    assert not any('seed' in name for name in rows[0])
    read = list(csv.DictReader(io.StringIO(runs.to_csv(rows))))
    assert read[0]['test/accuracy'] == '0.75'
    assert read[0]['parameters'] == ''


def test_a_folder_without_runs_is_a_mistake(tmp_path):
    for folder in (tmp_path, tmp_path / 'none'):
        with pytest.raises(UserError, match='holds no run'):
            runs.collect([folder], lambda meta: None)
    (tmp_path / 'config.json').write_text('{')
    with pytest.raises(UserError, match='config'):
        runs.collect([tmp_path], lambda meta: None)


def test_classifiers_are_separated_from_other_tasks(tmp_path):
    for name in ('classify', 'detect', 'classify'):
        make_run(tmp_path / str(len(list(tmp_path.iterdir()))), task={'name': name})
    rows = list(csv.DictReader(io.StringIO(runs.to_csv(runs.collect([tmp_path], lambda m: None)))))
    classifiers, left_out = runs.select_classification(rows, ('model',))
    assert [row['run'][-1] for row in classifiers] == ['0', '2']
    assert says(left_out, f'{tmp_path}/1: ', 'detect')
    assert runs.select_classification(rows, ('config.task.name',)) == (rows, [])
    assert runs.select_classification(rows[1:2], ()) == (rows[1:2], []), 'none of them classifies'
    (single,) = runs.collect([tmp_path / '0'], lambda meta: None)
    assert runs.select_classification([single], ()) == ([single], []), (
        'they have no column of tasks'
    )
