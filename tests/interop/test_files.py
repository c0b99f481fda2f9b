"""Checkpoint files: forms, parts, precision; whatever is damaged or pickled is one line."""

import json
import types
import zipfile

import fsspec
import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.storage import servers

ARRAYS = {'b/kernel': np.arange(6.0).reshape(2, 3), 'file': np.ones(4), 'a': np.float32(2)}


def assert_same(flat, expected):
    assert flat.keys() == expected.keys()
    for name, array in expected.items():
        assert flat[name].dtype == np.float32
        np.testing.assert_array_equal(flat[name], array)


def assert_one_line(path, *words):
    with pytest.raises(UserError) as error:
        files.read_arrays(path)
    message = str(error.value)
    assert '\n' not in message and str(path).split(':')[0] in message
    for word in words:
        assert word in message


def test_npz_comes_back_and_leaves_nothing_else(tmp_path):
    files.write_npz(tmp_path / 'new' / 'a.npz', ARRAYS)
    flat, extra = files.read_arrays(tmp_path / 'new' / 'a.npz')
    assert_same(flat, ARRAYS)
    assert extra == {}
    assert [p.name for p in (tmp_path / 'new').iterdir()] == ['a.npz']
    with np.load(tmp_path / 'new' / 'a.npz') as plain:
        assert set(plain.files) == set(ARRAYS)


@pytest.mark.parametrize('name', ['folder', 'folder/weights.safetensors'])
def test_safetensors_come_back_with_the_config(name, tmp_path):
    # A transposed view has to be stored as what it shows.
    arrays = {'x.weight': np.arange(6.0, dtype=np.float32).reshape(2, 3).T, 'y': np.ones(2)}
    files.write_safetensors(tmp_path / name, arrays, {'model_type': 'vit'})
    flat, extra = files.read_arrays(str(tmp_path / name))
    assert_same(flat, arrays)
    assert extra == {'model_type': 'vit'}
    assert len(list((tmp_path / 'folder').iterdir())) == 2


def test_half_precision_tensors(tmp_path):
    torch = pytest.importorskip('torch')
    package = pytest.importorskip('safetensors.torch')
    tensors = {'a': torch.tensor([1.5, -2.0]).bfloat16(), 'b': torch.tensor([0.25]).half()}
    package.save_file(tensors, tmp_path / 'a.safetensors')
    flat, extra = files.read_arrays(tmp_path / 'a.safetensors')
    assert_same(flat, {'a': np.array([1.5, -2.0]), 'b': np.array([0.25])})
    assert extra == {}


def test_shards(tmp_path):
    files.write_safetensors(tmp_path / '1.safetensors', {'a': np.ones(2)})
    files.write_safetensors(tmp_path / '2.safetensors', {'b': np.zeros(3)})
    index = {'weight_map': {'a': '1.safetensors', 'b': '2.safetensors'}}
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert_same(files.read_arrays(tmp_path)[0], {'a': np.ones(2), 'b': np.zeros(3)})
    index['weight_map']['c'] = '2.safetensors'
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert_one_line(tmp_path, 'c is listed')
    (tmp_path / 'model.safetensors.index.json').write_text('{}')
    assert_one_line(tmp_path, 'no weight_map')


@pytest.mark.fault(113)
def test_the_file_that_transformers_reads(tmp_path):
    """Beside a single file an index is an old one, and config.json may name another file."""
    for name in ('model', '1', 'model.fp16', 'other'):
        files.write_safetensors(
            tmp_path / f'{name}.safetensors', {'a': np.full(2, float(len(name)))}
        )
    index = {'weight_map': {'a': '1.safetensors'}}
    for name in ('model.safetensors.index.json', 'mine.safetensors.index.json'):
        (tmp_path / name).write_text(json.dumps(index))

    def read(name=None):
        config = {} if name is None else {'transformers_weights': name}
        (tmp_path / 'config.json').write_text(json.dumps(config))
        return files.read_arrays(tmp_path)[0]['a'][0]

    assert read() == len('model')
    assert read('other.safetensors') == len('other')
    assert read('mine.safetensors.index.json') == len('1')
    (tmp_path / 'model.safetensors').unlink()
    assert read() == len('1')
    (tmp_path / 'model.safetensors.index.json').unlink()
    (tmp_path / 'config.json').unlink()
    assert_one_line(tmp_path, 'neither model.safetensors nor')
    (tmp_path / 'config.json').write_text('{"transformers_weights": "../a.safetensors"}')
    assert_one_line(tmp_path, 'transformers_weights', "'../a.safetensors'")


