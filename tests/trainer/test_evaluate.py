"""Evaluators in a run: what they are given, under every layout, and what a config says of them."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions
from ml_collections import ConfigDict

from vit_jax.__main__ import main
from vit_jax.config import load, objects
from vit_jax.config.run import Parallel, Task
from vit_jax.data import sources
from vit_jax.errors import UserError
from vit_jax.evaluators import coco_ap, panoptic_quality
from vit_jax.models import vit
from vit_jax.runtime import sharding
from vit_jax.tasks import base, classify
from vit_jax.trainer import build, evaluate, measure, train
from vit_jax.trainer.evaluations import open_evals
from vit_jax.trainer.program import compile_steps

DIGITS = 'experiments/vit/digits.py'
MODEL = vit.Model(
    num_classes=10, patch_size=4, width=16, depth=1, mlp_dim=16, num_heads=2, pool='gap'
)
TASK = classify.Task()
LAYOUTS = {
    'one': {},
    'jit': {},
    'fsdp': {'fsdp': 4, 'min_split_size': 64},
    'pmap': {'strategy': 'pmap'},
}
DATA = {'source': 'digits', 'split': 'test[:61]', 'batch_size': 24}
FIT = 'train[:30 per class]'
ENTRIES = {
    'few': {'evaluator': 'fewshot', 'shots': (1, 5, 25), 'seeds': 2},
    'knn': {'evaluator': 'knn'},
    'probe': {'evaluator': 'linear_probe', 'c': (0.01, 1.0)},
}
RECORDER = """
from vit_jax.evaluators import base


class Evaluator(base.Evaluator):
    learns = True
    made = []

    def __init__(self, weight=1.0):
        self.weight = weight
        self.made.append(self)

    def start(self):
        self.fitted, self.seen = [], []

    def fit(self, predictions, batch):
        self.fitted.append((predictions, batch))

    def update(self, predictions, batch):
        self.seen.append((predictions, batch))

    def result(self):
        return {'examples': self.weight * sum(len(batch['label']) for _, batch in self.seen)}
"""


@pytest.fixture(autouse=True)
def in_repo(repo, monkeypatch):
    monkeypatch.chdir(repo)


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """The class of a user's own evaluator, `my_lab.recorder`."""
    (tmp_path / 'my_lab').mkdir()
    (tmp_path / 'my_lab' / 'recorder.py').write_text(RECORDER)
    monkeypatch.syspath_prepend(tmp_path)
    yield objects.evaluator_class('my_lab.recorder')
    for name in ('my_lab.recorder', 'my_lab'):
        sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def variables():
    example = {'image': jnp.zeros((1, 8, 8, 1))}
    return jax.jit(MODEL.init)(jax.random.key(0), *TASK.inputs(example))


@jax.jit
def outputs_of(variables, images):
    return MODEL.apply(variables, *TASK.inputs({'image': images}), train=False)


def make_layout(name):
    return sharding.make_layout(
        jax.devices()[: 1 if name == 'one' else 8], Parallel(**LAYOUTS[name])
    )


def settings(evals, task='classify'):
    """The typed config of evaluations."""
    named = {'model': {'name': 'vit'}, 'task': {'name': task}}
    groups = {'batch_size': 32, 'data': {'source': '', 'split': ''}, 'evals': evals}
    return load.to_inference(ConfigDict(groups | named))


def run(entries, layout, variables, **data):
    """What `config.evals` with these entries gives, {name/metric: value}."""
    evals = {name: {**DATA, 'fit': FIT, **entry, **data} for name, entry in entries.items()}
    steps = compile_steps(MODEL, TASK, layout)
    opened = open_evals(settings(evals), layout, steps)
    placed = layout.from_global(jax.device_put(variables, layout.shardings(variables)))
    return evaluate.run(steps, opened, placed)


def joined(batches, key):
    return np.concatenate([batch[key] for batch in batches])


