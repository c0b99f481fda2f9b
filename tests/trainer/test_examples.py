"""Writers get examples with what the model makes of them; the run stays as it would have been."""

import dataclasses
import functools
import io
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_jax.checkpoints.checkpointer import load_variables
from vit_jax.config import load
from vit_jax.config.run import Parallel
from vit_jax.models import vit
from vit_jax.nn.maps import AttentionMap
from vit_jax.ops.search import PAD
from vit_jax.runtime import processes, sharding
from vit_jax.tasks import classify
from vit_jax.trainer import examples, train
from vit_jax.trainer.evaluations import Evaluation, open_evals
from vit_jax.trainer.loop import due_examples
from vit_jax.trainer.program import compile_steps
from vit_jax.trainer.writer import Writer

DIGITS = 'experiments/vit/digits.py:smoke'
MODEL = vit.Model(
    num_classes=10, patch_size=4, width=16, depth=1, mlp_dim=16, num_heads=2, pool='gap'
)
LAYOUTS = {
    'one': {},
    'fsdp': {'fsdp': 4, 'min_split_size': 64},
    'pmap': {'strategy': 'pmap'},
}
TEXT = {'source': 'synthetic:reverse', 'split': 'train[:40]', 'buckets': (4, 8)}

pytestmark = pytest.mark.usefixtures('drawn_examples')


@pytest.fixture(autouse=True)
def in_repo(repo, monkeypatch):
    monkeypatch.chdir(repo)


def events(folder):
    kept = {'images': 0, 'tensors': 0}
    return EventAccumulator(str(folder), size_guidance=kept).Reload()


def opened(section, layout, predict=None, task='classify', look=None):
    """The examples of an evaluation, and its steps, both of which may be replaced."""
    config = {'batch_size': 8, 'data': {'source': '', 'split': ''}, 'model': {'name': 'toy'}}
    config |= {'task': {'name': task}, 'evals': {'test': section}}
    required = {'total': 1, 'optim': {'name': 'sgd', 'lr': 0.1}}
    run = load.to_run(ConfigDict(config | required))
    steps = compile_steps(MODEL, classify.Task(), layout)
    steps = dataclasses.replace(steps, predict=predict, attention_step=look) if predict else steps
    return examples.make_examples(run, open_evals(run, layout, steps), steps), steps


def one_device():
    return sharding.make_layout(jax.devices()[:1])


@pytest.mark.slow
@pytest.mark.usefixtures('compiled_once')
def test_a_stopped_run_shows_what_an_uninterrupted_one_does(tmp_path, smoke_run):
    config = load.load(DIGITS, ['every.examples=10%'])
    options = {'devices': jax.devices()[:1]}
    with pytest.raises(train.Preempted):
        train.train(config, tmp_path, stop_at=15, **options)
    result = train.train(config, tmp_path, **options)
    shown = events(tmp_path).Images('test/examples')
    assert [each.step for each in shown] == [10, 20]
    for each in shown:
        picture = np.asarray(Image.open(io.BytesIO(each.encoded_image_string)))
        assert picture.shape == (each.height, each.width, 3)
        assert each.width > 4 * 200, 'four digits beside one another'
        assert len(np.unique(picture)) > 50
    looks = events(tmp_path).Images('test/attention')
    assert [each.step for each in looks] == [10, 20]
    assert len({each.encoded_image_string for each in looks}) == 2, 'it looks elsewhere by now'
    # Those of the session's run show no examples.
    assert result == json.loads((smoke_run / 'result.json').read_text())
    ours, theirs = (load_variables(run / 'checkpoints', None)[1] for run in (tmp_path, smoke_run))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('one', marks=pytest.mark.long), 'fsdp', 'pmap'])
def test_examples_are_predicted_under_every_layout(name, monkeypatch):
    layout = sharding.make_layout(
        jax.devices()[: 1 if name == 'one' else 8], Parallel(**LAYOUTS[name])
    )
    found, steps = opened({'source': 'digits', 'split': 'test[:61]', 'transforms': ''}, layout)
    drawn = []
    monkeypatch.setattr(
        'vit_jax.viz.classify.Viz.draw',
        lambda self, rows, photos, context: drawn.append((rows, photos)) or Figure(),
    )
    looked = []
    monkeypatch.setattr(
        'vit_jax.viz.attention_pictures.draw_on_photo',
        lambda photo, outputs, maps, *_: looked.append((photo, outputs, maps)) or (Figure(), ''),
    )
    inputs = jnp.zeros((1, 8, 8, 1))
    variables = jax.jit(MODEL.init, static_argnames='train')(jax.random.key(0), inputs, train=False)
    variables = jax.device_get(variables)
    placed = layout.from_global(jax.device_put(variables, layout.shardings(variables)))
    sent = []
    writer = SimpleNamespace(enabled=True, show=lambda *told: sent.append(told), say=pytest.fail)
    found.show(steps, placed, 7, writer)
    assert [told[:2] for told in sent] == [(7, 'test/examples'), (7, 'test/attention')]
    ((rows, photos),) = drawn
    source = found.sample.data.source
    shown = {i: source[i] for i in (0, 15, 30, 45)}
    assert [p.path.name for p in photos] == [
        f'{r["label"]} (example {i})' for i, r in shown.items()
    ]
    images = jnp.stack([record['image'] for record in shown.values()])
    inputs = classify.Task().inputs({'image': images})
    apply = jax.jit(functools.partial(MODEL.apply, mutable='intermediates'))
    outputs, kept = apply(variables, *inputs)
    probs = jax.nn.softmax(outputs['logits'])
    np.testing.assert_allclose([r['probs'] for r in rows], probs, rtol=1e-4)
    ((photo, alone, maps),) = looked
    assert photo is photos[0]
    np.testing.assert_allclose(alone['logits'], outputs['logits'][:1], rtol=1e-4, atol=1e-5)
    (whole,) = MODEL.attention_maps(kept['intermediates'], *inputs)
    (own,) = maps
    assert own[0::2] == whole[0::2]
    np.testing.assert_allclose(own.weights, whole.weights[:1], rtol=1e-4)


