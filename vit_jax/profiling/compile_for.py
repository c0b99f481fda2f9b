"""Compile for TPUs and GPUs in a child process, which is killed after scheduling.

The schedule contains FLOPs, bytes, memory and collectives. Machine code would take minutes more,
and only the compiler's estimate of cycles needs it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError
from vit_jax.profiling import topology

REQUEST, FACTS, RESULT, ERROR = (f'{n}.json' for n in ('request', 'facts', 'result', 'error'))
SCHEDULED = '*.after_optimizations_after_buffer_assignment.txt'
BUFFERS = '*.after_optimizations-buffer-assignment.txt'
FINAL = '*.after_codegen.txt'
GPU_SCHEDULED = '*gpu_after_optimizations.txt'
GPU_BUFFERS = '*gpu_after_optimizations-buffer-assignment.txt'
GPU_NEXT = '*gpu_after_optimizations-live-range.txt'  # follows the buffers
# XLA chooses the tiles of Triton's matmuls by timing them on a GPU; cuBLAS needs none.
GPU_FLAGS = ' --xla_gpu_enable_triton_gemm=false'
# JAX asks the plugin of real GPUs for the version of cuDNN before it lowers attention to it, and
# refuses where no plugin is. The compiling process finds this package in its place: cuDNN is only
# needed to run.
PLUGIN, CUDNN_VERSION = 'jax_cuda13_plugin', 91900
FLAGS = '--xla_dump_to={} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=(train|eval|predict)_step'
_SIZE = r'([\d.]+)([KMGT]?)'
OVERFLOW = re.compile(f'Used {_SIZE} of {_SIZE} hbm')
# A program that is far too large is refused because of its temporaries, without the state.
TEMPORARIES = re.compile(rf'HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)')
POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of compiling a step.

    Attributes:
      facts: Facts written by the program; may be empty.
      module: Scheduled HLO of one chip; the last intermediate HLO if the step does not fit.
      buffers: Buffer assignment; empty if the step does not fit.
      seconds: Seconds of tracing and compiling.
      overflow: Bytes of a chip's memory, needed and available, if the step does not fit.
    """

    facts: Mapping[str, Any]
    module: str
    buffers: str
    seconds: float
    overflow: tuple[float, float] | None = None


def compile_step(
    request: Mapping[str, Any], program: Sequence[str], *, cycles: bool = False
) -> Compiled:
    """Compile a step in a separate process.

    Args:
      request: Request that the program reads from its folder; `topology` is a name.
      program: Python arguments, followed by the request's folder. The program compiles a function
        `train_step` or `eval_step`, and may write facts or an error into the folder.
      cycles: Whether to wait for machine code, which contains the estimates of cycles.

    Raises:
      UserError: without the compiler, or for a mistake in the request.
      RuntimeError: if the compiler fails.
    """
    target = topology.parse_topology(request['topology'])
    topology.require_compiler(target)
    on_gpus = isinstance(target.chip, topology.Gpu)
    if on_gpus and cycles:
        raise UserError('--cycles: the compiler of GPUs estimates no cycles; leave it out')
    scheduled = GPU_SCHEDULED if on_gpus else FINAL if cycles else SCHEDULED
    with tempfile.TemporaryDirectory(prefix='vit_jax-preflight-') as name:
        folder, start_time = pathlib.Path(name), time.perf_counter()
        (folder / REQUEST).write_text(json.dumps(request))
        if on_gpus:
            _write_plugin(folder)
        environment = topology.environment(target) | {
            'XLA_FLAGS': FLAGS.format(folder) + GPU_FLAGS * on_gpus,
            'PYTHONPATH': os.pathsep.join([name, *sys.path]),  # including the working directory
        }
        with (folder / 'stderr').open('w+') as stderr:
            process = subprocess.Popen(
                [sys.executable, *program, name],
                stdin=subprocess.PIPE,  # closes when this process ends, see runtime/process
                stdout=stderr,
                stderr=stderr,
                env=environment,
            )
            try:
                _wait(process, folder, scheduled, GPU_NEXT if on_gpus else scheduled)
            finally:
                process.kill()
                process.communicate()
        seconds = time.perf_counter() - start_time
        return _read(folder, scheduled, GPU_BUFFERS if on_gpus else BUFFERS, seconds)


def _write_plugin(folder: pathlib.Path) -> None:
    """Write the package from which JAX reads the version of cuDNN."""
    (folder / PLUGIN).mkdir()
    (folder / PLUGIN / '__init__.py').touch()
    version = f'def cudnn_get_version():\n    return {CUDNN_VERSION}\n'
    (folder / PLUGIN / '_versions.py').write_text(version)


def _wait(process: subprocess.Popen, folder: pathlib.Path, scheduled: str, last: str) -> None:
    while process.poll() is None:
        if any(folder.glob(last)) and _complete(folder, scheduled):
            return
        time.sleep(POLL_SECONDS)


def _complete(folder: pathlib.Path, pattern: str) -> bool:
    """Return whether a module is complete, up to the closing brace of its entry."""
    for path in folder.glob(pattern):
        with path.open('rb') as file:
            file.seek(max(path.stat().st_size - 16, 0))
            if file.read().rstrip().endswith(b'\n}'):
                return '\nENTRY ' in path.read_text()
    return False


def _read(folder: pathlib.Path, scheduled: str, buffers: str, seconds: float) -> Compiled:
    facts = json.loads(_text(folder, FACTS) or '{}')
    if error := _text(folder, ERROR):
        failure = json.loads(error)
        if failure['kind'] == 'user':
            raise UserError(failure['message'])
        if exceeded := overflow(failure['message'], sum(facts['state'].values())):
            module = _text(folder, '*oom_intermediate_module.txt')
            return Compiled(facts, module, '', seconds, exceeded)
        raise RuntimeError(f'the compiler fails: {failure["message"]}')
    module = _text(folder, scheduled)
    if not module:
        last = (folder / 'stderr').read_text().strip()[-2000:]
        raise RuntimeError(f'the compiler ended without a schedule: {last}')
    return Compiled(facts, module, _text(folder, buffers), seconds)


def overflow(message: str, state: int) -> tuple[float, float] | None:
    """Parse the needed and available bytes from a compiler message; None for other errors.

    Args:
      message: Message of the failure.
      state: Bytes of the training state, which one form of the message omits.
    """
    for pattern, additional in ((OVERFLOW, 0), (TEMPORARIES, state)):
        if match := pattern.search(message):
            needed, available = (
                float(number) * 1024 ** ' KMGT'.index(unit or ' ')
                for number, unit in (match.group(1, 2), match.group(3, 4))
            )
            return needed + additional, available
    return None


def _text(folder: pathlib.Path, pattern: str) -> str:
    """Read the largest matching file; empty if there is none."""
    paths = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else ''
