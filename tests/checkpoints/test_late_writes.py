"""Requests that end after their save or read has failed print nothing and leave nothing."""

import shutil
import subprocess
import sys

import pytest

from vit_jax.checkpoints import manifest
from vit_jax.storage import paths

LATE = """
import asyncio, concurrent.futures, gc, logging
from vit_jax.checkpoints import checkpointer
checkpointer.silence_late_requests()

def fails(file):
    try:
        exec(compile('raise OSError(28, "full")', file, 'exec'))
    except OSError as error:
        return error

def unheard(file):
    loop = asyncio.new_event_loop()
    loop.create_future().set_exception(fails(file))
    loop.close()

def callback(words):
    def late(future):
        raise RuntimeError(words)
    future = concurrent.futures.Future()
    future.add_done_callback(late)
    future.set_result(None)

def misses(file):
    code = compile(f'logging.getLogger("absl").error("Metadata file does not exist: {file}")',
                   'site-packages/orbax/metadata.py', 'exec')
    exec(code)

def never_begun(name):
    exec(f'async def {name}(): pass\\n{name}()')
"""


@pytest.mark.slow
@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ('late', 'other', 'said'),
    [
        pytest.param(
            "unheard('orbax/path.py')",
            "unheard('mine/path.py')",
            'was never retrieved',
            marks=pytest.mark.long,
        ),
        ("callback('Event loop is closed')", "callback('x')", 'exception calling callback'),
        ("misses('1.orbax-checkpoint-tmp/m')", "misses('1/m')", 'Metadata file does not exist'),
        pytest.param(
            "never_begun('write_fragment')",
            "never_begun('fetch')",
            'was never awaited',
            marks=pytest.mark.long,
        ),
    ],
)
def test_only_late_writes_are_hidden(repo, late, other, said):
    assert stderr_of(repo, late) == ''
    assert said in stderr_of(repo, other)


def stderr_of(repo, call):
    words = [sys.executable, '-c', f'{LATE}\n{call}\ngc.collect()']
    return subprocess.run(words, cwd=repo, capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
@pytest.mark.fault(9)
def test_reads_that_end_after_a_refusal_print_nothing(repo, tmp_path, run_cli):
    """The files were damaged before their digests were taken."""
    run, steps = tmp_path / 'run', tmp_path / 'run' / 'checkpoints'
    shutil.copytree(repo / 'tests' / 'golden' / 'run_digits', run)
    (step,) = [int(path.name) for path in steps.iterdir() if path.name.isdigit()]
    for path in (steps / str(step) / 'variables').rglob('d/*'):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    manifest.write(steps, step)
    done = run_cli('evaluate', '--workdir', run)
    assert done.returncode == 2
    assert done.stderr.count('\n') == 1 and str(run) in done.stderr


@pytest.mark.fault(18)
def test_a_failed_save_is_removed_although_threads_still_write(tmp_path, monkeypatch):
    folder, writes, remove = tmp_path / '7.orbax-checkpoint-tmp', [2, 1, 0], paths.remove
    (folder / 'variables').mkdir(parents=True)

    def removed_while_written(path):
        remove(path)
        if left := writes.pop(0):
            (path / 'variables').mkdir(parents=True)
            if left == 1:
                raise OSError('Directory not empty')

    monkeypatch.setattr(paths, 'remove', removed_while_written)
    manifest.discard(tmp_path, 7)
    assert not writes and not list(tmp_path.iterdir())
