"""SigLIP 2 NaFlex of transformers: logits of images of mixed sizes agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.transformers_naflex import both_logits, reference
from PIL import Image

from vit_jax import interop
from vit_jax.data.transforms import parse_transforms
from vit_jax.data.transforms.image import cut_patches, grid_within
from vit_jax.errors import UserError
from vit_jax.inference.images import photo_reader
from vit_jax.inference.load import open_model
from vit_jax.interop import files

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')


@pytest.fixture(scope='module')
def model():
    return reference()


@pytest.fixture(scope='module')
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp('siglip2')
    model.save_pretrained(folder)
    return folder


@pytest.mark.parity
def test_logits_of_mixed_sizes_are_those_of_transformers(saved, model):
    expected, found = both_logits(model, saved)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert float(np.std(found)) > 1e-3  # the parameters matter


def test_files_of_any_size_are_read_by_the_model(saved, tmp_path):
    trained = open_model(saved)
    fields = trained.model_config
    assert (fields['name'], fields['pos_grid'], fields['patch_size']) == ('siglip_naflex', 5, 4)
    assert trained.transforms == 'drop_alpha|fit_patches(4, 256)'
    Image.fromarray(np.zeros((30, 90, 3), np.uint8)).save(tmp_path / 'wide.png')
    photo = photo_reader(trained).read(tmp_path / 'wide.png')
    height, width = photo.image.shape[:2]
    assert (height // 4) * (width // 4) <= 256 < (height // 4 + 1) * (width // 4 + 1)
    batch = {'image': jnp.asarray(photo.image[None])}
    made = jax.eval_shape(
        lambda variables: trained.model.apply(variables, trained.task.inputs(batch)[0]),
        trained.variables,
    )
    assert made['image'].shape == (1, 16)


def test_what_is_written_is_what_was_read(saved, model, tmp_path):
    made = interop.read(saved)
    fit = {**made.config.data, 'transforms': 'fit_patches(4, 20)'}
    assert interop.write(made.with_groups(data=fit), tmp_path) == ()
    theirs = transformers.Siglip2Model.from_pretrained(tmp_path)
    for name, array in model.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], array, rtol=0, atol=1e-7, msg=name)
    assert theirs.config.vision_config.num_patches == 25
    again = interop.read(tmp_path)
    assert again.model_config == made.model_config
    assert again.transforms == 'drop_alpha|fit_patches(4, 20)'
    image = np.random.default_rng(0).integers(0, 256, (9, 23, 3), np.uint8)
    patches = transformers.AutoImageProcessor.from_pretrained(tmp_path)(
        Image.fromarray(image), return_tensors='pt'
    )
    grid = grid_within(9, 23, 20)
    assert tuple(patches['spatial_shapes'][0].tolist()) == grid
    fitted = parse_transforms('fit_patches(4, 20)')({'image': image}, None)['image']
    ours = cut_patches(fitted, 4)
    found = patches['pixel_values'][0, : len(ours)].numpy()
    np.testing.assert_allclose(found, ours / 127.5 - 1, atol=2.1 / 127.5)


@pytest.mark.parametrize(
    ('arrays', 'config', 'words'),
    [
        ({'vision_model.head.probe': None}, {}, 'vision_model.head.probe'),
        ({'text_model.more': np.zeros(1)}, {}, 'no part called more'),
        (
            {'vision_model.embeddings.position_embedding.weight': np.zeros((24, 16))},
            {},
            'positions do not form a square',
        ),
        (
            {'vision_model.embeddings.patch_embedding.weight': np.zeros((16, 50))},
            {},
            '50 values do not form a square patch',
        ),
        ({}, {'model_type': 'clip'}, "config.json .*'clip'.*siglip2"),
    ],
)
def test_files_that_are_not_whole(saved, tmp_path, arrays, config, words):
    flat, extra = files.read_arrays(saved)
    flat = {name: a for name, a in (flat | arrays).items() if a is not None}
    files.write_safetensors(tmp_path, flat, extra | config)
    with pytest.raises(UserError, match=words) as error:
        interop.read(tmp_path)
    assert '\n' not in str(error.value)
