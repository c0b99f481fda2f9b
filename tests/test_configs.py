"""Every config in experiments/ builds: its model at full size, its loss, its data and schedule.

What a step makes of the state is in `test_lowering.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.experiments import PATHS, ROOT, examples, follows_checkpoint

from vit_jax.config import load as config_lib
from vit_jax.config.run import LEFT_OPEN
from vit_jax.data import sources, vocabulary
from vit_jax.data.sources import synthetic
from vit_jax.errors import UserError
from vit_jax.profiling import cost
from vit_jax.trainer import build as build_lib

TEXT = ('text:', 'tfds:wmt')


class StandIn:
    """In place of a data set that this machine does not have: small images, ten classes."""

    info = sources.SourceInfo(10, tuple(f'class {i}' for i in range(10)))

    def __len__(self):
        return 1_300_000  # as ImageNet, whose 10,000 steps of warm-up fit into training

    def __getitem__(self, index):
        return {'image': np.zeros((64, 64, 3), np.uint8), 'label': index % 10}

    def labels(self):
        return np.arange(len(self)) % 10

    def record_name(self, index):
        return f'example {index}'


class ReassessedStandIn(StandIn):
    """In place of ImageNet's reassessed labels."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), 'real_label': np.arange(10) == index % 10}


class TextStandIn(StandIn):
    """In place of pairs of sentences."""

    info = sources.SourceInfo(0, ())

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        words = ('a', 'dog', 'runs', 'over', 'the', 'field', 'and', 'back', 'to', 'the', 'house')
        sentence = ' '.join(words[: 1 + index % len(words)])
        return {'source': sentence, 'target': sentence}


class CaptionStandIn(StandIn):
    """In place of images with captions."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), 'caption': TextStandIn()[index]['source']}


class BoxStandIn(StandIn):
    """In place of images with boxes and masks."""

    def __len__(self):
        return 2_000

    def __getitem__(self, index):
        boxes = np.array([[2, 3, 30, 40]], np.float32)
        crowd, labels = np.zeros(1, bool), np.array([index % 10], np.int32)
        image = np.zeros((64, 48, 3), np.uint8)
        record = {'image': image, 'boxes': boxes, 'labels': labels, 'crowd': crowd}
        return {**record, 'masks': np.ones((1, 64, 48), bool)}


@pytest.fixture(scope='module')
def vocab():
    return vocabulary.train([TextStandIn()[i]['source'] for i in range(50)], 35, 'bpe')


@pytest.fixture(autouse=True)
def any_source(monkeypatch, vocab):
    """Sources that cannot be opened here are replaced by stand-ins; splits are still read."""
    open_source = sources.open_source

    def open_or_stand_in(name, split):
        stand_in = ReassessedStandIn if name.endswith('_real') else StandIn
        stand_in = TextStandIn if name.startswith(TEXT) else stand_in
        stand_in = BoxStandIn if name.startswith(('coco:', 'panoptic:', 'masks:')) else stand_in
        stand_in = CaptionStandIn if name.startswith('tar:') else stand_in
        try:
            return open_source(name, split)
        except UserError:
            return sources.select(name, split, lambda base: stand_in())

    monkeypatch.setattr(vocabulary, 'load_vocabulary', lambda path: vocab)
    monkeypatch.setitem(synthetic.SIZES, 'train', 5000)  # every one of which is read
    monkeypatch.setattr(sources, 'open_source', open_or_stand_in)
    # An ordinary name that is misspelt is a mistake in the config, not a missing data set.
    with pytest.raises(UserError, match='did you mean'):
        open_source('digit', 'train')


def load(spec):
    return config_lib.load(str(ROOT / spec))


TEACHER = str(ROOT / 'experiments' / 'distill' / 'smoke_teacher.npz')


def build(config):
    if config.task.name == 'distill' and not config.task.get('teacher'):  # the user names one
        with config.task.unlocked():
            config.task.teacher = TEACHER
    if config.task.name == 'agglomerate':  # likewise, and theirs are large
        teachers = len(config.task.teachers)
        config.task.update(teachers=(TEACHER,) * teachers, statistics=(), sizes=())
        config.model.summary_widths = config.model.patch_widths = (8,) * teachers
    if config.task.get('gram') and not config.task.gram_teacher:
        config.task.gram = 0.0  # likewise
    parallel = config_lib.to_run(config).parallel
    devices = jax.devices()[: parallel.fsdp * parallel.tensor]
    return build_lib.build(config, devices)


def specs():
    """Every config as it is, with every choice of an argument, and small."""
    hybrid = 'experiments/scaling/vit_compute.py:hybrid'  # its argument has no list of choices
    return [
        hybrid,
        *(
            f'{path}:{arg}'.removesuffix(':')
            for path in PATHS
            for arg in ('', *examples(ROOT / path, 'get_config'))
            if arg or not follows_checkpoint(ROOT / path)
        ),
    ]


SPECS = specs()
# In `make test`: one of each kind of model, and of each optimizer. Data of small sizes are drawn
# in `test_golden_batches.py`, and steps of each kind lowered in `test_lowering.py`.
BUILT = (
    'experiments/bit/finetune.py',
    'experiments/colorization/cifar10.py',
    'experiments/colorization/coltran_core.py',
    'experiments/detr/bccd.py',
    'experiments/distill/cifar10.py',
    'experiments/jit/cifar10.py',
    'experiments/mae/cifar10.py',
    'experiments/mae/cifar10_probe.py',
    'experiments/meanflow/cifar10.py',
    'experiments/scaling/zhai.py',
    'experiments/swin/cifar10.py',
    'experiments/translate/multi30k.py',
    'experiments/vit/digits.py:optimizer=adafactor',
    'experiments/vit/digits.py:optimizer=lion',
    'experiments/vit/digits.py:optimizer=sgd',
    'experiments/vit/vit5.py',
)


def test_all_that_are_built_exist():
    assert set(BUILT) <= set(SPECS)


@pytest.mark.slow
@pytest.mark.parametrize(
    'spec',
    [
        pytest.param(spec, marks=[pytest.mark.long] * (spec not in BUILT))
        for spec in SPECS
        if not spec.endswith(':smoke')
    ],
)
def test_every_config_builds(spec):
    training = build(load(spec))
    for section in (training.config.data, *training.config.evals.values()):
        assert not (section.get('cache') and section.get('workers')), 'no cache is shared'
    assert len(training.evaluations) == len(training.config.evals) > 0
    # Whatever the dtype of the computation.
    params = jax.tree.leaves(training.program.abstract_state.params)
    assert {leaf.dtype for leaf in params} == {jnp.dtype('float32')}


@pytest.mark.parametrize('spec', SPECS)
def test_no_config_leaves_a_size_open_where_its_cost_is_computed(spec):
    """As by `preflight` and `scaling plan`, which do not build a run."""
    config = load(spec)
    facts = cost.data_facts(config, examples=None if config.data.get('buckets') else 10_000)
    for key in LEFT_OPEN:
        assert facts.run.model.options.get(key, 1) is not None, key
    assert facts.kinds[-1].spec


@pytest.mark.parametrize('path', PATHS)
def test_docstring_gives_the_command_and_what_to_expect(path):
    docstring = (ROOT / path).read_text().split('"""')[1]
    assert f'python -m vit_jax train {path}' in docstring
    assert 'xpected' in docstring


def test_there_are_configs():
    assert 'experiments/vit/digits.py' in PATHS
