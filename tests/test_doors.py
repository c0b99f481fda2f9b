"""Every kind of model goes through every public door: a matrix of models by commands.

Rows are the stored runs and one tiny file of each family (`helpers.doors`); a family or a model
without a row fails. Whatever is refused stands in REFUSED; any other error fails. `make test` takes
each row through the doors that compile nothing, and a few rows through the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import doors
from helpers.round_trips import anew, assert_same, halved
from helpers.typechecker import unchecked
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError, modules
from vit_jax.inference import export, fine_tune, load
from vit_jax.inference.images import example_spec
from vit_jax.interop import families, files
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.trainer.build import build
from vit_jax.trainer.start import find_origin
from vit_jax.tree_paths import param_paths

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]

ROWS = {row.name: row for row in doors.rows()}
WITHOUT_IMAGES = 'run_(reverse|rnn|seq2seq)|.*text_encoder.*'
TOWERS = '.*(clip|siglip|tips tips|run_tips).*'
HEADLESS = (
    '(authors|transformers)_dinov3.*|authors_dinov2|sam.*|transformers_(vision_tower|yolos|radio)'
)
PIXELS = 'run_(colorize|coltran.*|jit|pmf)'  # from images to images
DEPTH = 'transformers_(depth|tips_dpt).*'
OTHER_VITS = '.*dinov3.*|transformers_(beit|dinov2|yolos)'
# By door, patterns of rows and what the one line says.
REFUSED: dict[str, dict[str, str]] = {
    'load other': {'.*mixer.*': 'cannot be resized', 'run_(jit|pmf)': 'class_embed'},
    'predict': {
        'run_(reverse|rnn|seq2seq)': 'was not trained on images',
        '.*text_encoder.*': "predictions of task 'classify_text' cannot be shown",
        '(?!run).*(clip|siglip|tips tips).*': 'vocabulary',
        HEADLESS: 'the model has no head',
    },
    'embed': {
        WITHOUT_IMAGES: 'was not trained on images',
        f'{PIXELS}|{DEPTH}': 'no embedding of a whole image',
    },
    'attention': {
        'run_(reverse|rnn|seq2seq)': 'digits',
        '.*(bit_resnet|mae|mixer).*|run_bit|inception': 'has no attention to draw',
        '.*text_encoder.*': 'was not trained on images',
    },
    'export': {
        WITHOUT_IMAGES: 'was not trained on images|has no predictions',
        '(?!run|rf_detr|transformers_lw).*detr.*|.*naflex.*|inception': 'give --image-size',
    },
    'train': {
        f'{WITHOUT_IMAGES}|{TOWERS}|{PIXELS}|.*detr.*|{DEPTH}': 'config.init.select',
    },
    'convert authors_dinov3 authors': {
        '(?!.*dinov3|authors_dinov2).*': 'authors of DINOv3 have no model with'
    },
    'convert timm_vit timm': {OTHER_VITS: 'timm has no ViT with'},
    'convert transformers_vit transformers': {'run_(vit|mup|lora)': 'has no such model'},
    'convert vision_transformer npz': {
        'transformers_radio': 'final_norm',
        OTHER_VITS: 'vision_transformer files (do not support|have no name)',
    },
    'convert mixer timm': {'run_mixer|mixer mixer npz': 'timm has no Mixer'},
    'convert open_clip authors': {'run_clip': 'texts end with the largest id'},
    'convert authors_detr authors': {'run_detr.*': 'backbone_norm'},
    'convert detr transformers': {'run_detr.*': 'group norm'},
}


# Runs that `test_old_runs` does not evaluate in `make test`.
LOADED = (
    *('run_bit', 'run_cappa', 'run_clip', 'run_coltran', 'run_coltran_upsampler', 'run_detr'),
    *(
        'run_detr_panoptic',
        'run_dinov2',
        'run_eomt',
        'run_hybrid',
        'run_jit',
        'run_mae',
        'run_mixer',
        'run_pmt',
    ),
    *('run_open_clip', 'run_projected', 'run_rnn', 'run_siglip_naflex', 'run_swin_v2_cr'),
)
FOREIGN = [name for name, row in ROWS.items() if row.family]
EOMT, DETR = 'transformers_eomt eomt transformers', 'detr detr transformers'
NAFLEX = 'transformers_siglip2 siglip_naflex transformers'
# Of each form one; tests of each family compare what it writes with the originals.
CONVERTED = (
    *(EOMT, DETR, NAFLEX, 'authors_detr detr authors', 'bit bit_resnet npz', 'inception'),
    *('mae mae transformers', 'mixer mixer npz', 'open_clip clip authors', 'timm_vit vit timm'),
    *('transformers_dinov2', 'transformers_vit vit transformers', 'vision_transformer vit npz'),
)


def column(*few: str) -> Any:
    """Parametrize a test by all rows, of which `make test` takes a few."""
    rows = [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in ROWS]
    return pytest.mark.parametrize('name', rows)


def reason(door: str, name: str) -> str:
    """Why a row is refused by a door; empty if it is not."""
    found = (why for pattern, why in REFUSED.get(door, {}).items() if re.fullmatch(pattern, name))
    return next(found, '')


@contextlib.contextmanager
def entering(door: str, name: str) -> Iterator[None]:
    """Expect what REFUSED says: nothing, or a UserError."""
    if not (why := reason(door, name)):
        yield
        return
    with pytest.raises(UserError, match=why):
        yield


def command(door: str, name: str, capsys: Any, *words: Any) -> str | None:
    """What a command prints; None if it is refused as expected, in one line."""
    capsys.readouterr()
    code, said = cli.main([str(word) for word in words]), capsys.readouterr()
    if why := reason(door, name):
        assert code == 2 and re.search(why, said.err), said.err
        assert said.err.count('\n') == 1
        return None
    assert code == 0, said.err
    return said.out


@pytest.fixture(scope='session')
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The path of a row, whose files are written once, in half precision."""
    folder = tmp_path_factory.mktemp('doors')

    @functools.cache
    def path(name: str) -> pathlib.Path:
        place = doors.write(ROWS[name], folder / name.replace(' ', '_'))
        if ROWS[name].family:
            halved(place)
        return place

    return path


