"""Services get each number of a run once, however often the run is stopped."""

import collections
import io
import json
import os
import re
import sys
import urllib.error
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from helpers.messages import mentions
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from vit_jax.config.load import load
from vit_jax.config.origin import require_allowed
from vit_jax.errors import UserError
from vit_jax.storage import servers
from vit_jax.storage.run_folder import read_metrics
from vit_jax.trainer import services
from vit_jax.trainer.writer import Writer
from vit_jax.writers import base, mlflow

STARTS = ((0, (1, 2, 3, 4)), (2, (3,)), (2, (3, 4, 5, 6)))  # the second is killed early
CONFIG = {'seed': 0, 'model': {'name': 'vit', 'width': 64}}


def train(folder, *names):
    """Three starts, of which the first two are killed."""
    folder.mkdir()
    for start, steps in STARTS:
        writer = Writer(folder, 6, start, 'images', CONFIG, writers=names)
        for step in steps:
            writer.write(step, {'train/loss': step / 2, 'test/signature': 'nrefs:1'})
        if steps[-1] == 6:
            writer.close()
        else:
            writer.bar.stop()
    assert [line['step'] for line in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def fake_wandb(monkeypatch):
    """Records what W&B is told."""
    told = SimpleNamespace(inits=[], logs=[], finished=0)
    told.log = lambda values, step: told.logs.append((step, values))

    def init(**keywords):
        told.inits.append(keywords)
        return SimpleNamespace(
            log=lambda values, step: told.log(values, step),
            finish=lambda: setattr(told, 'finished', told.finished + 1),
        )

    module = ModuleType('wandb')
    module.init, module.Settings, module.Image = init, dict, np.asarray
    module.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, 'wandb', module)
    monkeypatch.setattr('vit_jax.storage.servers.require_web_server', lambda *_: None)
    return told


@pytest.fixture
def fake_trackio(monkeypatch):
    """Records what Trackio is told."""
    told = SimpleNamespace(inits=[], logs=[], finished=0)

    def init(**keywords):
        told.inits.append(keywords)
        return SimpleNamespace(log=lambda values, step: told.logs.append((step, values)))

    module = ModuleType('trackio')
    module.init, module.Image = init, np.asarray
    module.Table = lambda columns, data: (columns, data)
    module.finish = lambda: setattr(told, 'finished', told.finished + 1)
    monkeypatch.setitem(sys.modules, 'trackio', module)
    return told


@pytest.fixture
def fake_mlflow(monkeypatch):
    """Records what MLflow is told."""
    told = SimpleNamespace(created=[], params={}, metrics=[], states=[], files={}, error=None)

    class Client:
        def get_experiment_by_name(self, name):
            if told.error:
                raise told.error

        def create_experiment(self, name):
            return name

        def create_run(self, experiment, run_name):
            told.created.append((experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id=f'run{len(told.created)}'))

        def log_batch(self, run, metrics=(), params=()):
            if told.error:
                raise told.error
            assert len(params) <= 100
            told.params.update(params)
            told.metrics += [(run, key, step, value) for key, value, _, step in metrics]

        def log_image(self, run, image, artifact_file):
            told.files[artifact_file] = image

        def log_text(self, run, text, artifact_file):
            told.files[artifact_file] = text

        def update_run(self, run, status):
            told.states.append((run, status))

        def set_terminated(self, run):
            told.states.append((run, 'FINISHED'))

    module = ModuleType('mlflow')
    module.MlflowClient, module.get_tracking_uri = Client, lambda: ''
    module.entities = SimpleNamespace(
        Param=lambda key, value: (key, value),
        Metric=collections.namedtuple('Metric', 'key value timestamp step'),
    )
    monkeypatch.setitem(sys.modules, 'mlflow', module)
    return told


def test_wandb_is_told_every_step_once_in_one_run(tmp_path, fake_wandb):
    train(tmp_path / 'run', 'tensorboard', 'wandb')
    assert fake_wandb.logs == [(step, {'train/loss': step / 2}) for step in range(1, 7)]
    assert len({init['id'] for init in fake_wandb.inits}) == 1
    assert {init['name'] for init in fake_wandb.inits} == {'run'}
    assert fake_wandb.inits[0]['config']['model'] == CONFIG['model']
    assert fake_wandb.finished == 1


def test_trackio_is_told_every_step_once_in_one_run(tmp_path, fake_trackio):
    train(tmp_path / 'run', 'tensorboard', 'trackio')
    assert fake_trackio.logs == [(step, {'train/loss': step / 2}) for step in range(1, 7)]
    (name,) = {init['name'] for init in fake_trackio.inits}
    assert name.startswith('run-') and fake_trackio.finished == 1
    assert fake_trackio.inits[0]['config']['model'] == CONFIG['model']
    assert {init['resume'] for init in fake_trackio.inits} == {'allow'}