def test_texts_are_rows_of_both_sides_and_the_prediction(tmp_path):
    """The prediction here is the source, which the toy of a model repeats."""

    def predict(variables, batch):
        return {'tokens': batch['source']}, batch

    def look(variables, batch):
        (queries,), (keys,) = batch['target'].shape[1:], batch['source'].shape[1:]
        lengths.append((queries, keys))
        weights = np.full((1, 1, queries, keys), 1 / keys)
        return {}, [AttentionMap('decoder/cross', weights, (queries,), (keys,))]

    lengths = []
    found, steps = opened(TEXT, one_device(), predict, 'translate', look)
    writer = Writer(tmp_path, 10, 0, 'tokens')
    found.show(steps, {}, 5, writer)
    writer.close()
    (shown,) = events(tmp_path).Tensors('test/examples')
    head, _, *lines = shown.tensor_proto.string_val[0].decode().splitlines()
    assert (shown.step, head, len(lines)) == (5, '| source | target | prediction |', 4)
    data, decode = found.sample.data, found.sample.context.vocab.decode
    for line, index in zip(lines, found.sample.examples, strict=True):
        source, target, prediction = (cell.strip() for cell in line.strip('| ').split(' | '))
        assert source == prediction == decode(data.source[index]['source'])
        assert target == decode(data.source[index]['target'])
        assert PAD not in data.source[index]['target']
    pair = data.source[next(iter(found.sample.examples))]
    assert lengths == [(len(pair['target']), len(pair['source']))]
    (picture,) = events(tmp_path).Images('test/attention')
    assert picture.step == 5


def test_boxes_are_drawn_on_images_with_annotations():
    def predict(variables, batch):
        rows = len(batch['mask'])
        boxes = np.tile([0.1, 0.1, 0.4, 0.5], (rows, 1, 1))
        found = {
            'boxes': boxes,
            'scores': np.full((rows, 1), 0.9),
            'labels': np.ones((rows, 1), int),
        }
        return found, batch

    scenes = load.load('experiments/detr/scenes.py:smoke').evals.ap.to_dict()
    found, steps = opened(scenes | {'evaluator': None}, one_device(), predict, 'detect')
    sent = []
    writer = SimpleNamespace(enabled=True, show=lambda *told: sent.append(told), say=pytest.fail)
    found.show(steps, {}, 5, writer)
    ((_, _, figure),) = sent
    assert len(figure.axes) == 4
    assert all(axes.patches for axes in figure.axes)


@pytest.mark.parametrize('what', ['draw', 'predict', 'look'])
def test_what_fails_is_a_line_and_no_end(what, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise ValueError('no\nway')

    def predict(variables, batch):
        return {'probs': np.full((len(batch['mask']), 10), 0.1)}, batch

    digits = {'source': 'digits', 'split': 'test', 'transforms': ''}
    steps = fail if what == 'predict' else predict, 'classify', fail if what == 'look' else None
    found, steps = opened(digits, one_device(), *steps)
    if what == 'draw':
        monkeypatch.setattr('vit_jax.viz.classify.Viz.draw', fail)
    writer = Writer(tmp_path, 10, 0, 'images')
    found.show(steps, {}, 5, writer)
    writer.close()
    lost, kept = ('attention is', ['test/examples']) if what == 'look' else ('examples are', [])
    assert f'test: no {lost} shown: ValueError: no way\n' in capsys.readouterr().out
    assert events(tmp_path).Tags()['images'] == kept
    assert not writer.trouble


def test_no_process_predicts_what_another_cannot_read(monkeypatch):
    digits = {'source': 'digits', 'split': 'test', 'transforms': ''}
    found, steps = opened(digits, one_device(), lambda *args: pytest.fail('predicted'))
    monkeypatch.setattr(processes, 'gather', lambda mine: [mine, 'OSError: gone'][1:])
    said = []
    found.show(steps, {}, 5, SimpleNamespace(enabled=True, say=said.append))
    assert says(said, 'test', 'no examples', 'OSError: gone')


def test_who_shows_nothing_gets_nothing():
    run = load.to_run(load.load(DIGITS))
    silent = dataclasses.replace(run, writers=())
    steps = SimpleNamespace(predict=lambda *args: None)
    known = {'test': Evaluation(SimpleNamespace())}
    assert examples.make_examples(silent, known, steps) is None
    of_others = {'few': Evaluation(SimpleNamespace(), SimpleNamespace(learns=True))}
    assert examples.make_examples(run, of_others, steps) is None, 'their names are of other classes'


@pytest.mark.parametrize(
    ('every', 'evals', 'steps'),
    [
        (25, 10, [30, 50, 80, 100]),
        (1, 40, [40, 80, 100]),
        (50, 30, [60, 100]),
        (30, 0, [100]),
        (0, 10, []),
    ],
)
def test_with_the_first_results_after_so_long_and_the_last(every, evals, steps):
    timetable = SimpleNamespace(examples=every, evals={'test': evals}, total=100)
    run = SimpleNamespace(timetable=timetable, examples=SimpleNamespace(entry='test'))
    at = [step for step in range(1, 101) if step == 100 or (evals and step % evals == 0)]
    assert [s for s in at if due_examples(run, s, ['test'], s == 100)] == steps
    assert not due_examples(run, 100, ['val'], True)