@pytest.fixture(scope='session')
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """Three photographs, of a broad and a high aspect, in two folders for their classes."""
    folder, rng = tmp_path_factory.mktemp('photos'), np.random.default_rng(0)
    paths = [folder / 'cat' / 'a.png', folder / 'cat' / 'b.png', folder / 'dog' / 'c.png']
    for path, size in zip(paths, ((48, 64), (80, 40), (64, 48)), strict=True):
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    return paths


@functools.cache
def read(path: pathlib.Path) -> TrainedModel:
    return load.read(path)


def test_every_family_and_every_model_has_a_row() -> None:
    assert {row.family for row in ROWS.values() if row.family} == set(modules(families.__name__))
    assert {*map(doors.model_name, ROWS.values())} == set(modules('vit_jax.models')) - {'base'}
    for door, table in REFUSED.items():
        for pattern in table:
            assert any(re.fullmatch(pattern, name) for name in ROWS), (door, pattern)


@pytest.mark.parametrize('name', FOREIGN)
def test_exactly_one_family_reads_a_file(name: str, place: Any) -> None:
    flat, _ = files.read_arrays(place(name))
    assert families.match_families(flat).keys() == {ROWS[name].family}


def shape_of(trained: TrainedModel) -> tuple[int, int] | None:
    """Height and width of a model's images; None if it takes none."""
    if not trained.takes_images:
        return None
    return trained.prepared_size or trained.image_size or (32, 32)


def inputs(trained: TrainedModel, size: tuple[int, int] | None) -> Any:
    """The inputs of the backbone's model for one example of zeros, as arrays of NumPy."""
    spec = trained.spec if size is None else example_spec(trained, size)
    batch = {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in spec.items()}
    shapes = jax.eval_shape(trained.task.inputs, batch)
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def total(outputs: Any) -> jax.Array:
    """The sum of all real outputs."""
    leaves = (jnp.asarray(x) for x in jax.tree.leaves(outputs))
    return sum((x.sum() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)), jnp.zeros(()))