@pytest.mark.fault(113)
def test_the_single_file_of_a_bucket_is_read_beside_an_index(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    remote = fsspec.filesystem('memory')
    files.write_safetensors(tmp_path / 'new', {'a': np.ones(2)})
    files.write_safetensors(tmp_path / 'old.safetensors', {'a': np.zeros(2)})
    index = json.dumps({'weight_map': {'a': 'old.safetensors'}})
    remote.pipe('/both/model.safetensors.index.json', index.encode())
    remote.put(str(tmp_path / 'old.safetensors'), '/both/old.safetensors')
    assert not files.read_arrays('memory://both')[0]['a'].any()
    remote.put(str(tmp_path / 'new' / 'model.safetensors'), '/both/model.safetensors')
    assert files.read_arrays('memory://both')[0]['a'].all()


def test_urls(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    remote = fsspec.filesystem('memory')
    files.write_npz(tmp_path / 'a.npz', {'img/a': np.ones(2), 'txt/b': np.zeros(1)})
    files.write_safetensors(tmp_path / 'folder', {'x': np.ones(3)}, {'k': 1})
    remote.put(str(tmp_path / 'a.npz'), '/models/a.npz')
    remote.put(str(tmp_path / 'folder'), '/models/folder', recursive=True)
    assert_same(files.read_arrays('memory://models/a.npz:img')[0], {'a': np.ones(2)})
    for name in ('folder', 'folder/model.safetensors'):
        flat, extra = files.read_arrays(f'memory://models/{name}')
        assert_same(flat, {'x': np.ones(3)})
        assert extra == {'k': 1}
    assert_one_line('memory://models/none.npz', 'no such file')
    assert_one_line('memory://models/none', 'no such file')


def test_a_protocol_without_its_package(monkeypatch):
    def missing(*args, **kwargs):
        raise ImportError('Please install gcsfs\nto access Google Storage')

    monkeypatch.setattr(servers, 'require_answer', lambda scheme: None)
    monkeypatch.setattr(fsspec.core, 'url_to_fs', missing)
    assert_one_line('gs://bucket/a.npz', 'gs://', "'.[gcs]'")
    assert_one_line('abfs://bucket/folder', 'Please install gcsfs')


def test_parameters_of_a_training_state(tmp_path):
    for prefix in ('params', 'opt/target', 'optimizer/target'):
        arrays = {f'{prefix}/a/b': np.ones(2), 'opt/state/step': np.zeros(1), 'chrono': np.ones(1)}
        files.write_npz(tmp_path / 'a.npz', arrays)
        assert_same(files.read_arrays(tmp_path / 'a.npz')[0], {'a/b': np.ones(2)})


class Harmful:
    """Would run code if it were unpickled."""

    def __reduce__(self):
        return (pytest.fail, ('it was unpickled',))


def test_pickles_are_refused(tmp_path):
    objects = np.array([Harmful()], dtype=object)
    np.savez(tmp_path / 'objects.npz', a=np.ones(1), b=objects)
    assert_one_line(tmp_path / 'objects.npz', 'pickled objects', 'not supported')
    np.save(tmp_path / 'a.npy', objects)
    (tmp_path / 'a.npy').rename(tmp_path / 'pickle.npz')
    assert_one_line(tmp_path / 'pickle.npz', 'not an .npz file')
    for suffix in ('pkl', 'pickle'):
        assert_one_line(tmp_path / f'a.{suffix}', 'pickled')


def test_files_of_torch(tmp_path):
    """Of any precision and layout, in any container, beside objects of other packages."""
    torch = pytest.importorskip('torch')
    base = torch.arange(12.0).reshape(3, 4)
    module = torch.nn.Linear(2, 3)
    content = {
        'model': {'a.weight': base.T, 'b': base[1:, ::2], 'c': base.to(torch.bfloat16)},
        'linear': module,
        'weights': module.state_dict(),
        'averages': [torch.ones(0, 2), torch.tensor(2.0, dtype=torch.float64)],
        'args': types.SimpleNamespace(lr=0.1, path=tmp_path),
        'step': torch.tensor(3),
    }
    torch.save(content, tmp_path / 'a.pth')
    (tmp_path / 'a.pth').rename(tmp_path / 'a.ckpt')
    flat, _ = files.read_arrays(tmp_path / 'a.ckpt')
    layer = {name: array.detach().numpy() for name, array in module.state_dict().items()}
    assert_same(
        {name: array for name, array in flat.items() if not name.startswith('linear')},
        {
            **{'model.a.weight': base.T, 'model.b': base[1:, ::2], 'model.c': base},
            **{f'weights.{name}': array for name, array in layer.items()},
            **{'averages.0': np.ones((0, 2)), 'averages.1': 2.0, 'step': 3.0},
        },
    )


@pytest.mark.fault(37)
def test_torch_files_run_nothing(tmp_path):
    torch = pytest.importorskip('torch')
    torch.save({'a': torch.ones(2), 'b': Harmful()}, tmp_path / 'a.pth')
    assert_same(files.read_arrays(tmp_path / 'a.pth')[0], {'a': np.ones(2)})


@pytest.mark.parametrize('keep', [0, 10, 0.5, -1])
def test_torch_files_cut_short(keep, tmp_path):
    torch = pytest.importorskip('torch')
    torch.save({'a': torch.ones(1000)}, tmp_path / 'a.pth')
    content = (tmp_path / 'a.pth').read_bytes()
    (tmp_path / 'a.pth').write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    assert_one_line(tmp_path / 'a.pth', 'torch')


def test_tensors_stay_inside_of_their_storage(tmp_path):
    torch = pytest.importorskip('torch')
    torch.save({'a': torch.arange(4.0)}, tmp_path / 'a.pth')
    damaged = tmp_path / 'b.pth'
    with zipfile.ZipFile(tmp_path / 'a.pth') as old, zipfile.ZipFile(damaged, 'w') as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, content[:4] if name.endswith('data/0') else content)
    assert_one_line(damaged, 'exceeds its storage')


@pytest.mark.parametrize('keep', [0, 10, 0.5, -1])
def test_files_cut_short(keep, tmp_path):
    rng = np.random.default_rng(0)
    files.write_npz(tmp_path / 'a.npz', {'a': rng.normal(size=1000), 'b': np.ones(9)})
    files.write_safetensors(tmp_path / 'a.safetensors', {'a': rng.normal(size=1000)})
    for path in (tmp_path / 'a.npz', tmp_path / 'a.safetensors'):
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else keep])
        assert_one_line(path, 'it again')


