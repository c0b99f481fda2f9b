"""The table of released checkpoints, and their short names."""

import json

import pytest
from helpers import hub_server
from helpers.messages import mentions, says
from helpers.released_models import count

from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.interop import files, hub
from vit_jax.rehearsal import rehearsal
from vit_jax.storage import cache
from vit_jax.storage.model_ref import BUCKETS, ModelRef

B16 = 'augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0'
TABLE = hub.released_table()
# One checkpoint for every model and size.
MODELS = {json.dumps((one.model, one.image_size)): one for one in TABLE if one.model}


def test_names_are_unique_and_numbers_have_a_source():
    assert len({one.name for one in TABLE}) == len(TABLE)
    for one in TABLE:
        assert one.source.startswith('https://') and one.trained_on
        assert bool(one.metric) == (one.accuracy is not None)
        assert one.name.startswith(('hf://', 'gs://')) or one.name.split('/')[0] in BUCKETS
        if one.name.startswith('hf://'):
            assert hub.matches(one.name)


@pytest.mark.parametrize('name', [B16, 'hf://google/vit-base-patch16-224', 'distill/R50x1_160'])
def test_parameters_are_those_of_the_model(name):
    (one,) = (one for one in TABLE if one.name == name)
    assert count(one.model, one.image_size) == one.parameters


@pytest.mark.long
@pytest.mark.slow
def test_parameters_are_those_of_every_model():
    for one in MODELS.values():
        assert count(one.model, one.image_size or 224) == one.parameters, one


@pytest.mark.parametrize(
    ('path', 'url'),
    [
        (B16, f'gs://vit_models/{B16}.npz'),
        (f'{B16}.npz', f'gs://vit_models/{B16}.npz'),
        ('augreg/not-in-the-table', 'gs://vit_models/augreg/not-in-the-table.npz'),
        ('siglip2/siglip2_b16_224:img', 'gs://big_vision/siglip2/siglip2_b16_224.npz'),
        ('distill/R50x1_160', 'gs://bit_models/distill/R50x1_160.npz'),
        ('augreg', 'augreg'),
        ('runs/augreg', 'runs/augreg'),
        ('gs://vit_models/augreg/a.npz', 'gs://vit_models/augreg/a.npz'),
        ('', ''),
    ],
)
def test_short_names(path, url):
    assert ModelRef.parse(path).locate()[0] == url


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_npz(tmp_path / 'augreg' / 'own.npz', {'a': 1.0, 'b/c': 2.0})
    assert files.read_arrays('augreg/own.npz')[0].keys() == {'a', 'b/c'}
    assert files.read_arrays('augreg/own.npz:b')[0].keys() == {'c'}


def test_a_short_name_is_read_from_its_bucket(tmp_path, monkeypatch):
    """A name that is not in the table works as well."""
    asked = []

    def download(url, names, needed):
        asked.append((url, *names))
        files.write_npz(tmp_path / names[0], {'img/a': 1.0, 'txt/b': 2.0})
        return tmp_path

    monkeypatch.setattr(cache, 'download', download)
    assert files.read_arrays('siglip/another:img')[0].keys() == {'a'}
    assert asked == [('gs://big_vision/siglip', 'another.npz')]


@pytest.mark.parametrize(
    ('path', 'near'),
    [
        ('ViT-B_16', 'imagenet21k/ViT-B_16'),
        ('vit-base-patch16-224', 'hf://google/vit-base-patch16-224'),
        ('google/vit-base-patch16-224', 'hf://google/vit-base-patch16-224'),
        ('siglip2_b16_224', 'siglip2/siglip2_b16_224:img'),
        ('openai/clip-vit-base-patch32', 'hf://openai/clip-vit-base-patch32'),
        (B16.replace('medium1', 'medium'), B16),
        (f'gs://vit_models/{B16.replace("medium1", "medium")}.npz', B16),
        ('runs/a', ''),
        ('', ''),
    ],
)
def test_the_nearest_name(path, near):
    assert hub.nearest_released(path) == near


@pytest.mark.fault(94)
def test_a_wrong_name_gets_the_nearest(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(['inspect', '--checkpoint', 'ViT-B_16']) == 2
    said = capsys.readouterr().err
    assert says(said, 'no such file', 'folder', 'imagenet21k/ViT-B_16')

    assert main(['inspect', '--checkpoint', 'ViT-B_16.npz']) == 2
    assert mentions(capsys.readouterr().err, 'no such file', 'imagenet21k/ViT-B_16')

    def missing(url, names, needed):
        raise cache.MissingFile(f'{url}/{names[0]}: there is no such file')

    monkeypatch.setattr(cache, 'download', missing)
    with pytest.raises(UserError, match=f'no such file.*{B16}'):
        files.local_path(ModelRef.parse(B16.replace('medium1', 'medium')).locate()[0])


def test_the_hub_is_asked_for_names_beside_the_table(tmp_path):
    with hub_server.serve(hub_server.Hub(), tmp_path), pytest.raises(UserError) as error:
        hub.fetch('hf://google/vit-bse-patch16-224')
    assert mentions(str(error.value), 'hf://google/vit-base-patch16-224')


def test_a_rented_machine_gets_what_a_short_name_needs(repo):
    config = load.load(f'{repo}/experiments/vit/digits.py:smoke', [f'init.from={B16}'])
    assert rehearsal.needed_extras(load.to_run(config)) == {'gcs'}