@column(*LOADED)
def test_load(name: str, place: Any) -> None:
    """A model applies within `jax.grad` to arrays of NumPy."""
    trained = load.backbone(read(place(name)))
    with entering('load', name):
        model, variables = vit_jax.load(place(name))
        given = inputs(trained, shape_of(trained))

        def loss(params: Any) -> jax.Array:
            rngs = dict.fromkeys(trained.task.rngs, jax.random.key(0))
            return total(model.apply({**variables, 'params': params}, *given, rngs=rngs))

        with unchecked():
            jax.eval_shape(jax.grad(loss), variables['params'])


@column('run_dinov2', 'run_clip', 'run_swin', EOMT, NAFLEX)
def test_load_for_other_images_and_classes(name: str, place: Any) -> None:
    """It computes in bfloat16, too; classes are refused where there is no head for them."""
    trained = load.backbone(read(place(name)))
    size = shape_of(trained)
    other, classes = size and (2 * size[0], size[1]), {'num_classes': 7}
    if 'num_classes' not in fields(trained.model):
        with pytest.raises(UserError, match='num_classes'):
            vit_jax.load(place(name), **classes)
        classes = {}
    with entering('load other', name):
        model, variables = vit_jax.load(place(name), other, **classes)
        if 'dtype' in fields(model):
            model = model.clone(dtype='bfloat16')
        with unchecked():
            rngs = dict.fromkeys(trained.task.rngs, jax.random.key(0))
            apply = functools.partial(model.apply, rngs=rngs)
            found = jax.eval_shape(apply, variables, *inputs(trained, other))
        heads = [found[key].shape[-1] for key in found if key == 'logits' and classes]
        assert not set(heads) - {7, 8}  # a detector has one for nothing


@column(EOMT, 'run_naflex')
def test_inspect(name: str, place: Any, capsys: Any) -> None:
    said = command('inspect', name, capsys, 'inspect', '--checkpoint', place(name), '--json')
    if said is not None:
        expected = sum(np.size(x) for x in jax.tree.leaves(read(place(name)).params))
        assert json.loads(said)['total'] == expected


@column(EOMT, 'run_colorize')
def test_predict(name: str, place: Any, photos: Any, capsys: Any) -> None:
    words = ['--checkpoint', place(name), *photos, '--json']
    words += ['--texts', 'a red circle;a blue square'] if re.fullmatch(TOWERS, name) else []
    said = command('predict', name, capsys, 'predict', *words)
    if said is not None:
        assert len(json.loads(said)['images']) == len(photos)


@column(NAFLEX)
def test_embed(name: str, place: Any, photos: Any, tmp_path: pathlib.Path, capsys: Any) -> None:
    """In batches that do not divide the photographs."""
    words = [place(name), *photos, '--batch-size', 2, '--out', tmp_path / 'a.npz']
    words += ['--features', 'mean'] if 'detr' in name else []
    if command('embed', name, capsys, 'embed', *words) is not None:
        with np.load(tmp_path / 'a.npz') as found:
            arrays = [found[key] for key in found if found[key].dtype.kind == 'f']
        assert arrays and all(len(x) == 3 and np.isfinite(x).all() for x in arrays)


@column(EOMT)
def test_attention(name: str, place: Any, photos: Any, tmp_path: pathlib.Path, capsys: Any) -> None:
    words = ['--checkpoint', place(name), photos[1], '--out', tmp_path / 'a.png']
    if command('attention', name, capsys, 'attention', *words) is not None:
        assert (tmp_path / 'a.png').stat().st_size


def written_forms(name: str) -> list[tuple[str, str]]:
    """Each family that writes a row's model, and the form."""
    model = doors.model_name(ROWS[name])
    return [
        (family, form)
        for family in modules(families.__name__)
        for kind, form in getattr(families.find_family(family), 'WRITERS', {})
        if kind == model
    ]


