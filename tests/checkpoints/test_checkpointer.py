"""Checkpoints under every fault that a disk, a kill or a user can cause."""

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import resource
import shutil
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.digests import tree_digest
from helpers.messages import mentions
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from vit_jax.checkpoints import format as checkpoint_format
from vit_jax.checkpoints import manifest
from vit_jax.checkpoints.checkpointer import Checkpointer, load_variables, restore_step
from vit_jax.config.run import Checkpoint
from vit_jax.errors import UserError
from vit_jax.storage import run_folder


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    collections: dict
    ema: dict | None
    key: jax.Array


def make_state(step: int = 0, width: int = 4, ema: bool = True) -> State:
    params = {
        'head': {'kernel': step + jnp.arange(8.0 * width).reshape(8, width), 'bias': jnp.zeros(2)},
        'half': jnp.full(3, 1 / 3, jnp.bfloat16),
    }
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask={'kernel': True, 'bias': False})
    )
    return State(
        step=jnp.int32(step),
        params=params,
        opt_state=tx.init(params['head']),
        collections={'batch_stats': {'mean': jnp.full(2, float(step))}},
        ema=jax.tree.map(lambda x: x + 1, params) if ema else None,
        key=jax.random.key_data(jax.random.key(7)),
    )


def target_of(state, sharding=None):
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def write_steps(directory: pathlib.Path, *steps: int) -> pathlib.Path:
    with Checkpointer(directory, Checkpoint(keep_last=len(steps))) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), {'data': {'step': step}})
    return directory


@pytest.fixture(scope='module')
def written(tmp_path_factory) -> pathlib.Path:
    return write_steps(tmp_path_factory.mktemp('written'), 8, 16)


@pytest.fixture
def directory(written, tmp_path) -> pathlib.Path:
    """A copy of finished steps 8 and 16 for a test to damage."""
    return pathlib.Path(shutil.copytree(written, tmp_path / 'checkpoints'))


def restore_latest(directory: pathlib.Path, **options):
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore_latest(target_of(make_state()), **options)


def resident_mb() -> float:
    """Memory of this process that is in use, in MB."""
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def flip_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- memory ---


def many_arrays(count: int = 140) -> dict:
    return {'params': {f'layer_{i}': jnp.full(2, i, jnp.float32) for i in range(count)}}


def test_a_check_of_written_arrays_leaves_no_memory_behind(tmp_path):
    """Opening each array would leave .8 MB."""
    state = many_arrays()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
    step, shapes = checkpoint_format.orbax_path(tmp_path / '1'), checkpoint_format.shapes(state)
    used = []
    for _ in range(30):
        checkpoint_format.require_written(step, shapes)
        used.append(resident_mb())
    assert used[-1] - used[9] < 2
    shapes['variables']['params']['layer_5'] = jax.ShapeDtypeStruct([2], jnp.bfloat16)
    with pytest.raises(UserError, match=r'params/layer_5.*bfloat16'):
        checkpoint_format.require_written(step, shapes)


@pytest.mark.long
def test_saves_leave_no_memory_behind(tmp_path):
    """Orbax itself leaves .05 MB a save, and opening each array would leave .4 MB."""
    state, used = many_arrays(70), []
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(200):
            checkpointer.save(step, state, {})
            used.append(resident_mb())
    slope = np.polyfit(np.arange(50, 200), used[50:], 1)[0]
    assert slope < 0.2


# --- what is written comes back ---


