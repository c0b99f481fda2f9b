"""`vit_jax.load`: one call from a file or a run folder to a model and its weights."""

import csv
import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers.messages import numbers
from helpers.targets import pretend
from jax.sharding import AxisType, Mesh
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.data.batches import ArraySpec
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.inference.images import example_spec
from vit_jax.inference.predict import predictor
from vit_jax.interop import files
from vit_jax.interop.families import bit, vision_transformer
from vit_jax.interop.trained import TrainedModel
from vit_jax.models import bit_resnet, vit
from vit_jax.nn.kernels import attention
from vit_jax.storage.model_ref import ModelRef

FIELDS = dict(num_classes=4, patch_size=4, width=16, depth=1, mlp_dim=24, num_heads=2)


def random_params(model, size=(16, 16), channels=3):
    images = jax.ShapeDtypeStruct((1, *size, channels), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)


def random_images(height, width):
    return np.random.default_rng(1).uniform(-1, 1, (2, height, width, 3)).astype(np.float32)


@functools.cache
def compiled(model):
    return jax.jit(model.apply)


def outputs(model, variables, images):
    return jax.tree.map(np.asarray, compiled(model)(variables, images))


@pytest.fixture(scope='module')
def npz(tmp_path_factory):
    """A ViT in a file of vision_transformer, and its parameters."""
    path = tmp_path_factory.mktemp('npz') / 'vit.npz'
    params = random_params(vit.Model(**FIELDS))
    files.write_npz(path, vision_transformer.write(params, {'name': 'vit', **FIELDS}))
    return path, params


def test_a_file_of_others(npz):
    path, params = npz
    model, variables = vit_jax.load(path)
    assert isinstance(model, vit.Model)
    images = random_images(16, 16)
    expected = outputs(vit.Model(**FIELDS), {'params': params}, images)
    np.testing.assert_array_equal(
        outputs(model, variables, images)['logits'], expected['logits'], strict=True
    )


@pytest.mark.slow
def test_predictions_and_models_under_a_mesh_use_the_kernel_of_a_tpu(npz, monkeypatch):
    path, _ = npz
    images = random_images(16, 16)
    expected = outputs(*vit_jax.load(path), images)['logits']
    pretend(monkeypatch, 'TPU v5 lite')
    calls = []

    def called(projected, *options, real=attention.fused_attention):
        calls.append(projected[0].shape)
        return real(projected, *options, interpret=True)

    monkeypatch.setattr(attention, 'fused_attention', called)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ('data',), axis_types=(AxisType.Auto,))):
        found = outputs(*vit_jax.load(path), images)['logits']
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert calls == [(2, 17, 48)]
    image = np.zeros((16, 16, 3), np.uint8)
    predictor(load.open_model(path))({'image': image}, 0)
    assert calls[1:] == [(1, 17, 48)]


def test_another_size_is_that_of_the_resized_embedding(npz):
    path, params = npz
    model, variables = vit_jax.load(path, image_size=(24, 8))
    assert variables['params']['pos_embed'].shape == (1, 13, 16)
    np.testing.assert_array_equal(variables['params']['pos_embed'][:, 0], params['pos_embed'][:, 0])
    assert outputs(model, variables, random_images(24, 8))['logits'].shape == (2, 4)
    _, squared = vit_jax.load(path, image_size=32)
    assert squared['params']['pos_embed'].shape == (1, 65, 16)


@pytest.mark.slow
def test_another_head_starts_at_zero_on_the_same_body(npz):
    path, _ = npz
    images = random_images(16, 16)
    before = outputs(*vit_jax.load(path), images)
    model, variables = vit_jax.load(path, num_classes=9)
    after = outputs(model, variables, images)
    assert after['logits'].shape == (2, 9)
    assert not after['logits'].any()
    np.testing.assert_array_equal(after['pre_logits'], before['pre_logits'])
    assert isinstance(variables['params']['head']['kernel'], np.ndarray)
    model, variables = vit_jax.load(path, num_classes=0)
    assert 'head' not in variables['params']
    assert 'logits' not in outputs(model, variables, images)


