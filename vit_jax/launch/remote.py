"""Scripts that `launch tpu` runs on machines, and the archive of the code.

On every machine, the code is in the folder NAME of the home folder, and the run's log, process
group and exit code in NAME.run. Every script can be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.errors import UserError
from vit_jax.launch import cloud_tpu

# A machine prints one of these when a script has succeeded there.
READY = 'vit-jax:ready'
STARTED = 'vit-jax:started'
STOPPED = 'vit-jax:stopped'
STATE = 'vit-jax:state'
NEW = 'new'  # nothing was started here
RUNNING = 'running'
KILLED = 137  # shells' exit code for SIGKILL
STOP_SECONDS = 60

_INSTALL = """\
set -e
mkdir -p ~/{name} && cd ~/{name}
tar -xzf ~/{name}.tgz
{setup}{prepare}
echo {marker}
"""
_STOP = """\
mkdir -p ~/{name}.run && cd ~/{name}.run
if [ -f pid ]; then
  kill -TERM -- -"$(cat pid)" 2> /dev/null
  for _ in $(seq {seconds}); do kill -0 -- -"$(cat pid)" 2> /dev/null || break; sleep 1; done
  kill -KILL -- -"$(cat pid)" 2> /dev/null
fi
"""
_START = """\
{stop}rm -f exit pid
cd ~/{name} || exit 1
nohup setsid bash -c {run} > ~/{name}.run/log 2>&1 < /dev/null &
echo $! > ~/{name}.run/pid
echo {marker}
"""
# The trap keeps the shell alive until the command has ended.
_RUN = """\
trap : TERM
{command}
echo $? > ~/{name}.run/exit.new && mv ~/{name}.run/exit.new ~/{name}.run/exit
"""
# The state first: the log of a run that has ended is then complete.
_STATUS = """\
cd ~/{name}.run 2> /dev/null || {{ echo; echo {marker} {new} 0; exit 0; }}
if [ -f exit ]; then state=$(cat exit)
elif [ ! -f pid ]; then state={new}
elif kill -0 -- -"$(cat pid)" 2> /dev/null; then state={running}
else state={killed}; fi
size=$(cat log 2> /dev/null | wc -c)
[ -f log ] && tail -c +{first} log | head -c $((size - {seen}))
echo; echo {marker} "$state" "$size"
"""


@dataclasses.dataclass(frozen=True)
class Status:
    """State of a run on its first machine.

    Attributes:
      state: `NEW`, `RUNNING`, or its exit code.
      log: New text in its log.
      size: Bytes of the whole log.
    """

    state: str
    log: str
    size: int


def install(name: str, extras: Sequence[str], database: bool, prepare: str) -> str:
    """Return the script that unpacks and installs the code.

    Args:
      name: Name of the job.
      extras: See `cloud_tpu.setup`.
      database: See `cloud_tpu.setup`.
      prepare: User commands, run last.
    """
    setup = cloud_tpu.setup(extras, database)
    return _INSTALL.format(name=name, setup=setup, prepare=prepare, marker=READY)


def start(name: str, args: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the script that starts a command of vit_jax, after stopping a running one.

    Args:
      name: Name of the job.
      args: Command, such as `['train', '--config', ...]`.
      environ: Environment variables of the command.
    """
    variables = [f'{key}={value}' for key, value in environ.items()]
    command = shlex.join(['env', *variables, '.venv/bin/python', '-m', 'vit_jax', *args])
    run = shlex.quote(_RUN.format(name=name, command=command))
    return _START.format(name=name, stop=_stop(name), run=run, marker=STARTED)


def stop(name: str) -> str:
    """Return the script that stops the command, which gets a minute to save its state."""
    return _stop(name) + f'echo {STOPPED}\n'


def _stop(name: str) -> str:
    return _STOP.format(name=name, seconds=STOP_SECONDS)


def status(name: str, start_byte: int) -> str:
    """Return the script that prints the log from a byte on, and then the run's state."""
    return _STATUS.format(
        name=name,
        new=NEW,
        running=RUNNING,
        killed=KILLED,
        seen=start_byte,
        first=start_byte + 1,
        marker=STATE,
    )


def read_status(text: str) -> Status | None:
    """Parse the output of the `status` script; None if it is incomplete."""
    log, _, last = text.rpartition(f'\n{STATE} ')
    fields = last.split()
    return Status(fields[0], log, int(fields[1])) if len(fields) == 2 else None


@contextlib.contextmanager
def archive() -> Iterator[pathlib.Path]:
    """Archive the files in the current folder that git does not ignore.

    Raises:
      UserError: outside of the root of the repository.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / 'code.tgz'
        with tarfile.open(path, 'w:gz', compresslevel=1) as file:
            for name in files():
                file.add(name, recursive=False)
        yield path


def files() -> list[str]:
    """List the files in the current folder that git does not ignore.

    Raises:
      UserError: outside of the root of the repository.
    """
    command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        output = ''
    existing = [name for name in output.split('\0') if name and pathlib.Path(name).exists()]
    if 'constraints.txt' not in existing:
        raise UserError(
            'launch tpu copies the files that git lists: run it in the root of the repository'
        )
    return existing
