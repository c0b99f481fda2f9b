"""Checkpoints on the Hugging Face Hub, in a server on this machine that speaks its protocol."""

import json
import os
import pathlib
import warnings

import numpy as np
import pytest
from helpers import mounts
from helpers.hub_server import Hub, serve
from helpers.messages import says

from vit_jax import extras
from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.interop import files, hub
from vit_jax.storage import servers

REPO = 'google/vit-tiny-patch4-8'
URL = f'hf://{REPO}'
CONFIG = {'model_type': 'vit', 'num_attention_heads': 2}
ARRAYS = {'x.weight': np.arange(3000.0, dtype=np.float32)}


@pytest.fixture
def content(tmp_path):
    """The files of a repository as transformers writes them."""
    files.write_safetensors(tmp_path / 'w', ARRAYS, CONFIG, {'image_mean': [0.5]})
    names = ('config.json', 'preprocessor_config.json', 'model.safetensors')
    extra = {'README.md': b'# a card', 'pytorch_model.bin': b'pickled', 'tf_model.h5': b'h5'}
    return {name: (tmp_path / 'w' / name).read_bytes() for name in names} | extra


@pytest.fixture
def server(tmp_path, content):
    with serve(Hub(), tmp_path / 'hub') as served:
        served.add(REPO, content)
        yield served


def one_line(url, *words, code=2):
    with pytest.raises(UserError) as error:
        files.read_arrays(url)
    assert getattr(error.value, 'exit_code', 2) == code, '1 if time may mend it'
    message = str(error.value)
    assert '\n' not in message and message.startswith(url.split('@')[0].removesuffix('/none'))
    for word in words:
        assert word in message
    return message


def assert_read(url, config=CONFIG):
    flat, extra = files.read_arrays(url)
    np.testing.assert_array_equal(flat['x.weight'], ARRAYS['x.weight'])
    assert extra.items() >= config.items()
    return extra


def test_first_a_download_then_the_cache(server):
    assert assert_read(URL)['preprocessor_config.json'] == {'image_mean': [0.5]}
    assert server.downloads() == ['model.safetensors']
    server.requests.clear()
    assert_read(URL)
    assert server.downloads() == []
    assert {r for r in server.requests if '/resolve/' in r} == {
        f'HEAD /{REPO}/resolve/main/config.json'
    }


def test_revisions(server, content):
    old = server.add(REPO, {**content, 'config.json': b'{"old": 1}'}, 'v1')
    for url in (f'{URL}@v1', f'{URL}@{old}', f'https://huggingface.co/{REPO}/tree/v1'):
        assert_read(url, {'old': 1})
    assert 'old' not in assert_read(URL)


@pytest.mark.parametrize(
    ('path', 'is_model'),
    [
        ('hf://a/b', True),
        ('https://hf.co/a/b', True),
        ('https://huggingface.co/a/b/resolve/main/model.safetensors?download=true', True),
        ('https://huggingface.co/datasets/a/b/resolve/main/model.safetensors', False),
        ('https://huggingface.com/a/b', False),
        ('a/b', False),
    ],
)
def test_names_of_models(path, is_model):
    assert hub.matches(path) == is_model


@pytest.mark.parametrize('place', ['', '/sub', '/sub/model.safetensors'])
def test_files_and_folders_of_a_repository(place, server, content):
    inside = {f'sub/{name}': c for name, c in content.items()}
    server.add('a/b', inside if place else content)
    assert_read(f'hf://a/b{place}')


def test_an_npz_of_a_part(server, tmp_path):
    files.write_npz(tmp_path / 'a.npz', {'img/a': np.ones(2), 'txt/b': np.zeros(1)})
    server.add('a/jax', {'a.npz': (tmp_path / 'a.npz').read_bytes()})
    for url in ('hf://a/jax/a.npz:img', 'https://huggingface.co/a/jax/blob/main/a.npz:img'):
        assert files.read_arrays(url)[0].keys() == {'a'}
    assert files.read_arrays('hf://a/jax')[0].keys() == {'img/a', 'txt/b'}