@pytest.mark.slow
def test_bit_takes_any_size(tmp_path):
    model = bit_resnet.Model(num_classes=3, layers=(1,))
    params = random_params(model)
    files.write_npz(tmp_path / 'bit.npz', bit.write_npz(params))
    loaded, variables = vit_jax.load(tmp_path / 'bit.npz')
    assert loaded == model
    images = random_images(40, 24)
    expected = outputs(model, {'params': params}, images)['logits']
    np.testing.assert_array_equal(outputs(loaded, variables, images)['logits'], expected)
    assert 'logits' in outputs(*vit_jax.load(tmp_path / 'bit.npz', (40, 24), 8), images)


def test_views_of_a_run_have_the_other_size_too():
    views = {'image': (2, 8, 8, 1), 'mask': (2, 8, 8), 'local_image': (2, 4, 4, 1), 'label': ()}
    spec = {name: ArraySpec(shape, np.dtype(np.uint8)) for name, shape in views.items()}
    run = TrainedModel.from_file({}, {'name': 'dinov2'}, (8, 8), 'a test')
    changed = example_spec(dataclasses.replace(run, spec=spec), (16, 12))
    shapes = {name: entry.shape for name, entry in changed.items()}
    assert shapes == views | {'image': (2, 16, 12, 1), 'mask': (2, 16, 12)}


@pytest.mark.parametrize('suffix', ['', '/checkpoints', '/checkpoints/10', '@10'])
def test_a_run_folder(smoke_run, suffix):
    model, variables = vit_jax.load(ModelRef.parse(f'{smoke_run}{suffix}'))
    run = load.open_run(smoke_run, step=10 if suffix.endswith('10') else None)
    assert model == run.model
    image = np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 1)).astype(np.float32)
    np.testing.assert_array_equal(
        outputs(model, variables, image)['logits'],
        outputs(run.model, run.variables, image)['logits'],
    )


def test_keywords_of_a_run_are_complete(smoke_run):
    imported = load.read(smoke_run)
    assert imported.model_config['name'] == 'vit'
    assert imported.model_config['posemb'] == 'sincos2d'
    assert imported.model_config['norm_eps'] == 1e-6
    assert imported.image_size == (8, 8)
    assert imported.source == f'run {smoke_run}, step 20'


NEWER = {'posemb_prefix', 'no_bias', 'layer_scale', 'mean', 'std'}


def test_a_run_from_before_some_fields_still_loads(smoke_run, tmp_path):
    old = shutil.copytree(smoke_run, tmp_path / 'old')
    config = json.loads((old / 'config.json').read_text())
    for group in ('model', 'task'):
        config[group] = {key: config[group][key] for key in config[group].keys() - NEWER}
    (old / 'config.json').write_text(json.dumps(config))
    trained, expected = load.read(old), load.read(smoke_run)
    assert trained.model == expected.model and trained.task == expected.task
    jax.tree.map(np.testing.assert_array_equal, trained.params, expected.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('pool', 'rows'),
    [
        ('cls', 10),
        ('gap', 9),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (('cls', 9), ('gap', 36))),
    ],
)
def test_the_size_that_is_given_decides_the_grid(pool, rows, tmp_path):
    """Positions of 2 x 5, 1 x 9 or 4 x 9 patches, which could also be those of a square."""
    size = {10: (8, 20), 9: (4, 36), 36: (16, 36)}[rows]
    fields = {**FIELDS, 'pool': pool}
    params = random_params(vit.Model(**fields), size)
    flat = vision_transformer.write(params, {'name': 'vit', **fields})
    table = flat.pop('Transformer/posembed_input/pos_embedding')[:, int(pool == 'cls') :]
    files.write_npz(tmp_path / 'a.npz', {**flat, 'pos_embedding': table})
    assert table.shape[1] == rows
    if pool == 'cls':
        params['pos_embed'][:, 0] = 0
    images = random_images(*size)
    expected = outputs(vit.Model(**fields), {'params': params}, images)['logits']
    logits = outputs(*vit_jax.load(tmp_path / 'a.npz', size), images)['logits']
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    words = ['--checkpoint', str(tmp_path / 'a.npz'), '--image-size', '12']
    assert cli.main(['inspect', *words]) == 0