def test_mlflow_is_told_every_step_once_in_one_run(tmp_path, fake_mlflow):
    train(tmp_path / 'run', 'mlflow')
    assert fake_mlflow.metrics == [('run1', 'train/loss', s, s / 2) for s in range(1, 7)]
    assert fake_mlflow.created == [('vit_jax', 'run')]
    assert fake_mlflow.params.items() >= {'seed': '0', 'model.width': '64'}.items()
    assert fake_mlflow.states == [('run1', 'RUNNING')] * 3 + [('run1', 'FINISHED')]


ROWS = [{'source': 'a | b', 'prediction': 'c\nd'}]


def show(folder, *names):
    """Two starts, of which the first is killed after step 4, and resumed after step 2."""
    picture = Figure(figsize=(0.3, 0.2), facecolor='red')
    for start, steps in ((0, (2, 4)), (2, (4, 6))):
        writer = Writer(folder, 6, start, 'images', CONFIG, writers=names)
        for step in steps:
            writer.write(step, {'test/loss': step / 2})
            writer.show(step, 'test/examples', picture)
            writer.show(step, 'test/texts', ROWS)
        assert not writer.trouble
        assert {service.name for service in writer.services} == set(names)
        writer.bar.stop()


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_services_get_each_picture_and_table_once(tmp_path, fake_wandb, fake_trackio, name):
    show(tmp_path, name)
    told = {'wandb': fake_wandb, 'trackio': fake_trackio}[name]
    logs = [(step, *values.items()) for step, values in told.logs]
    pictures, tables = (
        [(step, value) for step, (name, value) in logs if name == f'test/{kind}']
        for kind in ('examples', 'texts')
    )
    assert [step for step, _ in pictures] == [step for step, _ in tables] == [2, 4, 6]
    assert pictures[0][1].shape == (20, 30, 3)
    assert tables[0][1] == (['source', 'prediction'], [['a | b', 'c\nd']])


def test_mlflow_keeps_pictures_and_tables_as_files(tmp_path, fake_mlflow):
    show(tmp_path, 'mlflow')
    kinds = {'test/examples/{}.png', 'test/texts/{}.md'}
    assert fake_mlflow.files.keys() == {kind.format(s) for kind in kinds for s in (2, 4, 6)}
    table = '| source | prediction |\n| --- | --- |\n| a \\| b | c d |'
    assert fake_mlflow.files['test/texts/4.md'] == table


def test_tensorboard_shows_what_the_last_start_has_written(tmp_path):
    show(tmp_path, 'tensorboard')
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = [events.Tensors(f'test/{name}') for name in ('loss', 'examples', 'texts')]
    assert [[each.step for each in some] for some in shown] == [[2, 4, 6]] * 3
    *size, png = shown[1][0].tensor_proto.string_val
    assert size == [b'30', b'20'], 'width and height'
    picture = np.asarray(Image.open(io.BytesIO(png)))
    np.testing.assert_array_equal(picture, np.full((20, 30, 3), 255))


@pytest.mark.parametrize('name', ['tensorboard', 'wandb', 'mlflow'])
def test_names_that_are_not_utf8_drop_no_writer(tmp_path, fake_wandb, fake_mlflow, capsys, name):
    """As those of classes of folders in Latin-1."""
    writer = Writer(tmp_path, 6, 0, 'images', CONFIG, writers=(name,))
    writer.write(1, {'test/IoU_caf\udce9': 0.5})
    writer.show(1, 'caf\udce9/texts', [{'source': 'caf\udce9'}])
    writer.close()
    assert 'left out' not in capsys.readouterr().out
    given = [*(values for _, values in fake_wandb.logs), fake_mlflow.metrics, fake_mlflow.files]
    str(given).encode()


def test_a_writer_need_not_show_anything(tmp_path, fake_wandb):
    told = []

    class Told(base.Writer):
        def __init__(self, run):
            self.start = run.start_step

        def scalars(self, step, values):
            told.append((step, values))

    writer = Writer(tmp_path, 6, 0, 'images', writers=('wandb',))
    writer.services[0].writer = Told(base.begin(tmp_path, tmp_path, 0, {}, []))
    writer.show(1, 'test/examples', Figure())
    writer.show(1, 'test/texts', ROWS)
    writer.write(1, {'a': 1.0})
    writer.close()
    assert told == [(1, {'a': 1.0})]