def test_damage_within_a_file(tmp_path):
    files.write_npz(tmp_path / 'a.npz', {'a': np.random.default_rng(0).normal(size=1000)})
    content = bytearray((tmp_path / 'a.npz').read_bytes())
    content[4000] ^= 255
    (tmp_path / 'a.npz').write_bytes(content)
    assert_one_line(tmp_path / 'a.npz', 'it again')


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / 'notes.txt').write_text('hello')
    np.savez(tmp_path / 'words.npz', a=np.array(['word']))
    assert_one_line(tmp_path / 'notes.txt', 'not a checkpoint')
    assert_one_line(tmp_path / 'words.npz', 'a has type <U4')
    assert_one_line(tmp_path / 'none.npz', 'no such file')
    assert_one_line(tmp_path / 'none.safetensors', 'no such file')
    assert_one_line(tmp_path / 'none', 'no such file', 'folder')
    assert_one_line(tmp_path, 'neither model.safetensors nor')


def test_a_config_that_is_no_json(tmp_path):
    files.write_safetensors(tmp_path, {'a': np.ones(1)})
    (tmp_path / 'config.json').write_text('{')
    with pytest.raises(UserError, match=r'config\.json: not valid JSON'):
        files.read_arrays(tmp_path)
    (tmp_path / 'config.json').write_text('[]')
    with pytest.raises(UserError, match='is not a JSON object'):
        files.read_arrays(tmp_path)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    files.write_npz(tmp_path / 'a.npz', ARRAYS)
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot be written'):
        files.write_npz(tmp_path / 'file' / 'a.npz', ARRAYS)

    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(np.lib.format, 'write_array', full)
    with pytest.raises(UserError, match='No space left on device'):
        files.write_npz(tmp_path / 'a.npz', {'x': np.ones(1)})
    monkeypatch.undo()
    assert_same(files.read_arrays(tmp_path / 'a.npz')[0], ARRAYS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a.npz', 'file']


@pytest.mark.parametrize(
    'array', [np.ones(2, np.complex64), np.array(['1.5']), np.array(['2020-01-01'], 'M8[D]')]
)
def test_arrays_that_are_no_real_numbers(array, tmp_path):
    np.savez(tmp_path / 'a.npz', x=array)
    assert_one_line(tmp_path / 'a.npz', 'x has type', str(array.dtype))


@pytest.mark.fault(114)
@pytest.mark.parametrize('dtype', ['int8', 'uint8', 'int16', 'int32', 'int64', 'bool'])
def test_integers_are_no_weights(dtype, tmp_path):
    """Neither with a config that says so nor without, in any form of file."""
    flat = {'block.weight': np.ones((4, 4), dtype), 'block.scale': np.ones(4, np.float32)}
    np.savez(tmp_path / 'a.npz', **flat)
    package = pytest.importorskip('safetensors.numpy')
    package.save_file(flat, tmp_path / 'model.safetensors')
    for place in (tmp_path / 'a.npz', tmp_path / 'model.safetensors', tmp_path):
        assert_one_line(place, f'block.weight has type {dtype}', 'not quantized')


@pytest.mark.fault(114)
@pytest.mark.parametrize('part', [None, 'text_config'])
def test_a_config_of_quantized_weights_is_refused(part, tmp_path, capsys):
    told = {'quantization_config': {'quant_method': 'bitsandbytes', 'load_in_8bit': True}}
    config = {'model_type': 'vit', **({part: told} if part else told)}
    files.write_safetensors(tmp_path / 'a', {'a.weight': np.ones(2, np.int8)}, config)
    assert main(['inspect', '--checkpoint', str(tmp_path / 'a')]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'quantization_config: quantized weights (bitsandbytes)' in line
    assert 'config.json' in line


def test_tables_and_counters_are_integers(tmp_path):
    """Of a training state only the parameters are read, whatever lies beside them."""
    tables = {'position_ids': np.arange(3), 'attn.relative_position_index': np.ones(2, np.int64)}
    files.write_safetensors(tmp_path / 'a.safetensors', tables | {'bn.seen': np.int64(7)})
    flat, _ = files.read_arrays(tmp_path / 'a.safetensors')
    assert {array.dtype for array in flat.values()} == {np.dtype(np.float32)}
    assert flat['bn.seen'] == 7
    np.savez(tmp_path / 'a.npz', **{'params/a': np.ones(2), 'opt/mask/b': np.ones(2, np.uint8)})
    assert files.read_arrays(tmp_path / 'a.npz')[0].keys() == {'a'}


def test_quarter_precision_is_refused(tmp_path):
    torch = pytest.importorskip('torch')
    package = pytest.importorskip('safetensors.torch')
    package.save_file({'a': torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / 'a.safetensors')
    with pytest.raises(UserError, match=r'(?i)(f8|float8)_?e4m3'):
        files.read_arrays(tmp_path / 'a.safetensors')


def test_other_members_of_an_archive_are_passed_over(tmp_path):
    files.write_npz(tmp_path / 'a.npz', {'x/y': np.ones(2)})
    with zipfile.ZipFile(tmp_path / 'a.npz', 'a') as archive:
        for name in ('README', 'x/', '.DS_Store', '__MACOSX/x/._y.npy'):
            archive.writestr(name, 'words')
    assert_same(files.read_arrays(tmp_path / 'a.npz')[0], {'x/y': np.ones(2)})


def test_what_a_file_declares_is_bounded_by_what_it_is(tmp_path):
    np.savez_compressed(tmp_path / 'bomb.npz', x=np.zeros(2**25, np.float32))
    assert_one_line(tmp_path / 'bomb.npz', 'unpacks to')
    header = {'descr': '<f4', 'fortran_order': False, 'shape': (10**12,)}
    with zipfile.ZipFile(tmp_path / 'a.npz', 'w') as archive, archive.open('x.npy', 'w') as member:
        np.lib.format.write_array_header_1_0(member, header)
    assert_one_line(tmp_path / 'a.npz', 'cannot be read')


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    'shard', ['../../a.safetensors', '/a.safetensors', 'file:///a.safetensors']
)
def test_shards_outside_of_the_folder(shard, tmp_path, capsys):
    index = {'weight_map': {'a': shard}}
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
    assert main(['inspect', '--checkpoint', str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, 'outside', 'folder')