@column(*CONVERTED)
def test_convert(name: str, place: Any, tmp_path: pathlib.Path, capsys: Any) -> None:
    """To every form that its model is written in, and back: the same, or a note.

    A file's own form comes back bit for bit, and anew with the same parameters.
    """
    row, trained = ROWS[name], read(place(name))
    for family, form in written_forms(name):
        path = tmp_path / (f'{family}.npz' if form == 'npz' else family)
        prefix = f'{family}:' if form in ('timm', 'authors') else ''
        door = f'convert {family} {form}'
        said = command(door, name, capsys, 'convert', place(name), f'{prefix}{path}')
        if said is None:
            continue
        if (row.family, row.form) == (family, form):
            assert_same(place(name), path)
            path = path.with_name(f'anew-{path.name}')
            interop.write(anew(trained), f'{prefix}{path}')
        again = load.read(path)
        told = said.count('note: ') - len(trained.notes)
        assert told or is_same(trained, again) or distance(trained, again) < 1e-5, door


def is_same(trained: TrainedModel, other: TrainedModel) -> bool:
    """Whether two models have the same parameters, and take the same images."""
    ours, theirs = param_paths(trained.params), param_paths(other.params)
    return (
        ours.keys() == theirs.keys()
        and all(np.array_equal(ours[key], theirs[key]) for key in ours)
        and trained.model == other.model
        and trained.task == other.task
    )


def distance(trained: TrainedModel, other: TrainedModel) -> float:
    """The largest difference of outputs for random bytes, in parts of the largest output."""
    rng, size = np.random.default_rng(0), shape_of(trained)
    spec = trained.spec if size is None else example_spec(trained, size)
    batch = {
        key: rng.integers(0, 256 if key == 'image' else 2, (1, *x.shape)).astype(x.dtype)
        for key, x in spec.items()
    }

    def outputs(each: TrainedModel) -> dict[str, np.ndarray]:
        rngs = dict.fromkeys(each.task.rngs, jax.random.key(0))

        def apply(variables: Any, batch: Any) -> Any:
            return each.model.apply(variables, *each.task.inputs(batch), rngs=rngs)

        return jax.tree.map(np.asarray, jax.jit(apply)(each.variables, batch))

    ours, theirs = outputs(trained), outputs(other)
    assert ours.keys() == theirs.keys()
    return max(np.abs(x - theirs[k]).max() / np.abs(x).max() for k, x in ours.items() if x.any())


@pytest.mark.slow
@column(DETR, 'run_colorize')
def test_export(name: str, place: Any, photos: Any, tmp_path: pathlib.Path) -> None:
    with entering('export', name):
        export.export(place(name), tmp_path / 'out', platforms=['cpu'])
    if reason('export', name):
        assert not (tmp_path / 'out').exists()
        return
    ours = vit_jax.predict(place(name), photos)
    for row, expected in zip(
        export.load_exported(tmp_path / 'out').predict(photos), ours, strict=True
    ):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(row[key], value, atol=2e-5, rtol=1e-4, err_msg=key)


@column(EOMT, 'run_naflex', 'run_detr')
def test_training_from_it(name: str, repo: pathlib.Path, place: Any, photos: Any) -> None:
    gray = read(place(name)).channels == 1
    source = 'digits' if gray else f'folder:{photos[0].parents[1]}'
    given = [f'data.source={source}', f'init.from={place(name)}', 'batch_size=2']
    given += ['data.split=train', f'evals.val.split={"test" if gray else "train"}']
    config = config_lib.load(f'{repo}/experiments/vit/finetune.py:auto', given)
    with entering('train', name):
        completed = fine_tune.complete_config(config)
        training = build(completed.config)
        origin = find_origin(training, checkpoint=completed.checkpoint)
        kept = len(jax.tree.leaves(origin.params))
        assert kept >= len(jax.tree.leaves(training.program.abstract_state.params)) - 2