def test_another_size_does_not_change_what_positions_are_of(tmp_path):
    """Those of 3 x 3 patches alone are not those of a class token and 2 x 4 patches."""
    params = random_params(vit.Model(**FIELDS), (12, 12))
    flat = vision_transformer.write(params, {'name': 'vit', **FIELDS})
    table = flat.pop('Transformer/posembed_input/pos_embedding')[:, 1:]
    files.write_npz(tmp_path / 'a.npz', {**flat, 'pos_embedding': table})
    _, variables = vit_jax.load(tmp_path / 'a.npz', (8, 16))
    assert variables['params']['pos_embed'].shape[1] == 8


def test_mistakes(npz, tmp_path):
    path, _ = npz
    with pytest.raises(UserError, match=r'no\.npz'):
        vit_jax.load(tmp_path / 'no.npz')
    with pytest.raises(UserError, match='16 x 18: their height'):
        vit_jax.load(path, image_size=(18, 16))
    params = random_params(vit.Model(**FIELDS), (8, 20))
    flat = vision_transformer.write(params, {'name': 'vit', **FIELDS})
    files.write_npz(tmp_path / 'wide.npz', flat)
    with pytest.raises(UserError, match=r'10 patches.*image.*size'):
        vit_jax.load(tmp_path / 'wide.npz')
    (tmp_path / 'checkpoints' / '3').mkdir(parents=True)
    with pytest.raises(UserError, match='no finished checkpoint'):
        vit_jax.load(tmp_path)
    assert not hasattr(vit_jax, 'loads')


@pytest.mark.slow
def test_a_foreign_file_as_a_run(npz, tmp_path):
    from vit_jax.inference import images as image_files
    from vit_jax.inference.predict import batch_of_one

    path, params = npz
    run = load.open_model(path)
    assert (run.step, run.class_names) == (None, ())
    json.dumps(run.config.to_dict())
    Image.new('RGB', (30, 50), 'white').save(tmp_path / 'white.png')
    photo = image_files.photo_reader(run).read(tmp_path / 'white.png')
    assert numbers(photo.note) == [30, 50, 16, 16, 9, 39, 0, 30]
    predict = jax.jit(lambda variables, batch: run.model.apply(variables, *run.task.inputs(batch)))
    logits = predict(run.variables, batch_of_one(photo.fields))['logits']
    ones = np.ones((1, 16, 16, 3), np.float32)
    expected = outputs(vit.Model(**FIELDS), {'params': params}, ones)['logits']
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert load.open_model(path, (24, 8)).variables['params']['pos_embed'].shape[1] == 13


GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


@pytest.mark.slow
def test_a_model_of_text_is_loaded_by_the_inputs_of_its_task():
    trained = load.read(GOLDEN / 'run_reverse')
    assert trained.spec.keys() == {'source', 'target'} and trained.value_range() is None
    model, variables = vit_jax.load(GOLDEN / 'run_reverse')
    ids = jax.numpy.ones((1, 5), np.int32)
    logits = outputs_of(model, variables, *trained.task.inputs({'source': ids, 'target': ids}))
    assert logits.shape == (1, 5, model.vocab_size)
    refit = load.adapt_model(trained, image_size=(8, 8))
    jax.tree.map(np.testing.assert_array_equal, refit.params, trained.params)


@pytest.mark.slow
@pytest.mark.fault(115)
@pytest.mark.parametrize('command', ['predict', 'attention'])
@pytest.mark.parametrize('channels', [1, 2, 4, 5, 12])
def test_files_are_refused_by_models_of_other_channels_than_gray_or_rgb(
    channels, command, tmp_path, capsys
):
    path, picture = tmp_path / 'vit.npz', tmp_path / 'a.png'
    params = random_params(vit.Model(**FIELDS), channels=channels)
    files.write_npz(path, vision_transformer.write(params, {'name': 'vit', **FIELDS}))
    Image.new('RGB', (20, 30)).save(picture)
    words = [command, '--checkpoint', str(path), str(picture), '--out', str(tmp_path / 'b.png')]
    code, errors = cli.main(words), capsys.readouterr().err
    if channels == 1:
        assert code == 0
        return
    assert code == 2
    assert f'images of {channels} channels' in errors and errors.count('\n') == 1
    assert not (tmp_path / 'b.png').exists()