@pytest.mark.slow
@pytest.mark.parametrize(
    'layout',
    [pytest.param(x, marks=[pytest.mark.long] * (x in ('jit', 'fsdp'))) for x in LAYOUTS],
)
def test_an_evaluator_sees_every_example_once_in_order_without_padding(layout, recorder, variables):
    """61 examples in batches of 24, and 100 in those."""
    entry = {'evaluator': 'my_lab.recorder', 'weight': 2.0, 'fit': 'train[:100]'}
    assert run({'mine': entry}, make_layout(layout), variables) == {'mine/examples': 122.0}
    used = recorder.made[-1]
    for split, seen in (('train[:100]', used.fitted), ('test[:61]', used.seen)):
        predictions, batches = zip(*seen, strict=True)
        source = sources.open_source('digits', split)
        np.testing.assert_array_equal(joined(batches, 'label'), source.labels())
        assert {len(b['label']) for b in batches} == {24, len(source) % 24}
        assert all((b['mask'] == 1).all() and 'image' not in b for b in batches)
        images = np.stack([source[i]['image'] for i in range(len(source))])
        outputs = outputs_of(variables, images)
        features, probs = joined(predictions, 'features'), joined(predictions, 'probs')
        np.testing.assert_allclose(features, outputs['pre_logits'], atol=1e-5)
        np.testing.assert_allclose(probs, jax.nn.softmax(outputs['logits']), atol=1e-6)


@pytest.fixture(scope='module')
def expected(variables):
    return run(ENTRIES, make_layout('one'), variables)


@pytest.mark.slow
@pytest.mark.parametrize('layout', [pytest.param('jit', marks=pytest.mark.long), 'pmap'])
def test_results_do_not_depend_on_the_layout(layout, variables, expected):
    results = run(ENTRIES, make_layout(layout), variables)
    # Features agree up to rounding, which may turn one answer in 61.
    assert results == pytest.approx(expected, abs=1 / 61 + 1e-9)


def test_digits_are_told_apart_by_features_that_have_learned_nothing(expected):
    shots = ['few/1_shot', 'few/5_shot', 'few/25_shot']
    assert list(expected)[:4] == [*shots, 'knn/knn_accuracy']
    assert 0.2 < expected['few/1_shot'] < expected['few/25_shot']
    assert min(expected['knn/knn_accuracy'], expected['probe/linear_probe_accuracy']) > 0.5