def test_state_and_meta_come_back_bit_for_bit(tmp_path):
    state = make_state(3)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(target_of(state)) is None
        checkpointer.save(3, state, {'data': {'step': 3}, 'name': 'é'})
    step, restored, meta = restore_latest(tmp_path)
    assert (step, meta) == (3, {'data': {'step': 3}, 'name': 'é'})
    assert tree_digest(restored) == tree_digest(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_a_save_is_not_disturbed_by_updates_that_reuse_its_buffers(tmp_path):
    update = jax.jit(lambda x: jax.tree.map(lambda a: a * -3 + 1, x), donate_argnums=0)
    state = {'params': {'w': jnp.arange(2.0**20)}, 'step': jnp.zeros(())}
    before = tree_digest(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(20):
            state = update(state)
    _, restored, _ = restore_step(tmp_path, 1, target_of(state))
    assert tree_digest(restored) == before != tree_digest(state)


def mesh(count: int) -> jax.sharding.Mesh:
    auto = (AxisType.Auto,)
    return jax.make_mesh((count,), ('data',), devices=jax.devices()[:count], axis_types=auto)


@pytest.mark.parametrize('count', [1, 2, 8])
def test_restores_on_any_number_of_devices(tmp_path, count):
    state = {'params': {'kernel': jnp.arange(64.0).reshape(8, 8)}, 'step': jnp.int32(1)}
    sharded = {
        'params': jax.device_put(state['params'], NamedSharding(mesh(4), P('data'))),
        'step': jax.device_put(state['step'], NamedSharding(mesh(4), P())),
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, sharded, {})
    target = target_of(state, NamedSharding(mesh(count), P()))
    target['params'] = target_of(state['params'], NamedSharding(mesh(count), P(None, 'data')))
    _, restored, _ = restore_step(tmp_path, 1, target)
    assert tree_digest(restored) == tree_digest(state)
    assert restored['params']['kernel'].sharding == target['params']['kernel'].sharding


def test_variables_are_read_as_numpy_without_the_optimizer(directory):
    shutil.rmtree(directory / '16' / 'training')
    step, variables, meta = load_variables(directory)
    state = make_state(16)
    assert (step, meta) == (16, {'data': {'step': 16}})
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(variables))
    assert tree_digest(variables) == tree_digest({'params': state.ema, **state.collections})


def test_variables_of_a_run_without_average_or_collections(tmp_path):
    params = {'w': jnp.ones(3)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {'params': params, 'collections': {}, 'ema': None}, {})
    assert tree_digest(load_variables(tmp_path)[1]) == tree_digest({'params': params})


# --- which steps stay ---


@pytest.mark.slow
def test_the_newest_and_the_multiples_stay(tmp_path):
    with Checkpointer(tmp_path, Checkpoint(keep_last=2, keep_every=4)) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, {'params': jnp.float32(step)}, {})
        checkpointer.wait()
        assert checkpointer.steps() == [4, 8, 10, 11]


def test_steps_that_are_named_stay(tmp_path):
    with Checkpointer(tmp_path, Checkpoint(keep_last=1, keep_steps=(2, 3))) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {'params': jnp.float32(step)}, {})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 5]


def test_order_is_by_step_whatever_the_clock_says(directory):
    os.utime(directory / '8', (4e9, 4e9))
    os.utime(directory / '16', (0, 0))
    assert restore_latest(directory)[0] == 16


def test_a_step_that_is_there_is_left_alone(directory):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(16, make_state(99), {})
        checkpointer.wait()
    assert tree_digest(restore_latest(directory)[1]) == tree_digest(make_state(16))


@pytest.mark.parametrize('options', [{'keep_last': 0}, {'keep_every': -1}])
def test_retention_is_checked(tmp_path, options):
    with pytest.raises(UserError, match='keep_'):
        Checkpointer(tmp_path, Checkpoint(**options))


# --- damage ---


def files_of(step: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in step.glob('*/**/*') if path.is_file()]


def test_one_flipped_bit_in_any_file_is_found_and_named(directory):
    files = files_of(directory / '16')
    assert len(files) > 10
    for path in files:
        flip_bit(path)
        step, damaged = manifest.newest_intact(directory)
        assert step == 8
        assert path.relative_to(directory / '16').as_posix() in str(damaged[16])
        flip_bit(path)
    assert manifest.newest_intact(directory) == (16, {})


def rewrite_manifest(step: pathlib.Path, digest) -> None:
    """Replace the digests of a manifest by `digest(bytes)`."""
    path = step / run_folder.MANIFEST
    content = json.loads(path.read_text())
    for name in content['files']:
        data = (step / name).read_bytes()
        content['files'][name] = f'{digest(data)}, {len(data)} bytes'
    path.write_text(json.dumps(content))


def test_manifests_of_older_runs_are_verified_too(directory):
    rewrite_manifest(directory / '16', lambda data: f'sha256 {hashlib.sha256(data).hexdigest()}')
    manifest.verify(directory / '16')
    flip_bit(data_file(directory / '16'))
    with pytest.raises(run_folder.Damaged, match=r'changed.*sha256'):
        manifest.verify(directory / '16')


