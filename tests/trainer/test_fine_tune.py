"""Fine-tuning on one's own images: the checkpoint gives the model and what is done to images."""

import json

import jax
import numpy as np
import pytest
from helpers.messages import mentions, says
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.interop import files
from vit_jax.interop.families import vision_transformer
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.models import mae, vit
from vit_jax.nn import options
from vit_jax.trainer.build import build
from vit_jax.trainer.start import find_origin

VIT = dict(num_classes=7, patch_size=8, width=16, depth=1, mlp_dim=24, num_heads=2)
MODEL = dict(VIT, num_classes=2, representation_size=None)


def drawn(module, size=32):
    """Random parameters of a model of images of this size."""
    images = jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with images of two classes, and a checkpoint whose head has seven."""
    place = tmp_path_factory.mktemp('fine_tune')
    rng = np.random.default_rng(0)
    for name in ('rose', 'tulip'):
        (place / 'flowers' / name).mkdir(parents=True)
        for i in range(5):
            pixels = rng.integers(0, 256, (36, 40 + i, 3), np.uint8)
            Image.fromarray(pixels).save(place / 'flowers' / name / f'{i}.png')
    released = dict(VIT, representation_size=20)
    flat = vision_transformer.write(drawn(vit.Model(**released)), {'name': 'vit', **released})
    files.write_npz(place / 'vit.npz', flat)
    return place


@pytest.fixture
def auto(repo, place):
    """Loads finetune.py:auto with the images and a checkpoint, the .npz by default."""

    def load(*overrides, checkpoint='vit.npz', arg='auto'):
        given = [f'data.source=folder:{place}/flowers', f'init.from={place / checkpoint}']
        return config_lib.load(f'{repo}/experiments/vit/finetune.py:{arg}', [*given, *overrides])

    return load


def stored_model(config):
    flat = options.flat_fields(config.model.to_dict())
    return {key: flat[key] for key in MODEL}


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_one_command_and_no_file_later(repo, place, tmp_path, capsys):
    path, run = tmp_path / 'vit.npz', tmp_path / 'run'
    path.write_bytes((place / 'vit.npz').read_bytes())
    words = [
        *('train', '--config', f'{repo}/experiments/vit/finetune.py:auto'),
        *(f'--config.data.source=folder:{place}/flowers', f'--config.init.from={path}'),
        *('--workdir', str(run), '--config.total=2', '--config.batch_size=4'),
    ]
    assert cli.main([*words, '--stop-at', '1']) == 75
    said = capsys.readouterr().out
    assert mentions(said, 'config.model', 'vit')
    assert 'config.data.transforms: inception_crop(32' in said
    assert mentions(said, 'train[:80% per class]', 'train[80%:')
    assert says([line for line in said.splitlines() if 'head: ' in line], '7 classes', 'by 2')
    stored = json.loads((run / 'config.json').read_text())
    assert options.flat_fields(stored['model']).items() >= {'name': 'vit', **MODEL}.items()
    assert '{' not in json.dumps([stored['data'], stored['evals']]).replace('{"', '')
    path.unlink()
    assert cli.main(words) == 0
    assert 'resumes after step 1' in capsys.readouterr().out
    assert 'val/accuracy' in json.loads((run / 'result.json').read_text())
    assert json.loads((run / 'config.json').read_text()) == stored
    assert cli.main(['predict', '--workdir', str(run), f'{place}/flowers/rose/0.png']) == 0
    assert 'tulip' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('overrides', 'words'),
    [
        (['data.source=', 'init.from='], "'init.from'"),
        (['model.widht=16'], ('config.model', "'widht'", "'width'")),
        (['model.width=wide'], "config.model.width='wide'"),
        (['init.from=none.npz'], ('none.npz', 'no such file')),
        (['data.split=train'], 'config.evals.val.split'),
        (['task.name=reconstruct'], ("'classify'", 'config.task')),
        (['task.name=detect'], 'hf://facebook/detr-resnet-50'),
    ],
)
def test_what_contradicts_is_refused_in_one_line(auto, overrides, words):
    with pytest.raises(UserError) as error:
        fine_tune.complete_config(auto(*overrides))
    assert mentions(str(error.value), words)
    assert '\n' not in str(error.value)


def test_another_size_of_the_model_is_refused_before_a_folder_is_made(
    repo, place, tmp_path, capsys
):
    words = [
        *('train', '--config', f'{repo}/experiments/vit/finetune.py:auto'),
        *(f'--config.data.source=folder:{place}/flowers', '--config.model.width=32'),
        '--config.batch_size=8',
        *(f'--config.init.from={place}/vit.npz', '--workdir', str(tmp_path / 'run')),
    ]
    assert cli.main(words) == 2
    assert mentions(capsys.readouterr().err, 'head.representation_size=20', 'width=16')
    assert not (tmp_path / 'run').exists()


def test_a_value_of_the_users_counts(auto):
    config = fine_tune.complete_config(
        auto('model.dropout=0.1', 'data.transforms=resize(16)')
    ).config
    assert (config.model.dropout, config.model.width) == (0.1, 16)
    assert config.data.transforms == 'resize(16)'


def test_larger_images(auto):
    completed = fine_tune.complete_config(auto('batch_size=8', arg='auto,48'))
    config = completed.config
    assert config.data.transforms == "inception_crop(48, method='bilinear')|flip"
    # A run says the size that it trains, not the checkpoint's 32.
    assert completed.notes[1:3] == (
        f'config.data.transforms: {config.data.transforms}',
        "config.evals.val.transforms: resize_small(48, 'bilinear')|central_crop(48)",
    )
    assert build(config, jax.devices()[:1]).data.image_size == (48, 48)


def test_files_say_how_images_are_resized(auto, place):
    module = vit.Model(**VIT)
    model = {'name': 'vit', **fields(module)}
    interop.write(
        TrainedModel.from_file(drawn(module), model, (32, 32), 'test'), place / 'released'
    )
    path = place / 'released' / 'preprocessor_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'resample': 3}))
    config = fine_tune.complete_config(auto(checkpoint='released')).config
    assert stored_model(config) == dict(MODEL, num_classes=None)
    assert config.evals.val.transforms == "drop_alpha|resize((32, 32), 'bicubic')"
    assert config.data.transforms == "drop_alpha|inception_crop(32, method='bicubic')|flip"
    crop = {'size': {'shortest_edge': 30}, 'crop_size': 24, 'do_center_crop': True}
    path.write_text(json.dumps(json.loads(path.read_text()) | crop))
    config = fine_tune.complete_config(auto('batch_size=8', checkpoint='released')).config
    assert config.data.transforms == "drop_alpha|inception_crop(24, method='bicubic')|flip"
    assert build(config, jax.devices()[:1]).data.image_size == (24, 24)
    larger = fine_tune.complete_config(auto(checkpoint='released', arg='auto,48')).config
    assert larger.data.transforms == "drop_alpha|inception_crop(48, method='bicubic')|flip"
    assert larger.evals.val.transforms.startswith('drop_alpha|resize_small(48')


def test_the_validation_split_of_the_data(auto, place, tmp_path):
    for split in ('train', 'val', 'test'):
        (tmp_path / split).symlink_to(place / 'flowers')
    found = fine_tune.complete_config(auto(f'data.source=folder:{tmp_path}'))
    assert (found.config.data.split, found.config.evals.val.split) == ('train', 'val')
    assert found.config.evals.val.source == f'folder:{tmp_path}'
    assert says(found.notes[-1], f'folder:{tmp_path}', 'trains on train', 'evaluates on val')


def test_a_validation_split_that_cannot_be_read_is_refused(auto, place, tmp_path):
    (tmp_path / 'train').symlink_to(place / 'flowers')
    (tmp_path / 'val' / 'rose').mkdir(parents=True)
    with pytest.raises(UserError, match=r'no image \(.*\) below .*/val'):
        fine_tune.complete_config(auto(f'data.source=folder:{tmp_path}'))


def test_the_encoder_of_a_masked_autoencoder(auto, place):
    sizes = dict(patch_size=8, width=16, depth=1, mlp_dim=24, num_heads=2)
    decoder = dict(decoder_width=16, decoder_depth=1, decoder_mlp_dim=24, decoder_heads=2)
    module = mae.Model(**sizes, **decoder)
    model = {'name': 'mae', **fields(module)}
    trained = TrainedModel.from_file(
        drawn(module), model, (32, 32), 'test', task={'name': 'reconstruct'}
    )
    interop.write(trained, place / 'mae')
    config = fine_tune.complete_config(auto('batch_size=8', checkpoint='mae')).config
    assert {key: config.model[key] for key in sizes} == sizes
    assert (config.model.name, config.model.num_classes) == ('vit', None)
    training = build(config, jax.devices()[:1])
    origin = find_origin(training)
    assert {'patch_embed', 'encoder'} <= origin.params.keys()
    assert 'head' not in origin.params


@pytest.mark.slow
def test_a_run(auto, smoke_run):
    config = fine_tune.complete_config(auto(f'init.from={smoke_run}')).config
    before = json.loads((smoke_run / 'config.json').read_text())['model']
    before, now = (options.flatten_fields(vit.Model, x) for x in (before, config.model.to_dict()))
    kept = ('name', 'patch_size', 'width', 'depth', 'num_heads', 'pool.kind', 'positions.embed')
    assert [now[key] for key in kept] == [before[key] for key in kept]
    assert config.model.num_classes is None
    assert config.evals.val.transforms == 'resize_small(8)|central_crop((8, 8))'


def own_masks(repo, checkpoint, *overrides):
    given = ['data.source=scenes_panoptic:20', 'data.split=train', 'evals.val.split=test[:4]']
    path = f'{repo}/experiments/eomt/finetune.py:auto'
    return config_lib.load(path, [*given, f'init.from={checkpoint}', *overrides])


@pytest.mark.slow
def test_an_eomt_is_made_of_a_vit(repo, place):
    """The encoder, its fields and its normalization are the checkpoint's, the rest starts anew."""
    config = own_masks(repo, place / 'vit.npz', 'model.query_blocks=1', 'model.dtype=float32')
    completed = fine_tune.complete_config(config)
    made = completed.config
    assert mentions(completed.notes[:1], 'config.model', 'eomt', 'vit')
    model = {'name': 'eomt', 'width': 16, 'patch_size': 8, 'depth': 1}
    assert made.model.to_dict().items() >= model.items()
    parts = {'patch_embed', 'cls_token', 'pos_embed', 'encoder'}
    assert set(made.init.select.split(',')) == parts
    assert made.task.mean == made.task.std == (0.5,) * 3
    assert 'sliding_windows(32)' in made.evals.val.transforms
    training = build(made, jax.devices()[:1])
    origin = find_origin(training, checkpoint=completed.checkpoint)
    kernel = completed.checkpoint.params['encoder']['block_0']['mlp']['fc1']['kernel']
    np.testing.assert_array_equal(
        origin.params['encoder']['block_0']['mlp']['fc1']['kernel'], kernel
    )
    assert 'query_embed' not in origin.params


def test_what_no_eomt_is_made_of(repo, place):
    for changes, message in (
        (['init.into=eoomt'], r"unknown model name 'eoomt'; .* 'eomt'"),
        (['init.into=swin'], 'config.init.into=swin: .* vit'),
    ):
        with pytest.raises(UserError, match=message):
            fine_tune.complete_config(own_masks(repo, place / 'vit.npz', *changes))