def test_what_is_no_writer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr('vit_jax.writers.wandb.Writer', SimpleNamespace)
    with pytest.raises(UserError, match=r'Writer.*vit_jax.writers.base'):
        Writer(tmp_path, 6, 0, 'images', writers=('wandb',))


def test_a_run_that_starts_anew_is_another_one_there(tmp_path, fake_wandb):
    for _ in range(2):
        Writer(tmp_path, 6, 0, 'images', writers=('wandb',)).close()
    first, second = (init['id'] for init in fake_wandb.inits)
    assert first != second


def test_a_damaged_note_of_what_was_told_counts_as_none(tmp_path):
    for text in ('[1]', '{"told": 3}', '{'):
        (tmp_path / 'writers.json').write_text(text)
        assert base.begin(tmp_path, tmp_path, 3, {}, [{'step': 2, 'a': 1.0}]).written == {'a': 2}


def test_a_service_that_fails_is_left_out_and_the_run_goes_on(tmp_path, fake_wandb, capsys):
    writer = Writer(tmp_path, 6, 0, 'images', writers=('wandb', 'tensorboard'))
    writer.write(1, {'a': 1.0})
    fake_wandb.log = lambda values, step: 1 / 0
    writer.write(2, {'a': 2.0})
    writer.write(3, {'a': 3.0})
    writer.close()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if 'ZeroDivisionError' in x]
    assert "'wandb'" in line
    assert not writer.trouble
    assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2, 3]


class Busy(Exception):
    """An answer of MLflow's server."""

    error_code = 'TEMPORARILY_UNAVAILABLE'


@pytest.mark.fault(140)
@pytest.mark.parametrize('error', [ConnectionRefusedError('no'), Busy(), OSError('requests')])
@pytest.mark.parametrize('silent_from', [0, 3])
def test_a_service_that_does_not_answer_gets_what_it_missed(
    tmp_path, fake_mlflow, monkeypatch, capsys, error, silent_from
):
    monkeypatch.setattr(services, 'FIRST_PAUSE', 0.0)
    fake_mlflow.error = None if silent_from else error
    writer = Writer(tmp_path, 6, 0, 'images', CONFIG, writers=('mlflow',))
    for step in range(1, 7):
        fake_mlflow.error = error if silent_from <= step < 5 else None
        writer.write(step, {'a': float(step)})
    writer.close()
    assert fake_mlflow.metrics == [('run1', 'a', step, float(step)) for step in range(1, 7)]
    said = capsys.readouterr().out
    assert len(re.findall("'mlflow'.* not answer", said)) == 1
    assert len(re.findall("'mlflow' answers", said)) == 1
    assert not writer.trouble