def test_a_digest_of_another_kind_is_named(directory):
    rewrite_manifest(directory / '16', lambda data: 'md6 0')
    with pytest.raises(run_folder.Damaged, match=r"'md6', .* xxh3_128, sha256"):
        manifest.verify(directory / '16')


def data_file(step: pathlib.Path) -> pathlib.Path:
    return max(step.glob('variables/**/d/*'), key=lambda path: path.stat().st_size)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    'bit flipped in data': lambda step: flip_bit(data_file(step)),
    'data truncated': lambda step: truncate(data_file(step)),
    'data deleted': lambda step: data_file(step).unlink(),
    '_METADATA truncated': lambda step: truncate(step / 'variables/_METADATA'),
    '_METADATA deleted': lambda step: (step / 'training/_METADATA').unlink(),
    'ocdbt manifest deleted': lambda step: (step / 'training/manifest.ocdbt').unlink(),
    'manifest truncated': lambda step: truncate(step / 'manifest.json'),
    'manifest without files': lambda step: (step / 'manifest.json').write_text('{"step": 16}'),
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_damage_falls_back_to_the_step_before(directory, caplog, damage):
    DAMAGE[damage](directory / '16')
    step, state, meta = restore_latest(directory)
    assert (step, meta) == (8, {'data': {'step': 8}})
    assert tree_digest(state) == tree_digest(make_state(8))
    assert 'checkpoints/16 ignored' in caplog.text
    assert (directory / 'rejected' / '16').is_dir()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(16, make_state(16), {})
    assert restore_latest(directory)[0] == 16


@pytest.mark.parametrize('damage', DAMAGE)
def test_damage_raises_when_told_to_be_strict(directory, damage):
    DAMAGE[damage](directory / '16')
    with pytest.raises(UserError, match=r'step 16: \S+ (has changed|is missing|is unreadable)'):
        restore_latest(directory, strict=True)
    assert (directory / '16').is_dir()


def test_an_explicit_step_must_be_intact(directory):
    data_file(directory / '16').unlink()
    with pytest.raises(UserError, match=r'checkpoints/16: variables/\S+ is missing'):
        restore_step(directory, 16, target_of(make_state()))
    with pytest.raises(UserError, match=r'checkpoints/12: .*finished steps: \[8, 16\]'):
        restore_step(directory, 12, target_of(make_state()))
    assert restore_step(directory, 8, target_of(make_state()))[0] == 8
    with pytest.raises(UserError, match='is missing'):
        load_variables(directory, 16)
    assert load_variables(directory)[0] == 8


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(directory):
    for step in (8, 16):
        data_file(directory / str(step)).unlink()
    with pytest.raises(UserError, match=r'step 16: .*; step 8: '):
        restore_latest(directory)
    with pytest.raises(UserError, match=r'step 16: .*; step 8: '):
        load_variables(directory)
    assert run_folder.finished_steps(directory) == [8, 16]


# --- what was never finished ---


def leave_tmp_directory(directory: pathlib.Path) -> None:
    shutil.copytree(directory / '16', directory / '24.orbax-checkpoint-tmp')


def leave_copy(directory: pathlib.Path) -> None:
    shutil.copytree(directory / '16', directory / '999999')


def leave_without(name: str):
    def leave(directory: pathlib.Path) -> None:
        shutil.copytree(directory / '16', directory / '24')
        text = (directory / '24' / 'manifest.json').read_text()
        (directory / '24' / 'manifest.json').write_text(text.replace('"step": 16', '"step": 24'))
        (directory / '24' / name).unlink()

    return leave


LEFTOVERS = {
    'empty directory': lambda directory: (directory / '24').mkdir(),
    'temporary directory': leave_tmp_directory,
    'copy under another number': leave_copy,
    'no manifest': leave_without('manifest.json'),
    'no mark of the commit': leave_without('commit_success.txt'),
}


