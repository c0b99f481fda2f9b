"""`scaling`: a table of runs, fits as JSON and text, pictures, and a report of it all."""

import csv
import io
import json

import numpy as np
import pytest
from helpers.messages import mentions, says
from threadpoolctl import threadpool_info, threadpool_limits

from vit_jax import __main__ as cli
from vit_jax.commands import scaling
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.profiling import cost, flops

pytestmark = pytest.mark.slow  # as a whole

COLUMNS = ['--x', 'seen', '--y', 'loss', '--bootstrap', '3']


@pytest.fixture
def points(tmp_path):
    """Two curves of 16 points."""
    lines = ['model,seen,loss']
    for name, floor in (('S', 0.3), ('B', 0.2)):
        x = np.geomspace(1e6, 1e9, 16)
        lines += [f'{name},{a},{b}' for a, b in zip(x, 400 * x**-0.45 + floor, strict=True)]
    path = tmp_path / 'points.csv'
    path.write_text('\n'.join(lines) + '\n')
    return path


def run(capsys, *argv):
    assert cli.main(['scaling', *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_fit_as_json(points, capsys):
    argv = ['--csv', points, *COLUMNS, '--by', 'model', '--form', 'shifted', '--json']
    result = json.loads(run(capsys, 'fit', *argv))
    assert [curve['by'] for curve in result['curves']] == [{'model': 'S'}, {'model': 'B'}]
    first = result['curves'][0]
    assert first['params']['c'] == pytest.approx(0.3, rel=0.01)
    assert set(first['bands']) == set('abcd')
    assert first['holdout_rmse'] < 0.01
    assert result['median_holdout_rmse'] < 0.01


def test_fit_as_a_table(points, tmp_path, capsys):
    file = tmp_path / 'new' / 'fit.json'
    argv = ['--csv', points, *COLUMNS, '--by', 'model', '--against', 'm2,power', '--json', file]
    argv += ['--form', 'shifted']
    lines = run(capsys, 'fit', *argv).splitlines()
    assert lines[0].startswith('shifted: ') and lines[0].endswith(' a (x + d)^-b + c')
    assert ' '.join(lines[1].split()) == 'model points a b c d held out m2 power'
    assert [line.split()[0] for line in lines[2:4]] == ['S', 'B']
    assert 'power: ' in lines[-1] and 'better on 2 of 2 curves (100%)' in lines[-1]
    assert json.loads(file.read_text())['against']['power']['better_on'] == 2


@pytest.mark.parametrize('suffix', ['png', pytest.param('svg', marks=pytest.mark.long)])
def test_plot(points, tmp_path, capsys, suffix):
    path = tmp_path / f'curves.{suffix}'
    argv = ['--csv', points, *COLUMNS, '--by', 'model', '--form', 'shifted', '--output', path]
    run(capsys, 'plot', *argv)
    assert path.read_bytes()[:5] in (b'\x89PNG\r', b'<?xml')


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['fitt'], ("'fitt'", "'fit'")),
        (['fit', '--csv', 'nowhere.csv', *COLUMNS], ('--csv', "'nowhere.csv'")),
        (['fit', '--x', 'seen', '--y', 'loss'], 'required: --csv'),
        (['fit', '--csv', 'POINTS', *COLUMNS, '--holdout', '1'], '--holdout 1.0: must be'),
        (['fit', '--csv', 'POINTS', *COLUMNS, '--against', 'm5'], "unknown form 'm5'"),
        (['fit', '--csv', 'POINTS', *COLUMNS, '--by', 'modl'], "did you mean 'model'"),
        (['plot', '--csv', 'POINTS', *COLUMNS, '--output', 'a.txt'], '--out'),
        (['collect', 'nowhere'], "'nowhere'"),
    ],
)
def test_mistakes_are_one_line(points, argv, message):
    with pytest.raises(UserError) as caught:
        scaling.main([str(points) if word == 'POINTS' else word for word in argv])
    assert mentions(str(caught.value), message)
    assert '\n' not in str(caught.value)


