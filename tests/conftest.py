"""What the tests share: eight CPU devices, checked shapes, a compilation cache, one trained run."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from absl import flags
from helpers import finished, forked
from helpers.faults import pytest_itemcollected, pytest_terminal_summary  # noqa: F401
from helpers.typechecker import check_shapes
from helpers.xla import as_users_do, share_contexts, use_one_device, xla_flags

REPO = pathlib.Path(__file__).resolve().parents[1]
# All of this has to be in place before the first import of jax, which the tests' modules do.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = xla_flags(devices=8)
# Workers of pytest-xdist and subprocesses inherit the cache and share what one compiled.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(REPO / '.cache' / 'jax'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
# Where in the source an operation was traced is written into each program, and read by no test.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
os.environ.setdefault('MPLBACKEND', 'agg')
# Matrices of fits are tiny: several threads for each mostly wait for one another, and burn time.
os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')

# Traces and modules are millions of objects that stay: looking through them for garbage as often
# as Python does by default takes a fifth of the time of tracing.
gc.set_threshold(100_000, 20, 50)


def pytest_collection_finish() -> None:
    """Leaves what modules made out of all later collections."""
    gc.collect()
    gc.freeze()


# Grain's worker processes read absl flags, which only absl's own main would parse.
flags.FLAGS.mark_as_parsed()

# Where shapes are annotated, they are checked at every call, also while tracing. Not in `scaling`,
# which annotates none: its fits make 100,000 calls, whose checks took longer than all else.
CHECKED = ('nn', 'ops', 'models', 'tasks', 'viz')
check_shapes([f'vit_jax.{name}' for name in CHECKED])

# Files of many seconds, the longest first: xdist hands out files in this order, so that no worker
# is left with a long one in the end.
LONGEST_FIRST = (
    'launch/test_slurm.py',
    'faults/test_processes.py',
    'test_doors.py',
    'inference/test_sample.py',
    'test_step.py',
    'test_configs.py',
    'trainer/test_text_runs.py',
    'test_lowering.py',
    'test_outside_system.py',
    'trainer/test_devices.py',
    'inference/test_embed.py',
    'faults/test_resume.py',
    'tasks/test_generate.py',
    'scaling/test_table.py',
    'trainer/test_init.py',
    'commands/test_attention_text.py',
    'tasks/test_agglomerate.py',
    'interop/families/test_vision_transformer.py',
    'optim/test_make.py',
    'models/test_naflex.py',
    'test_smoke.py',
    'tasks/test_detect.py',
    'faults/test_limits.py',
    'storage/test_object_storage.py',
    'nn/test_cudnn_attention.py',
    'tasks/test_image_to_image.py',
    'models/test_vit.py',
    'tasks/test_meanflow.py',
    'nn/test_attention_kernel.py',
    'commands/test_translate.py',
    'sweeps/test_storages.py',
    'models/test_vit_parts.py',
    'inference/test_load.py',
    'tasks/test_dinov2.py',
    'data/test_remote_sources.py',
    'test_walks.py',
    'trainer/test_old_runs.py',
    'commands/test_detection_on_coco.py',
    'trainer/test_branch.py',
    'tasks/test_translate.py',
    'tasks/test_siglip.py',
    'interop/families/test_transformers_forms.py',
    'interop/families/test_timm_forms.py',
    'interop/test_training.py',
    'models/test_hybrid.py',
    'tasks/test_caption.py',
    'test_imports.py',
    'data/test_golden_batches.py',
    'trainer/test_extension.py',
    'trainer/test_early_stopping.py',
    'trainer/test_profile.py',
    'faults/test_terminals.py',
    'inference/test_nnx_module.py',
    'test_readme.py',
)

# Costly variants of tests, of which others run in `make test`.
LONG_VARIANTS = frozenset((REPO / 'tests' / 'long_variants.txt').read_text().splitlines())


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves out files without a test of the mark that is asked for first, before their imports."""
    mark = config.option.markexpr.partition(' and ')[0]
    if mark.isidentifier() and collection_path.match('test_*.py'):
        name = collection_path.relative_to(REPO).as_posix()
        if mark == 'long' and any(variant.startswith(f'{name}::') for variant in LONG_VARIANTS):
            return None
        return f'mark.{mark}' not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks variants `long`, and sorts the files: in each, tests marked `parity` come first."""
    for item in items:
        if item.nodeid in LONG_VARIANTS:
            item.add_marker('long')
    rank = {name: i for i, name in enumerate(LONGEST_FIRST)}
    tests = REPO / 'tests'
    place = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}

    def order(item: pytest.Item) -> tuple[int, int, bool]:
        path = item.path
        first = rank.get(path.relative_to(tests).as_posix(), len(rank))
        return first, place[path], item.get_closest_marker('parity') is None

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Compiles what tests marked `parity` and their fixtures need as users do."""
    is_parity = item.get_closest_marker('parity') is not None
    quick = os.environ.get('TESTS_XLA') == 'quick'
    with as_users_do() if is_parity and not quick else contextlib.nullcontext():
        return (yield)


RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope='session')
def repo() -> pathlib.Path:
    """The root of the repository."""
    return REPO


@pytest.fixture(scope='session')
def shared_data() -> pathlib.Path:
    """The folder with real data beside the repository."""
    path = REPO.parent / 'shared' / 'data'
    if not path.is_dir():
        pytest.skip('no data in ../shared/data')
    return path


# Processes in the background of a shell, or under nohup, ignore these; those of tests would too.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def signals_of_the_process() -> Iterator[None]:
    """Puts handlers back: a run that was told to stop lets no further signal end its process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# What runs draw takes as long as they do: modules, classes and methods.
DRAW = {
    'curves': ('vit_jax.trainer.writer', 'Writer', 'draw'),
    'examples': ('vit_jax.trainer.examples', 'ExampleDisplay', 'show'),
}


@pytest.fixture(scope='session', autouse=True)
def undrawn_pictures() -> Iterator[dict[str, Callable]]:
    """Leaves curves.png and the examples of writers out of runs in this process."""
    drawn = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, cls, method) in DRAW.items():
            if 'vit_jax.trainer.build' in sys.modules:
                owner = getattr(importlib.import_module(module), cls)
                drawn[name] = getattr(owner, method)
                patch.setattr(owner, method, lambda self, *shown: None)
        yield drawn


@pytest.fixture(scope='session', autouse=True)
def contexts_of_many_programs() -> Iterator[None]:
    """Lowers programs of this process in contexts of MLIR that many of them share."""
    with pytest.MonkeyPatch.context() as patch:
        if 'jax' in sys.modules:
            share_contexts(patch)
        yield


@pytest.fixture(scope='session', autouse=True)
def remembered_traces() -> Iterator[None]:
    """Traces the shapes of each model's parameters once in this process."""
    with pytest.MonkeyPatch.context() as patch:
        if 'jax' in sys.modules:
            traces = importlib.import_module('helpers.traces')
            traces.remember_shapes(patch)
            traces.remember_initializers(patch)
        yield


fsync = os.fsync


@pytest.fixture(scope='session', autouse=True)
def unsynced_disks() -> Iterator[None]:
    """Waits for no disk, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, 'fsync', lambda descriptor: None)
        yield


@pytest.fixture
def synced_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for disks after all."""
    monkeypatch.setattr(os, 'fsync', fsync)


@pytest.fixture(scope='session', autouse=True)
def short_pauses() -> Iterator[None]:
    """Asks a server that does not answer again at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('vit_jax.storage.servers.PAUSE', 0.01)
        yield


@pytest.fixture
def drawn_curves(undrawn_pictures: dict[str, Callable], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their curves.png after all."""
    _draw_again('curves', undrawn_pictures, monkeypatch)


@pytest.fixture
def drawn_examples(undrawn_pictures: dict[str, Callable], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers get examples after all."""
    _draw_again('examples', undrawn_pictures, monkeypatch)


def _draw_again(name: str, drawn: dict[str, Callable], monkeypatch: pytest.MonkeyPatch) -> None:
    if name in drawn:
        monkeypatch.setattr('.'.join(DRAW[name]), drawn[name])


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one device."""
    use_one_device(monkeypatch)


# What a run computes hangs on these sections, on the shapes of its batches and on its length.
COMPUTED = ('seed', 'batch_size', 'model', 'task', 'optim', 'step', 'lora')


@pytest.fixture(scope='module')
def compiled_once() -> Iterator[None]:
    """Runs of a module that compute the same share their program, also if they stop and go on."""
    from vit_jax.trainer import build

    make, made = build.make_program, {}

    def once(run, shapes, layout, times, *classes):
        sections = {name: str(getattr(run, name)) for name in COMPUTED}
        key = (str(sections), str(shapes), times, layout, str(classes))
        if key not in made:
            made[key] = make(run, shapes, layout, times, *classes)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, 'make_program', once)
        yield


@pytest.fixture(scope='session')
def run_cli() -> RunCli:
    """`run_cli('train', ..., devices=1, env={...})`: a command as a user runs it."""
    return _run_cli


def _run_cli(
    *args: object, devices: int = 1, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    pipes = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    env = {**os.environ, 'XLA_FLAGS': xla_flags(devices), 'COLUMNS': '100', **(env or {})}
    with forked.start(args, env, cwd=REPO, text=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope='session')
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The finished run folder of the digits experiment at its smoke size; do not write to it."""
    return finished.smoke_run_of(tmp_path_factory, 'experiments/vit/digits.py')