def outputs_of(model, variables, *inputs):
    return jax.jit(model.apply)(variables, *inputs)['logits']


def test_the_record_tells_what_black_and_white_become(npz, smoke_run):
    for path, channels in ((npz[0], 3), (smoke_run, 1)):
        expected = [[-1.0] * channels, [1.0] * channels]
        np.testing.assert_allclose(load.read(path).value_range(), expected)
    mean, std = np.array([0.1, 0.2, 0.3], np.float32), np.array([0.5, 0.4, 0.3], np.float32)
    detector = TrainedModel.from_file(
        {},
        {'name': 'detr', 'num_classes': 2},
        (32, 32),
        'a file',
        task={'name': 'detect', 'mean': tuple(mean.tolist()), 'std': tuple(std.tolist())},
    )
    expected = np.stack([(byte - mean) / std for byte in (0, 1)])
    np.testing.assert_allclose(detector.value_range(), expected, rtol=1e-5)


@pytest.mark.slow
def test_calls_give_the_numbers_of_the_commands(smoke_run, tmp_path, capsys):
    found = vit_jax.evaluate(smoke_run, step=10, split='train[:20]', evaluators=['knn(k=3)'])
    words = ['--step', '10', '--split', 'train[:20]', '--evaluator', 'knn(k=3)', '--json']
    assert cli.main(['evaluate', '--workdir', str(smoke_run), *words]) == 0
    assert json.loads(capsys.readouterr().out) == {'step': 10, **found}
    Image.new('L', (20, 30), 100).save(tmp_path / 'a.png')
    (prediction,) = vit_jax.predict(smoke_run, [tmp_path / 'a.png'], step=10)
    words = ['--step', '10', '--json', '--top', '1', str(tmp_path / 'a.png')]
    assert cli.main(['predict', '--workdir', str(smoke_run), *words]) == 0
    (best,) = json.loads(capsys.readouterr().out)['images'][0]['predictions']
    assert best['label'] == prediction['probs'].argmax()
    assert best['probability'] == pytest.approx(float(prediction['probs'].max()))
    table = tmp_path / 'a.csv'
    words = ['--step', '10', '--table', str(table), str(tmp_path / 'a.png')]
    assert cli.main(['predict', '--workdir', str(smoke_run), *words]) == 0
    with table.open() as file:
        written = list(csv.DictReader(file))
    assert [{k: str(v) for k, v in row.items()} for row in prediction.rows] == written
    assert [row['rank'] for row in prediction.rows] == [1, 2, 3, 4, 5]
    few = vit_jax.predict(smoke_run, tmp_path / 'a.png', step=10, flags={'top': 2})
    assert few.rows == prediction.rows[:2]
    with pytest.raises(UserError) as error:
        vit_jax.predict(smoke_run, tmp_path / 'a.png', flags={'topp': 2})
    assert "'topp'" in str(error.value) and 'top' in str(error.value)


@pytest.mark.slow
def test_predictions_of_a_path_of_pillows_image_and_of_an_array(smoke_run, tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    image.save(tmp_path / 'a.png')
    single = vit_jax.predict(smoke_run, str(tmp_path / 'a.png'))
    for found in vit_jax.predict(smoke_run, [image, np.asarray(image)]):
        np.testing.assert_array_equal(found['probs'], single['probs'])


def test_a_file_without_data_is_not_evaluated_on_any(npz):
    with pytest.raises(UserError, match=r'source.*split'):
        vit_jax.evaluate(npz[0])


def test_a_part_of_a_run_is_refused_by_name(repo):
    run = repo / 'tests' / 'golden' / 'run_siglip2'
    with pytest.raises(UserError, match=r"parts such as 'vision'.*config\.init\.select"):
        load.read(f'{run}:vision')