@pytest.mark.fault(140)
def test_a_service_that_stays_away_is_told_at_the_end(tmp_path, fake_mlflow, capsys):
    fake_mlflow.error = ConnectionRefusedError('no')
    writer = Writer(tmp_path, 6, 0, 'images', CONFIG, writers=('mlflow',))
    for step in (1, 2):
        writer.write(step, {'a': 1.0})
    writer.close()
    assert mentions(capsys.readouterr().out, '2 lines', 'metrics')
    assert [line['step'] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.fault(140)
@pytest.mark.parametrize('error', [ValueError('a'), FileNotFoundError(2, 'b'), OSError(28, 'c')])
def test_another_mistake_at_the_start_of_a_writer_is_no_silence(tmp_path, fake_mlflow, error):
    fake_mlflow.error = error
    with pytest.raises((UserError, OSError)):
        Writer(tmp_path, 6, 0, 'images', CONFIG, writers=('mlflow',))


@pytest.mark.parametrize('status', [401, 403, 404, 429, 500, 503])
def test_answers_of_web_servers_that_may_pass(status):
    error = urllib.error.HTTPError('http://a', status, '', None, None)
    assert servers.is_network_error(error) == (status in (429, 500, 503))
    outer = ValueError()
    outer.__context__ = error
    assert servers.is_network_error(outer) == (status in (429, 500, 503))


@pytest.mark.parametrize(
    ('name', 'escaped'),
    [
        ('val/IoU_traffic sign (back)', 'val/IoU_traffic sign _28_back_29_'),
        ('val/IoU_käse: 日本', 'val/IoU_käse: 日本'),
        ('a//b/../c', 'a/_/b/__/c'),
        ('a&b"%+?', 'a_26_b_22__25__2b__3f_'),
    ],
)
def test_mlflow_gets_names_that_it_accepts(name, escaped):
    assert mlflow.escape(name) == escaped
    long = mlflow.escape(f'{name}{"x" * 300}')
    assert len(long) == 250 and long != mlflow.escape(f'{name}{"x" * 301}')


@pytest.mark.parametrize('name', ['wandb', 'mlflow'])
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install -e '.\[{name}\]'"):
        Writer(tmp_path, 6, 0, 'images', writers=(name,))


def test_a_service_that_does_not_start_is_one_line(tmp_path, fake_wandb, monkeypatch):
    monkeypatch.setattr('wandb.init', lambda **keywords: 1 / 0, raising=True)
    with pytest.raises(UserError, match=r"'wandb'.*ZeroDivision"):
        Writer(tmp_path, 6, 0, 'images', writers=('wandb',))


def test_names_are_checked_with_the_config(repo):
    smoke = f'{repo}/experiments/vit/digits.py:smoke'
    with pytest.raises(UserError, match=r"unknown writer name 'wandbb'; .* 'wandb'"):
        load(smoke, ['writers=["wandbb"]'])
    with pytest.raises(UserError, match='expected tuple'):
        load(smoke, ['writers=wandb'])
    assert load(smoke, ['writers=["tensorboard", "wandb"]']).writers == ('tensorboard', 'wandb')


def test_a_stored_config_may_name_no_code_of_others():
    with pytest.raises(UserError, match=r"config.writers .* 'my_lab.w'.*--allow my_lab"):
        require_allowed({'writers': ['tensorboard', 'my_lab.w']}, [], 'X')
    require_allowed({'writers': ['my_lab.w']}, ['my_lab'], 'X')


# --- the packages themselves, where they are installed ---


def test_wandb_itself_offline(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    train(tmp_path / 'run', 'wandb')
    kept = [p for p in tmp_path.glob('run/wandb/offline-run-*/*.wandb') if p.stat().st_size]
    (name,) = json.loads((tmp_path / 'run/writers.json').read_text())['ids'].values()
    # Starts of one process are one run of W&B to its own client, whose folder has its name.
    assert kept
    assert all(name in path.name for path in kept)


def test_wandb_itself_keeps_pictures_and_tables(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    show(tmp_path, 'wandb')
    media = [path.name for path in tmp_path.glob('wandb/*/files/media/**/*') if path.is_file()]
    for name in ('examples', 'texts'):
        assert {2, 4, 6} == {int(m.split('_')[1]) for m in media if m.startswith(f'{name}_')}


def test_mlflow_itself_keeps_pictures_and_tables(tmp_path, monkeypatch):
    package = pytest.importorskip('mlflow')
    monkeypatch.setenv('MLFLOW_TRACKING_URI', os.fspath(tmp_path / 'store'))
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    show(tmp_path, 'mlflow')
    client = package.MlflowClient()
    (name,) = json.loads((tmp_path / 'writers.json').read_text())['ids'].values()
    kept = {name: [f.path for f in client.list_artifacts(name, 'test/examples')]}
    assert sorted(kept[name]) == [f'test/examples/{step}.png' for step in (2, 4, 6)]


def test_mlflow_itself_takes_any_name(tmp_path, monkeypatch):
    client = pytest.importorskip('mlflow').MlflowClient
    monkeypatch.setenv('MLFLOW_TRACKING_URI', os.fspath(tmp_path / 'store'))
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    config = {'evals': {'my eval (1)': {'source': ''}}}
    writer = Writer(tmp_path, 6, 0, 'images', config, writers=('mlflow',))
    for name in ('person (a), b', 'c++', 'n&m', '日本', 'x' * 300):
        writer.write(1, {f'val/IoU_{name}': 0.5, 'val/nan': float('nan')})
    assert not any(service.failed for service in writer.services) and writer.services
    writer.close()
    (run,) = json.loads((tmp_path / 'writers.json').read_text())['ids'].values()
    assert len(client().get_run(run).data.metrics) == 6


def test_mlflow_itself(tmp_path, monkeypatch):
    package = pytest.importorskip('mlflow')
    monkeypatch.setenv('MLFLOW_TRACKING_URI', os.fspath(tmp_path / 'store'))
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    train(tmp_path / 'run', 'mlflow')
    client = package.MlflowClient()
    (name,) = json.loads((tmp_path / 'run/writers.json').read_text())['ids'].values()
    history = client.get_metric_history(name, 'train/loss')
    assert [(m.step, m.value) for m in history] == [(step, step / 2) for step in range(1, 7)]
    assert client.get_run(name).data.params['model.width'] == '64'
    assert client.get_run(name).info.status == 'FINISHED'