def test_the_list_of_subcommands(capsys):
    for name in ('plan', 'collect', 'fit', 'plot', 'report'):
        assert f'  {name}' in run(capsys)


def test_collect_reads_a_real_run(smoke_run, capsys):
    (row,) = csv.DictReader(io.StringIO(run(capsys, 'collect', smoke_run)))
    result = json.loads((smoke_run / 'result.json').read_text())
    assert float(row['test/accuracy']) == result['test/accuracy']
    assert row['finished'] == '1'
    assert int(row['examples_seen']) == int(row['steps']) * int(row['batch_size'])
    assert float(row['chip_hours']) > 0
    assert cli.main(['inspect', '--workdir', str(smoke_run), '--json']) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert int(row['parameters']) == inspected['total']
    assert int(row['flops']) == int(row['examples_seen']) * inspected['flops']['train']
    assert int(row['data_size']) > 0


def test_flops_of_text_depend_on_its_buckets(repo):
    config = load.load(f'{repo}/experiments/translate/synthetic.py:smoke')
    config.model.vocab_size = 14
    model, _ = load.model_and_task(config)
    kinds = [[10.5, {'source': [8], 'target': [8]}], [2.0, {'source': [13], 'target': [13]}]]
    meta = {'config': config.to_dict(), 'sequences': kinds}
    forward = [flops.forward_flops(model, *np.zeros((2, 1, n), np.int32)) for n in (8, 13)]
    assert cost.train_flops(meta) == 3 * (10.5 * forward[0] + 2 * forward[1])
    assert cost.train_flops({'config': config.to_dict()}) is None


def test_report_writes_everything(tmp_path, capsys):
    for i, steps in enumerate(np.geomspace(100, 100_000, 12).astype(int)):
        folder = tmp_path / 'runs' / str(i)
        folder.mkdir(parents=True)
        config = {'batch_size': 10, 'model': {'name': 'vit'}, 'total': f'{steps} steps'}
        (folder / 'config.json').write_text(json.dumps(config))
        line = {'step': int(steps), 'test/accuracy': 0.8 - 5 * (10 * steps) ** -0.4}
        (folder / 'metrics.jsonl').write_text(json.dumps(line) + '\n')
        (folder / 'result.json').write_text('{}')
    out = tmp_path / 'out'
    output = run(capsys, 'report', tmp_path / 'runs', '--output', out, '--bootstrap', 3)
    assert '12 of 12 runs' in output
    formats = ('json', 'md', 'html', 'png', 'svg')
    names = {'runs.csv', *(f'scaling.{suffix}' for suffix in formats)}
    assert {path.name for path in out.iterdir()} == names
    written = json.loads((out / 'scaling.json').read_text())
    (curve,) = written['curves']
    assert len(written['manifest']) == 12 and 'scipy' in written['versions']
    html = (out / 'scaling.html').read_text()
    assert 'src="data:image/png;base64,iVBOR' in html and 'scaling.png' not in html
    assert curve['params']['c'] == pytest.approx(0.2, rel=0.05)
    assert curve['holdout_rmse'] < 0.02
    page = (out / 'scaling.md').read_text()
    assert page.startswith('# 1-test/accuracy over examples_seen\n\n12 runs;')
    assert '| all | ' in page
    assert 'bands of 90 % held' in page
    assert '| 2x | 4x | 8x |' in page and 'inner error' in page
    # An unfinished run has not cooled down: it is not a point of the curve.
    (tmp_path / 'runs' / '11' / 'result.json').unlink()
    argv = ['report', tmp_path / 'runs', '--output', out, '--bootstrap', 0, '--form', 'power']
    assert '11 of 12 runs' in run(capsys, *argv)
    page = (out / 'scaling.md').read_text()
    assert mentions(page, '11 runs', '1', 'finished')
    assert f'- {tmp_path / "runs" / "11"}: not finished' in page
    assert 'In brackets' not in page and 'coverage' not in page  # without a bootstrap
    assert '12 of 12 runs' in run(capsys, *argv, '--unfinished')
    for path in (tmp_path / 'runs').glob('*/result.json'):
        path.unlink()
    with pytest.raises(UserError, match=r'12.*finished'):
        scaling.main([str(word) for word in argv])