def test_shards(server, content, tmp_path):
    del content['model.safetensors']
    names = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
    for name in names:
        files.write_safetensors(tmp_path / name, {name: np.ones(2)})
        content[name] = (tmp_path / name).read_bytes()
    index = {'weight_map': {name: name for name in names}}
    content['model.safetensors.index.json'] = json.dumps(index).encode()
    server.add('a/shards', content)
    assert list(files.read_arrays('hf://a/shards')[0]) == names
    assert server.downloads() == names


def test_a_single_file_is_read_beside_shards_and_variants(server, content, tmp_path):
    """As transformers does; a variant is read if it is named."""
    files.write_safetensors(tmp_path / 'a.safetensors', {'x.weight': np.zeros(3000, np.float32)})
    other, shard = (tmp_path / 'a.safetensors').read_bytes(), 'model-00001-of-00001.safetensors'
    index = json.dumps({'weight_map': {'x.weight': shard}}).encode()
    files.write_safetensors(tmp_path / 'a.safetensors', {'x.weight': np.full(3000, 0.5)})
    old = {shard: other, 'model.safetensors.index.json': index}
    old['model.fp16.safetensors'] = (tmp_path / 'a.safetensors').read_bytes()
    server.add('a/b', content | old)
    assert_read('hf://a/b')
    assert server.downloads() == ['model.safetensors']
    assert files.read_arrays('hf://a/b/model.fp16.safetensors')[0]['x.weight'][0] == 0.5
    del content['model.safetensors']
    server.add('a/b', content | old)
    assert not files.read_arrays('hf://a/b')[0]['x.weight'].any()
    assert shard in server.downloads()


@pytest.mark.parametrize(
    ('names', 'words'),
    [
        (['a.safetensors', 'b.safetensors'], ['several', 'hf://a/b/a.safetensors']),
        (['pytorch_model.bin', 'config.json'], ['pickled', 'pytorch_model.bin', 'refs/pr/1']),
        (['model.fp16.safetensors'], ['only variants', 'hf://a/b/model.fp16.safetensors']),
        (['README.md'], ['has no .safetensors or .npz file (README.md)']),
    ],
)
def test_repositories_without_weights_to_read(names, words, server):
    server.add('a/b', dict.fromkeys(names, b'x'))
    one_line('hf://a/b', *words)
    assert server.downloads() == []


@pytest.mark.parametrize(
    ('url', 'words'),
    [
        ('hf://google/vit-tiny-patch4-88', ['no such repository', f'did you mean {URL}?', 'auth']),
        ('hf://google/resnet', ['repository', 'private']),
        (f'{URL}@mian', ['revision', "'mian'"]),
        (f'{URL}/model.safetensor', ['no such file', 'did you mean model.safetensors?']),
        (f'{URL}/none', ['no such file', 'README.md, config.json, ']),
        ('hf://google', ['write hf://ORG/NAME']),
        ('hf:///', ['write hf://ORG/NAME']),
        ('hf://datasets/google/flowers', ['write hf://ORG/NAME']),
    ],
)
@pytest.mark.fault(89)
def test_names_that_the_hub_does_not_have(url, words, server):
    one_line(url, *words)
    assert server.downloads() == []


@pytest.mark.fault(89)
def test_a_gated_repository_takes_a_token(server, monkeypatch):
    server.gated.add(REPO)
    one_line(URL, 'gated', f'https://huggingface.co/{REPO}', 'hf auth login', 'HF_TOKEN')
    monkeypatch.setenv('HF_TOKEN', server.token)
    assert_read(URL)