@pytest.mark.parametrize('leftover', LEFTOVERS)
def test_leftovers_are_ignored_and_do_not_block_the_next_save(directory, caplog, leftover):
    LEFTOVERS[leftover](directory)
    assert load_variables(directory)[0] == 16
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.steps() == [8, 16]
        assert checkpointer.restore_latest(target_of(make_state()))[0] == 16
        assert any(record.levelno == logging.WARNING for record in caplog.records)
        checkpointer.save(24, make_state(24), {})
    assert restore_latest(directory)[0] == 24
    assert {path.name for path in directory.iterdir()} - {'rejected'} == {'16', '24'}


def test_reading_variables_changes_nothing(directory):
    for leave in LEFTOVERS.values():
        with contextlib.suppress(FileExistsError):
            leave(directory)
    before = sorted(directory.rglob('*'))
    load_variables(directory)
    assert sorted(directory.rglob('*')) == before


def test_a_run_killed_in_its_first_save_starts_anew(tmp_path):
    (tmp_path / '8.orbax-checkpoint-tmp').mkdir()
    (tmp_path / '8').mkdir()
    assert restore_latest(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match='no finished checkpoint'):
        load_variables(tmp_path)


# --- another model's checkpoint ---


def refusal(directory: pathlib.Path, state: State, **options) -> str:
    with Checkpointer(directory) as checkpointer, pytest.raises(UserError) as caught:
        checkpointer.restore_latest(target_of(state), **options)
    return str(caught.value)


def test_wrong_shapes_are_named_with_both(directory):
    message = refusal(directory, make_state(width=6))
    assert mentions(message, 'params/head/kernel', '(8, 4)', '(8, 6)')
    assert 'ema/head/kernel' in message
    assert 'opt_state' in message
    assert '\n' not in message


def test_missing_and_extra_arrays_are_named(directory):
    state = make_state()
    params = {'head': state.params['head'], 'tail': jnp.zeros(1)}
    message = refusal(directory, state.replace(params=params, ema=None))
    assert 'params/half (3,) is unknown; params/tail (1,) is missing' in message
    assert 'ema/half (3,) is unknown' in message


def test_arrays_are_not_cast_to_another_dtype(directory):
    state = make_state()
    wide = state.replace(params={**state.params, 'half': jnp.zeros(3)})
    assert 'params/half is bfloat16 instead of float32' in refusal(directory, wide)


def test_a_checkpoint_that_does_not_fit_is_not_set_aside(directory):
    refusal(directory, make_state(width=6))
    assert run_folder.finished_steps(directory) == [8, 16]


# --- a disk that refuses ---


def wait_for_failure(checkpointer: Checkpointer) -> str:
    """What `check` says, well before another save would have noticed."""
    for _ in range(1000):
        try:
            checkpointer.check()
        except UserError as error:
            return str(error)
        time.sleep(0.01)
    pytest.fail('the failed save was not reported')


@contextlib.contextmanager
def largest_file(size: int):
    """Within it, writing beyond `size` bytes into a file fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def noise(seed: int) -> dict:
    return {
        'params': np.random.default_rng(seed).random(300_000, np.float32),
        'step': np.int32(seed),
    }


def test_a_refused_write_is_reported_at_once_and_cleaned_up(tmp_path, capfd):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, noise(1), {})
    checkpointer.wait()
    with largest_file(2**16):
        checkpointer.save(2, noise(2), {})
        message = wait_for_failure(checkpointer)
    assert mentions(message, 'step 2', tmp_path, 'File')
    assert 'Finished steps: [1]' in message
    assert 'Traceback' not in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['1']
    checkpointer.save(2, noise(2), {})
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_a_directory_that_cannot_be_made_is_reported_at_once(tmp_path):
    (tmp_path / 'file').write_text('')
    start = time.monotonic()
    with pytest.raises(UserError, match=r'step 1.*Not a directory'):
        Checkpointer(tmp_path / 'file' / 'checkpoints').save(1, noise(1), {})
    assert time.monotonic() - start < 5


def test_the_manifest_lists_every_file_of_the_items(written):
    listed = json.loads((written / '16' / 'manifest.json').read_text())
    assert listed['step'] == 16
    found = {path.relative_to(written / '16').as_posix() for path in files_of(written / '16')}
    assert set(listed['files']) == found
    assert any(name.startswith('training/') for name in found)