def test_a_report_leaves_out_runs_that_cannot_be_fitted(tmp_path, capsys):
    perfect, other = {'test/accuracy': 1.0}, {'val/bleu': 30.0}
    results = [{'test/accuracy': 0.8 - 5 / (10 * n) ** 0.4} for n in range(100, 1000, 100)]
    for i, result in enumerate([*results, perfect, other]):
        folder = tmp_path / 'runs' / str(i)
        folder.mkdir(parents=True)
        (folder / 'config.json').write_text('{"batch_size": 10, "model": {"name": "vit"}}')
        line = {'step': 100 * (i + 1), **result}
        (folder / 'metrics.jsonl').write_text(json.dumps(line) + '\n')
        (folder / 'result.json').write_text('{}')
    argv = ['report', tmp_path / 'runs', '--bootstrap', 0, '--output', tmp_path / 'out']
    output = run(capsys, *argv)
    assert mentions(output, tmp_path, '/runs/9', '1-test/accuracy', '0')
    assert f'left out: {tmp_path}/runs/10: has no test/accuracy' in output
    assert '9 of 11 runs' in output
    page = (tmp_path / 'out' / 'scaling.md').read_text()
    assert '\n\n9 runs; 1 curve ' in page and 'runs/10: has no test/accuracy' in page
    (tmp_path / 'runs' / '0' / 'metrics.jsonl').write_text('{"step": 1, "val/loss": 0}\n')
    with pytest.raises(UserError, match=r'11.*fitted'):
        scaling.main([*map(str, argv), '--y', 'val/loss', '--x', 'val/loss'])


def test_runs_of_equal_length_have_no_curve(tmp_path, capsys):
    for i, width in enumerate((16, 32, 64)):
        folder = tmp_path / 'runs' / str(i)
        folder.mkdir(parents=True)
        config = {'batch_size': 10, 'model': {'name': 'vit', 'width': width}}
        (folder / 'config.json').write_text(json.dumps(config))
        (folder / 'metrics.jsonl').write_text(f'{{"step": 100, "test/accuracy": 0.{5 + i}}}\n')
        (folder / 'result.json').write_text('{}')
    argv = ['scaling', 'report', tmp_path / 'runs', '--output', tmp_path / 'out']
    assert cli.main([str(word) for word in argv]) == 2
    assert says(capsys.readouterr().err, '--x', 'examples_seen=1000', 'config.model.width')
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['runs.csv']
    argv += ['--x', 'config.model.width', '--holdout', '0', '--bootstrap', '0']
    assert cli.main([str(word) for word in argv]) == 0


def test_a_fit_takes_one_thread(points, capsys, monkeypatch):
    threads = []

    def fit(*args, **options):
        threads.extend(pool['num_threads'] for pool in threadpool_info() if is_blas(pool))
        raise UserError('enough')

    def is_blas(pool):
        return pool['user_api'] == 'blas'

    monkeypatch.setattr('vit_jax.scaling.curve_fit.fit', fit)
    with threadpool_limits(2, user_api='blas'), pytest.raises(UserError, match='no curve'):
        scaling.main(['fit', '--csv', str(points), *COLUMNS])
    assert set(threads) == {1}


def test_few_points_are_drawn_even_if_no_curve_goes_through_them(tmp_path, capsys):
    csv_file = tmp_path / 'few.csv'
    csv_file.write_text('model,x,loss\na,10,0.5\na,20,0.4\n')
    argv = ['--csv', str(csv_file), '--x', 'x', '--y', 'loss', '--by', 'model']
    run(capsys, 'plot', *argv, '--output', tmp_path / 'few.png')
    with pytest.raises(UserError, match=r'curve.*fitted'):
        scaling.main(['fit', *argv])