def test_evaluators_of_the_same_data_share_its_passes(recorder, variables):
    """Two learn from the same examples, the third from others; all are told the same."""
    layout = make_layout('one')
    entry = {**DATA, 'evaluator': 'my_lab.recorder'}
    fits = {'a': FIT, 'b': FIT, 'c': 'train[:10]'}
    evals = {name: {**entry, 'fit': fit} for name, fit in fits.items()}
    steps, calls = compile_steps(MODEL, TASK, layout), []
    counted = dataclasses.replace(
        steps, predict=lambda *args: calls.append(args) or steps.predict(*args)
    )
    opened = open_evals(settings(evals), layout, counted)
    results = evaluate.run(counted, opened, variables)
    assert results == {'a/examples': 61.0, 'b/examples': 61.0, 'c/examples': 61.0}
    passes = {'a and b learn': -(-300 // 24), 'c learns': 1, 'all are measured': -(-61 // 24)}
    assert len(calls) == sum(passes.values())
    a, b, c = recorder.made[-3:]
    assert [len(one.fitted) for one in (a, b, c)] == [13, 13, 1]
    for (x, _), (y, _) in zip(a.seen, c.seen, strict=True):
        np.testing.assert_array_equal(x['features'], y['features'])


def test_classes_hold_for_both_splits(recorder, variables):
    run(
        {'mine': {'evaluator': 'my_lab.recorder', 'classes': (8, 3)}}, make_layout('one'), variables
    )
    for split, seen in ((FIT, recorder.made[-1].fitted), ('test[:61]', recorder.made[-1].seen)):
        expected = sources.open_source('digits', split).only_classes((8, 3)).labels()
        np.testing.assert_array_equal(joined([b for _, b in seen], 'label'), expected)


def test_every_evaluation_starts_anew(variables):
    layout = make_layout('one')
    evals = {'k': {**DATA, **ENTRIES['knn'], 'fit': FIT}}
    steps = compile_steps(MODEL, TASK, layout)
    opened = open_evals(settings(evals), layout, steps)
    first, second = (evaluate.run(steps, opened, variables) for _ in range(2))
    assert first == second


def test_too_few_examples_are_seen_before_anything_is_computed(variables):
    with pytest.raises(UserError, match=r'evals.few, digits train\[:99\]: shots=25 of 10 classes'):
        run({'few': {**ENTRIES['few'], 'fit': 'train[:99]'}}, make_layout('one'), None)


def test_a_task_without_predictions():
    class Silent(base.Task):
        def loss(self, outputs, batch):
            return {}

    evals = {'k': {**DATA, **ENTRIES['knn'], 'fit': FIT}}
    layout = make_layout('one')
    steps = compile_steps(MODEL, Silent(), layout)
    with pytest.raises(UserError, match=r"'silent'.*predictions"):
        open_evals(settings(evals, 'silent'), layout, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('config', 'changes', 'words'),
    [
        (DIGITS, ('task.loss_name=softmax', 'model.depth=1'), ('config.evals.words', "'text'")),
        pytest.param(
            'experiments/eomt/semantic.py:smoke',
            ('task.kind=panoptic',),
            ('config.evals.val', "'segmentation'"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_predictions_that_the_task_does_not_make_are_missed_before_training(
    repo, config, changes, words
):
    made = load.load(str(repo / config), changes)
    if config == DIGITS:
        with made.unlocked():
            made.evals.words = {'source': 'digits', 'split': 'test', 'evaluator': 'retrieval'}
    with pytest.raises(UserError) as error:
        build.build(made)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ('change', 'devices', 'key'),
    [
        ('step.accum_steps=2', 1, 'accum_steps'),
        ('parallel.strategy=pmap', 2, 'strategy'),
        ('parallel.strategy=pmap', 1, None),
        ('parallel.strategy=jit', 2, None),
    ],
)
def test_a_batch_norm_takes_the_whole_batch(repo, change, devices, key):
    """Its statistics would depend on the microbatches and devices."""
    small = ('model.head_norm=batch', 'model.depth=1', 'batch_size=8', change)
    config = load.load(str(repo / DIGITS), small)
    if key is None:
        build.build(config, jax.devices()[:devices])
        return
    with pytest.raises(UserError, match=key):
        build.build(config, jax.devices()[:devices])


@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        ({'evaluator': 'fewshoot'}, r"unknown evaluator name 'fewshoot'; .* 'fewshot'"),
        ({'evaluator': 'fewshot', 'shot': (1,)}, "config.evals.x.*'shot'.*'shots'"),
        ({'evaluator': 'knn', 'temprature': 1.0}, "did you mean 'temperature'"),
        ({'evaluator': 'knn', 'fit': None}, 'config.evals.x'),
        ({'evaluator': 'fewshot', 'shots': 5}, 'config.evals.x.shots=5: expected tuple'),
        ({'evaluator': 'knn', 'k': 0}, r'config.evals.x: k=0: .* 1'),
        ({'shots': (1,)}, "config.evals.x.*'shots'"),
        ({'split': None}, r"'evals\.x\.split'"),
        ({'classs': (1,)}, "did you mean 'classes'"),
    ],
)
def test_mistakes_are_seen_when_the_config_is_read(entry, message):
    config = load.load(DIGITS)
    with config.unlocked():
        section = {'source': 'digits', 'split': 'test', 'fit': 'train', **entry}
        if 'evaluator' not in entry:
            del section['fit']
        config.evals.x = {k: v for k, v in section.items() if v is not None}
    with pytest.raises(UserError, match=message) as error:
        load.validate(config)
    assert '\n' not in str(error.value)


CONFIG = """
from experiments.vit import digits

def get_config(arg=None):
    config = digits.get_config()
    digits.smoke(config)
    config.model.depth = 1
    config.task.mixup = 0.0  # images that are mixed take longer to compile than all the rest
    data = dict(source='digits', split='test', fit='train[:300]', cache=True)
    config.evals.few = dict(evaluator='fewshot', shots=(1, 5), seeds=2, **data)
    config.evals.near = dict(evaluator='knn', k=7, **data)
    return config
"""


@pytest.fixture(scope='module')
def evaluated_run(tmp_path_factory):
    """A finished run with evaluators."""
    folder = tmp_path_factory.mktemp('evaluators')
    (folder / 'config.py').write_text(CONFIG)
    config = load.load(str(folder / 'config.py'))
    train.train(config, folder / 'run', devices=jax.devices()[:1])
    return folder / 'run'


@pytest.mark.slow
def test_a_run_writes_what_its_evaluators_measure(evaluated_run):
    lines = [json.loads(line) for line in (evaluated_run / 'metrics.jsonl').open()]
    names = {'test/accuracy', 'few/1_shot', 'few/5_shot', 'near/knn_accuracy'}
    evaluations = [line for line in lines if 'test/accuracy' in line]
    assert [line['step'] for line in evaluations] == [10, 20]
    assert all(names <= line.keys() and 0.1 < line['few/5_shot'] < 1 for line in evaluations)
    result = json.loads((evaluated_run / 'result.json').read_text())
    assert {name: result[name] for name in names} == {n: evaluations[-1][n] for n in names}


@pytest.fixture
def evaluated(one_device, evaluated_run, capsys):
    """`evaluated(*flags)`: what `evaluate --json` prints of that run."""

    def run(*flags):
        capsys.readouterr()
        assert main(['evaluate', '--workdir', str(evaluated_run), *flags, '--json']) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.slow
def test_evaluate_repeats_them(evaluated_run, evaluated):
    result = json.loads((evaluated_run / 'result.json').read_text())
    assert evaluated() == pytest.approx({'step': 20, **result}, abs=0.01)


def test_an_evaluator_may_be_repeated_with_other_keywords():
    groups = measure._evaluator_groups(['knn(k=5)', 'knn', 'knn(k=20)'], None)
    numbers = {name: group.get('k') for name, group in groups.items()}
    assert numbers == {'knn': 5, 'knn_2': None, 'knn_3': 20}


@pytest.mark.slow
def test_evaluate_takes_evaluators_that_the_run_does_not_have(evaluated_run, evaluated):
    result = json.loads((evaluated_run / 'result.json').read_text())
    flags = ['--evaluator', 'knn(k=7)', '--evaluator', 'fewshot(shots=(5,), seeds=2)']
    got = evaluated(*flags, '--fit', 'train[:300]')
    assert got == {
        'step': 20,
        'knn/knn_accuracy': pytest.approx(result['near/knn_accuracy'], abs=0.01),
        'fewshot/5_shot': pytest.approx(result['few/5_shot'], abs=0.01),
    }
    two = evaluated('--evaluator', 'knn', '--classes', '8,0')
    size = len(sources.open_source('digits', 'test').only_classes((8, 0)))
    assert two['knn/knn_accuracy'] * size == pytest.approx(round(two['knn/knn_accuracy'] * size))
    assert 0.7 < two['knn/knn_accuracy'] < 1


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--evaluator', 'kn'], ("'kn'", "'knn'")),
        (['--evaluator', 'knn(3)'], 'call'),
        (['--evaluator', 'knn(kk=3)'], ("'kk'", "'k'")),
        (['--evaluator', 'knn('], "--evaluator 'knn('"),
        (['--fit', 'train'], '--evaluator'),
        (['--classes', 'a,b'], ('--classes', "'a,b'")),
    ],
)
def test_mistakes_in_flags_are_one_line(evaluated_run, flags, message, capsys):
    assert main(['evaluate', '--workdir', str(evaluated_run), *flags]) == 2
    error = capsys.readouterr().err
    assert mentions(error, message)
    assert error.count('\n') == 1


def test_a_line_shows_the_headline_of_each_evaluation():
    results = {'test/loss': 0.5, 'test/box': 0.25, 'ap/AP50': 0.75, 'ap/AR_1': 0.125, 'broken': 2}
    evals = settings({'test': DATA, 'ap': {**DATA, 'evaluator': 'coco_ap'}}).evals
    headlines = {k: objects.headline(entry, Task(name='detect')) for k, entry in evals.items()}
    line = evaluate.line(headlines, results)
    assert line == 'test/loss 0.5000  ap/AP50 0.7500  broken 2.0000'
    headlines['test'] = objects.headline(evals['test'], Task(name='classify'))
    assert 'test/box 0.2500' in evaluate.line(headlines, results)


@pytest.mark.parametrize('evaluator', [coco_ap.Evaluator, panoptic_quality.Evaluator])
def test_headlines_are_metrics(evaluator):
    assert set(evaluator.headline) < set(evaluator().names())
