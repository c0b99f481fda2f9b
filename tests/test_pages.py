"""The pages of docs/ that lists of the package, or code on the page itself, stand behind."""

import importlib
import importlib.util
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import load as config_lib
from vit_jax.errors import UserError, modules
from vit_jax.inference.load import load
from vit_jax.interop import families
from vit_jax.profiling import variants
from vit_jax.tasks import classify
from vit_jax.trainer.train import train

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def made():
    """What makes docs/models.md."""
    spec = importlib.util.spec_from_file_location('models', ROOT / 'docs' / 'site' / 'models.py')
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, 'models', module)  # for its dataclass
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    'name', ['models', 'sources', pytest.param('sizes', marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_the_tables_of_models_are_those_of_the_lists(made, name):
    text = made.PAGE.read_text()
    assert made.written(text, name) == text, 'run `make docs`'


def test_every_model_and_family_has_a_test_that_compares(made):
    assert set(made.CHECKED) == set(modules(variants.PACKAGE))
    for it in made.CHECKED.values():
        assert it.within in (ROOT / it.test).read_text()
    reading = {n for n in modules(families.__name__) if hasattr(families.find_family(n), 'matches')}
    assert {name for it in made.CHECKED.values() for name in it.families} == reading


def test_the_changed_loss_adds_a_term():
    (code,) = re.findall(
        r'```python\n(.*?)```', (ROOT / 'docs' / 'change.md').read_text(), re.DOTALL
    )
    names = {'__name__': 'my_lab.small_logits'}
    exec('\n'.join(line.removeprefix('   ') for line in code.splitlines()), names)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    batch = {'label': jnp.arange(3), 'mask': jnp.array([1.0, 1.0, 0.0])}
    found = names['Task']().loss({'logits': logits}, batch)
    assert set(found) == {*classify.Task().loss({'logits': logits}, batch), 'z'}
    z = np.log(np.exp(logits).sum(-1)) ** 2
    np.testing.assert_allclose(found['z'].sum, z[:2].sum(), rtol=1e-5)
    assert float(found['z'].count) == 2


@pytest.mark.slow
def test_ones_own_loss_model_and_augmentation_train(tmp_path, monkeypatch, one_device):
    """The files of docs/own.md, in two steps each."""
    folder = tmp_path / 'own_lab'
    folder.mkdir()
    text = (ROOT / 'docs' / 'own.md').read_text()
    for code in re.findall(r'```python\n(.*?)```', text, re.DOTALL):
        name = re.match(r'# my_lab/(\w+\.py)\n', code)[1]
        (folder / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    digits = str(ROOT / 'experiments' / 'vit' / 'digits.py:smoke')
    shared = ['total=2 steps', 'every.eval=2', 'every.checkpoint=2', 'batch_size=16']
    shared += ['model.depth=1', 'evals.test.split=test[:32]']
    own = {
        'loss': [
            *('task.name=own_lab.confident', 'task.penalty=0.5'),
            'task.loss_name=own_lab.losses.focal',
            'data.transforms=own_lab.pixels.speckle(0.2)',
        ],
        'mixed': ['task.name=own_lab.halves'],
    }
    for run, overrides in own.items():
        config = config_lib.load(digits, [*shared, *overrides])
        assert np.isfinite(train(config, tmp_path / run)['test/loss'])
    with pytest.raises(UserError) as error:
        load(tmp_path / 'loss')
    assert '--allow own_lab' in str(error.value)
    model = importlib.import_module('own_lab.mean_patch').Model(num_classes=3)
    outputs, _ = jax.jit(model.init_with_output)(jax.random.key(0), jnp.zeros((2, 8, 8, 1)))
    assert outputs['logits'].shape == (2, 3)


@pytest.mark.parametrize(
    ('name', 'part'),
    [('focall', 'focall'), ('no_lab.losses.focal', 'no_lab'), ('math.focal', 'focal')],
)
def test_a_loss_that_does_not_exist_is_named(name, part):
    with pytest.raises(UserError) as error:
        classify.Task(loss_name=name)
    assert 'loss_name' in str(error.value) and part in str(error.value)


def site_module(name):
    """A module of docs/site/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / 'docs' / 'site' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build():
    """The builder of the site."""
    return site_module('build')


@pytest.fixture
def words():
    """The counter of handwritten words."""
    return site_module('words')


def test_the_reference_names_modules_and_rooms_that_exist(build):
    names = [name for room in build.ROOMS for name in build.modules(room)]
    assert all((ROOT / f'{name.replace(".", "/")}.py').exists() for name in names[1:])
    assert names[0] == 'vit_jax'


def test_the_site_begins_with_what_the_readme_says(build):
    text = build.from_readme((build.HERE / 'index.md').read_text())
    assert '- **' in text and '## Compared with others' in text and '## Systems' in text


def test_every_picture_of_the_gallery_is_on_a_card_with_its_command(build):
    page = (ROOT / 'docs' / 'gallery.md').read_text()
    cards = re.findall(r':::\{card\}\n(.*?)\n:::\n', build.cards(page), re.DOTALL)
    assert sum(card.count('![') for card in cards) == page.count('![')
    assert all('python -m vit_jax' in card for card in cards)


# Lower it when a page gets shorter.
# 35,000, and up to 600 for a system added since: ONNX and NNX, probes, detectors' formats, depth,
# robustness sets and adapters, DINOv3, masks of RF-DETR, TIPS, PMT.
HANDWRITTEN_WORDS = 37650
HOW_TO_WORDS = 600
SHORT_KINDS = ('Tutorials', 'How to: ')


def test_handwritten_words_stay_within_bounds(words):
    counts = words.count()
    assert sum(counts.values()) <= HANDWRITTEN_WORDS
    kinds = re.split(r'^## (.*)$', (ROOT / 'docs' / 'README.md').read_text(), flags=re.M)[1:]
    for kind, listed in zip(kinds[::2], kinds[1::2], strict=True):
        pages = re.findall(r'\]\((\w+\.(?:md|ipynb))\)', listed)
        long = {page: counts[page] for page in pages if counts.get(page, 0) > HOW_TO_WORDS}
        assert not (kind.startswith(SHORT_KINDS) and long), (kind, long)
    assert not {'config.md', 'config/optim.md', 'flags.md'} & counts.keys()


def test_generated_tables_are_not_counted(words):
    text = 'one two\n\n<!-- models -->\n| a | b |\n<!-- end -->\n\n```\nmake train\n```\nthree\n'
    assert words.count_words(text) == 3 + 2