@pytest.mark.fault(90)
def test_a_connection_that_breaks_is_resumed(server, content, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    monkeypatch.setattr('huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE', 1000)
    server.cut = 5000
    assert_read(URL)
    assert server.sent == len(content['model.safetensors']), 'the rest, not everything again'


@pytest.mark.fault(90)
def test_a_connection_that_always_breaks_is_one_line(server, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    server.cut, server.cuts = 0, 100
    one_line(URL, 'cannot be downloaded', code=1)
    server.cut = None
    # The branch is recorded last: without the weights there is nothing to work with offline.
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    one_line(URL, 'cache')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    assert_read(URL)


@pytest.mark.fault(90)
def test_other_bytes_than_announced_are_not_kept(server, tmp_path):
    server.swapped = True
    one_line(URL, 'download', 'model.safetensors', code=1)
    kept = [p for p in (tmp_path / 'hub').rglob('*') if p.stat().st_size > 5000]
    assert kept == []
    server.swapped = False
    assert_read(URL)


@pytest.mark.parametrize('odd', [False, True])
@pytest.mark.parametrize('name', ['model.safetensors', 'config.json'])
@pytest.mark.fault(90)
def test_a_copy_damaged_in_the_cache_is_downloaded_anew(name, odd, server, monkeypatch):
    """Also one whose name in the cache, the ETag of a mirror, is no checksum."""
    server.odd = odd
    folder = pathlib.Path(hub.fetch(URL))
    damaged = bytearray((folder / name).read_bytes())
    damaged[-3] ^= 1
    (folder / name).resolve().write_bytes(damaged)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    one_line(URL, name, 'damaged', 'cache', 'HF_HUB_OFFLINE is set')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    for _ in range(2):
        assert_read(URL)
    assert server.downloads().count('model.safetensors') == (2 if name != 'config.json' else 1)


@pytest.mark.fault(90)
def test_a_cache_without_links_keeps_checksums_too(server, monkeypatch):
    monkeypatch.setattr('huggingface_hub.file_download.are_symlinks_supported', lambda *args: False)
    folder = pathlib.Path(hub.fetch(URL))
    file = folder / 'model.safetensors'
    assert not file.is_symlink()
    file.write_bytes(file.read_bytes()[:-1] + b'!')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    one_line(URL, 'model.safetensors', 'damaged')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    assert_read(URL)


@pytest.mark.fault(90)
def test_a_mirror_s_list_of_checksums_is_compared_at_the_first_use(server, monkeypatch):
    server.odd = server.listed = server.swapped = True
    one_line(URL, 'download', 'model.safetensors', code=1)
    server.swapped = False
    assert_read(URL)


@pytest.mark.fault(91)
def test_offline_the_cache_is_enough(server, monkeypatch):
    assert_read(URL)
    server.requests.clear()
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert_read(URL)
    one_line(f'{URL}@other', 'cache', 'HF_HUB_OFFLINE is set')
    one_line('hf://google/other', 'cache', 'HF_HUB_OFFLINE is set')
    assert server.requests == []


@pytest.mark.parametrize(
    'endpoint',
    ['http://127.0.0.1:9', pytest.param('https://nowhere.invalid', marks=pytest.mark.long)],
)
@pytest.mark.fault(91)
def test_without_a_network_the_cache_is_enough(endpoint, server, monkeypatch):
    assert_read(URL)
    monkeypatch.setattr(servers, 'TRIES', 1)
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', endpoint)
    for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy'):
        monkeypatch.delenv(name, raising=False)
    assert_read(URL)
    one_line('hf://google/other', 'cache', 'nothing answers', 'connected', code=1)


@pytest.mark.fault(92)
def test_a_full_disk(server, content, tmp_path, monkeypatch):
    with mounts.small_disk(tmp_path / 'small', 8192) as small:
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(small))
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            one_line(URL, 'No space left', 'HF_HOME')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'hub'))
    assert_read(URL)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(os.sys.modules, 'huggingface_hub', None)
    one_line(URL, 'huggingface_hub', "'.[hub]'")
    assert extras.named_by_urls([f'--config.init.from={URL}']) == {'hub'}


def test_a_name_without_its_scheme_gets_a_hint(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['inspect', '--checkpoint', 'my-lab/segmenter']) == 2
    assert says(capsys.readouterr().err, 'no such file', 'hf://my-lab/segmenter')
