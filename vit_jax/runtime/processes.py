"""Jobs of several processes: joining, exchanging facts, and failing together."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import glob
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import EXIT_FAILED, UserError, one_line
from vit_jax.runtime import environment
from vit_jax.runtime.watchdog import Stalled

BARRIER_SECONDS = 120.0  # for all processes to reach a barrier or to fail
EXIT_SECONDS = 60.0  # for the rest of an exit
_LINE = 1000  # bytes for a process to describe how it differs from process 0
_SHOWN = 3  # differences in a message
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 3.0  # for the main thread to clean up and exit by itself
_LINGER_SECONDS = 10.0  # for the main thread to end the process, or for others to read
_FOLDER = 'vit_jax/ended'  # of failures in the coordinator's key-value store
_PEER_LOST = re.compile('gloo|coordination service|heartbeat|connection (closed|reset)', re.I)
_OPEN_MPI_4 = 'OMPI_MCA_orte_hnp_uri'  # has the address of process 0
# Variables of Open MPI 5, and of MPICH and Intel MPI.
_MPI = (
    ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK'),
    ('PMI_SIZE', 'PMI_RANK', 'MPI_LOCALRANKID'),
)
CONTINUES = 'the same command, started again on all processes, continues from the last checkpoint'

Failure = tuple[str, int]  # a line, and the exit code


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_seconds: int | None = None,
) -> None:
    """Join the processes of a job; without arguments the cluster is detected.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: Size of the job; if None, from the cluster or MPI.
      process_id: Number of this process, from 0; if None, from the cluster or MPI.
      heartbeat_seconds: Silence after which a process counts as dead; 100 by default.

    Raises:
      NoCluster: if arguments are missing and no cluster is detected.
      UserError: if another program has the coordinator's port, or processes do not connect.
    """
    timeout: dict[str, Any] = {'shutdown_timeout_seconds': int(BARRIER_SECONDS)}
    if heartbeat_seconds is not None:
        timeout['heartbeat_timeout_seconds'] = heartbeat_seconds
    if coordinator and num_processes is None and process_id is None:
        num_processes, process_id, devices = _numbers_of_mpi(os.environ)
        timeout |= {} if devices is None else {'local_device_ids': devices}
    try:
        with _rendezvous_first():
            jax.distributed.initialize(coordinator, num_processes, process_id, **timeout)
    except ValueError as e:
        flag, reason = '--coordinator' if coordinator else '--distributed', str(e).rstrip('.')
        raise NoCluster(
            f'{flag}: no cluster was detected ({reason}); give --coordinator HOST:PORT, '
            '--num-processes and --process-id'
        ) from e


class NoCluster(UserError):
    """Neither a launcher nor metadata identify the processes of a job."""


@dataclasses.dataclass
class _Job:
    """Job that this process has joined; known before JAX has looked for devices."""

    process: int = 0
    count: int = 1
    client: Any = None


_job = _Job()


@contextlib.contextmanager
def _rendezvous_first() -> Iterator[None]:
    """Hold a rendezvous before JAX makes its service and client inside, and keep the client.

    Replaces two functions of JAX: `jax.distributed` has no hook between the detection of the
    cluster and the connection, no callback for lost processes and no public client. JAX alone
    hangs if it cannot reach process 0 (https://github.com/jax-ml/jax/issues/35905), and aborts
    when a process is lost (https://github.com/openxla/xla/pull/38624).
    `tests/test_private_names.py` fails when `jax.distributed` offers more.
    """
    try:
        from jax._src.distributed import _jax as made_by
        from jax._src.distributed import global_state

        make_service = made_by.get_distributed_runtime_service
        make_client = made_by.get_distributed_runtime_client
    except (ImportError, AttributeError):
        yield
        return

    from vit_jax.runtime import rendezvous  # here, as few jobs have several processes

    def service(address: str, count: int, **options: Any) -> Any:
        with rendezvous.Host(address, count) as host:
            host.wait()
            host.leave_port()
            created = make_service(address, count, **options)
            host.start()
        return created

    def client(address: str, process: int, **options: Any) -> Any:
        _job.process, _job.count = process, global_state.num_processes
        if process:
            rendezvous.join(address, process, _job.count)
        handle_abort(_process_name())
        # jaxlib 0.10 cannot convert the callback's status argument: then the failure ends in an
        # abort without a stack, see `handle_abort`.
        if 'missed_heartbeat_callback' in (make_client.__doc__ or ''):
            options['missed_heartbeat_callback'] = end_for_lost_peer
        _job.client = make_client(address, process, **options)
        return _job.client

    made_by.get_distributed_runtime_service = service
    made_by.get_distributed_runtime_client = client
    try:
        yield
    finally:
        made_by.get_distributed_runtime_service = make_service
        made_by.get_distributed_runtime_client = make_client


def count() -> int:
    """Return the number of processes of the joined job, without starting JAX's devices."""
    return _job.count


def client() -> Any:
    """Return the client of the job's coordination service; None without a job."""
    return _job.client


def join_cluster(heartbeat_seconds: int | None = None) -> None:
    """Join the other processes of the job if the environment names any, else do nothing.

    Args:
      heartbeat_seconds: See `initialize`.

    Raises:
      UserError: if a launcher started several processes and they cannot be found.
    """
    if (count := count_launched(os.environ)) is None:
        with contextlib.suppress(NoCluster, OSError):  # OSError: no metadata server
            initialize(heartbeat_seconds=heartbeat_seconds)
    elif count > 1:
        initialize(heartbeat_seconds=heartbeat_seconds)


def count_launched(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that the launcher started, from its environment variables.

    A single process is not a cluster, nor is a Slurm allocation without srun. None means that only
    metadata of the TPU VM, which JAX queries, contain the number.

    Raises:
      NoCluster: if MPI started several processes and does not provide the address of process 0.
    """
    if _OPEN_MPI_4 in environ:
        return int(environ['OMPI_COMM_WORLD_SIZE'])
    _require_no_mpi(environ, 'OMPI_COMM_WORLD_SIZE')
    if 'SLURM_STEP_NODELIST' in environ:
        return int(environ['SLURM_NTASKS'])
    _require_no_mpi(environ, 'PMI_SIZE')
    if not on_tpu_vm():
        return 1
    workers = environ.get('TPU_PROCESS_ADDRESSES', environ.get('TPU_WORKER_HOSTNAMES'))
    slices = int(environ.get('MEGASCALE_NUM_SLICES') or 1)
    return None if workers is None else slices * len(workers.split(','))


def _require_no_mpi(environ: Mapping[str, str], size: str) -> None:
    if (count := environ.get(size, '1')) not in ('0', '1'):
        raise NoCluster(
            f'{size}={count}: mpirun started {count} processes, but this MPI (not Open MPI 4) does '
            'not give the address of process 0: add --coordinator HOST:PORT, with the host of '
            'process 0'
        )


def _numbers_of_mpi(
    environ: Mapping[str, str],
) -> tuple[int | None, int | None, Sequence[int] | None]:
    """Return the number of processes that MPI started, the number of this one, and its devices.

    All are None if JAX detects them, or without MPI.
    """
    for size, rank, local_rank in _MPI:
        if {size, rank} <= environ.keys() and _OPEN_MPI_4 not in environ:
            devices = [int(environ[local_rank])] if local_rank in environ else None
            return int(environ[size]), int(environ[rank]), devices
    return None, None, None


def on_tpu_vm() -> bool:
    """Return whether this machine may have TPUs; other accelerators use VFIO too."""
    return any(glob.glob(f'/dev/{pattern}') for pattern in ('accel[0-9]*', 'vfio/[0-9]*'))


def broadcast(value: Any) -> Any:
    """Send process 0's JSON value to every process; values of other processes are ignored."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if jax.process_index() == 0 else b''
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.frombuffer(text.ljust(size), np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(padded).astype(np.uint8).tobytes())


def gather(value: Any) -> list[Any]:
    """Collect the non-empty JSON values of all processes, in process order.

    If all are empty, only their sizes are sent.
    """
    if jax.process_count() == 1:
        return [value] if value else []
    text = json.dumps(value).encode() if value else b''
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    if not sizes.any():
        return []
    padded = np.frombuffer(text.ljust(int(sizes.max())), np.uint8)
    rows = multihost_utils.process_allgather(padded).astype(np.uint8)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True) if n]


def share_cores() -> None:
    """Divide the cores of this host with the other processes of the job that run on it."""
    host_name = [environment.host_id(), environment.affinity()]
    peers = gather(host_name)
    peers.remove(host_name)
    environment.share_cores([cores for host, cores in peers if host == host_name[0]])


def on_process_0(act: Callable[[], int | None]) -> int:
    """Run `act` only on process 0 and return its result, 0 for None, on every process.

    Raises:
      UserError: on every process if `act` raises it.
    """
    if not jax.distributed.is_initialized():
        return act() or 0
    result, error = 0, None
    if jax.process_index() == 0:
        try:
            result = act() or 0
        except UserError as mistake:
            error = mistake
    failed, result = multihost_utils.broadcast_one_to_all(np.array([bool(error), result], np.int32))
    if failed:
        from vit_jax.runtime import rendezvous  # here, as few jobs have several processes

        message = broadcast(error and [str(error), getattr(error, 'exit_code', 2)])
        raise error or rendezvous.PeerError(*message)
    return int(result)


def require_same_facts(facts: Mapping[str, Any]) -> None:
    """Check that every process of the job has the same facts as process 0.

    Args:
      facts: Values that JSON can hold, by names for the message, such as `config.optim.lr`.

    Raises:
      UserError: on every process; names how the first process that differs does so.
    """
    if jax.process_count() == 1:
        return
    mistake = difference(broadcast(facts), facts).encode()[:_LINE]
    padded_text = np.frombuffer(mistake.ljust(_LINE, b'\0'), np.uint8)
    for process, row in enumerate(multihost_utils.process_allgather(padded_text)):
        if text := row.astype(np.uint8).tobytes().rstrip(b'\0').decode(errors='ignore'):
            raise UserError(
                f'process {process} has {text}: start every process with the same config, code '
                'and data'
            )


def difference(facts_of_0: Mapping[str, Any], local: Mapping[str, Any]) -> str:
    """Describe how our facts differ from process 0's, such as `a=1, process 0 2`, or ''."""
    names = [*facts_of_0, *(name for name in local if name not in facts_of_0)]
    lines = [
        f'{name}={local_value}, process 0 {remote_value}'
        for name in names
        if (local_value := _format_fact(local, name))
        != (remote_value := _format_fact(facts_of_0, name))
    ]
    extra = [f'{len(lines) - _SHOWN} more'] if len(lines) > _SHOWN else []
    return '; '.join(lines[:_SHOWN] + extra)


def _format_fact(facts: Mapping[str, Any], name: str) -> str:
    return json.dumps(facts[name]) if name in facts else 'nothing'


def barrier(name: str, seconds: float) -> None:
    """Wait for every process without a collective, since others may be in a different one.

    Args:
      name: Name of the barrier, the same on every process.
      seconds: Time limit.

    Raises:
      RuntimeError: if some processes did not reach it.
    """
    import orbax.checkpoint as ocp  # takes a quarter of a second

    wait = ocp.multihost.get_barrier_sync_fn()
    wait(key=name, timeout_ms=int(1000 * seconds))


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """End this process at once when it fails while others of its job may wait for it.

    An ordinary exit waits for all processes of the job, but those that wait for this one in a
    collective never get there. They notice its end by the connection or the heartbeat. A process
    whose data loader hangs ends the same way, since the hanging thread cannot be joined. An
    orderly exit waits for the others for a bounded time, then prints all stacks and ends. All
    processes end with the line and the exit code of the one that failed.
    """
    global _board
    try:
        if _job.count > 1:
            _board = FailureBoard(_job.client, _job.process, _job.count)
        yield
        if jax.process_count() > 1:
            # At exit, C++ waits for the others, possibly for ever.
            faulthandler.dump_traceback_later(BARRIER_SECONDS + EXIT_SECONDS, exit=True)
    except Stalled as error:
        _post(f'error: {_process_name()}: {str(error).splitlines()[0]}', EXIT_FAILED)
        end_process(f'error: {error}', EXIT_FAILED)
    except Exception as error:
        if count() == 1:
            raise
        line, code = _failure(error)
        # JAX aborts the others as soon as their coordinator is gone.
        end_process(line, code, linger=1.0 if _job.process == 0 else 0.0)
    except BaseException:
        _post(f'error: {_process_name()} was stopped; {CONTINUES}', EXIT_FAILED)
        raise
    finally:
        if _board is not None:
            _board.close()


def leave(code: int) -> bool:
    """Leave the job after all work; return False if a process was lost since then.

    Output is suppressed: the coordination service would print a long report that no longer matters,
    and JAX's exit would end in a traceback. After a loss it stays suppressed, since threads of the
    service go on with their report until the process ends.

    Args:
      code: Exit code, also if the loss of a process ends this one at once.
    """
    global _stderr, _final_code
    if _job.client is None:
        return True
    sys.stderr.flush()
    _stderr, _final_code = os.dup(2), code
    faulthandler.dump_traceback_later(BARRIER_SECONDS + EXIT_SECONDS, exit=True, file=_stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        jax.distributed.shutdown()
    except RuntimeError:
        return False
    except BaseException:
        os.dup2(_stderr, 2)
        raise
    os.dup2(_stderr, 2)
    return True


def peer_user_error() -> bool:
    """Return whether a user's mistake has ended another process of the job."""
    failure = _board.peer_failure() if _board else None
    return failure is not None and failure[1] == 2


def reports_lost_peer(error: Exception) -> bool:
    """Return whether the error reports the loss of another process of the job."""
    return bool(_PEER_LOST.search(str(error)))


def _failure(error: Exception) -> Failure:
    """Post the failure for the other processes to read, and return it.

    A consequence of another process's failure is reported like that failure. The traceback of a
    defect is printed.
    """
    name = _process_name()
    if isinstance(error, UserError):
        line, code = f'error: {name}: {error}', getattr(error, 'exit_code', 2)
    elif _board and (failure := _board.peer_failure()):
        return failure
    elif reports_lost_peer(error):
        first = str(error).splitlines()[0]
        return f'error: {name} lost another process ({first}); {CONTINUES}', EXIT_FAILED
    else:
        traceback.print_exception(error)
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        line, code = f'error: {name} failed ({reason}); {CONTINUES}', EXIT_FAILED
    _post(line, code)
    return line, code


def _post(line: str, code: int) -> None:
    if _board is not None:
        _board.post((one_line(line), code))


def _process_name() -> str:
    return f'process {_job.process} of {_job.count}'


class FailureBoard:
    """Failures of processes, in the coordinator's key-value store for all to read.

    A thread looks for failures of others, which a process that waits in a collective never sees.

    Args:
      client: Client of the coordination service; connected.
      process: The number of this process.
      count: Number of processes.
    """

    def __init__(self, client: Any, process: int, count: int):
        self._client, self._process, self._count = client, process, count
        self._found: Failure | None = None
        self._posted = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='peer-failures', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking for failures."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LINGER_SECONDS)

    def post(self, failure: Failure) -> None:
        """Post the failure of this process."""
        self._posted = True
        with contextlib.suppress(Exception):  # the coordinator may be gone
            key = f'{_FOLDER}/{self._process}'
            self._client.key_value_set(key, json.dumps(failure), allow_overwrite=True)

    def peer_failure(self, query: bool = True) -> Failure | None:
        """Return another process's failure, or None; `query=False` does not ask the server."""
        for key, text in self._entries() if query and not self._found else ():
            if key.rpartition('/')[2] != str(self._process):
                line, code = json.loads(text)
                self._found = line, code
                break
        return self._found

    def await_readers(self) -> None:
        """Wait until no other process has to read from this one.

        Process 0 waits for the others' posts, since the store ends with it, and C++ complains.
        """
        if self._found and not self._posted:
            self.post(self._found)
        end = time.monotonic() + _LINGER_SECONDS
        while self._process == 0 and self._posted and time.monotonic() < end:
            if len(self._entries()) >= self._count:
                return
            time.sleep(0.1)

    def _entries(self) -> list[tuple[str, str]]:
        try:
            return self._client.key_value_dir_get(_FOLDER)
        except Exception:  # the coordinator is gone
            return []

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            if (failure := self.peer_failure()) is not None:
                if not self._stop.wait(_GRACE_SECONDS):
                    end_process(*failure)
                return


_board: FailureBoard | None = None
_stderr = 2
_final_code: int | None = None  # of a process whose work is done
_name_at_abort = 'this process'
_ending = False
_end_lock = threading.Lock()


def handle_abort(name: str) -> None:
    """Turn an abort of this process, from now on, into one line and exit code 1.

    Args:
      name: Name of the process in the line, such as 'process 1 of 2'.
    """
    global _name_at_abort
    _name_at_abort = name
    ctypes.CDLL(None).signal(signal.SIGABRT, _handler)


def end_process(line: str, code: int, linger: float = 0.0) -> NoReturn:
    """End this process, with no output of other threads after the line.

    Args:
      line: Text for standard error.
      code: Exit code.
      linger: Seconds between the line and the exit.
    """
    global _ending
    with _end_lock:  # never released
        _ending = True
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        _end_with_line(one_line(line) + '\n', code, linger)


def _end_with_line(line: str, code: int, linger: float | None = None) -> NoReturn:
    # No buffers, no locks: a C++ thread may be here while it aborts.
    with contextlib.suppress(OSError):
        stderr = os.dup(_stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(stderr, line.encode())
    if linger is not None:
        if _board is not None:
            _board.await_readers()
        time.sleep(linger)
    os._exit(code)


def end_for_lost_peer(*_: Any) -> None:
    """End this process, from any thread, after another process of the job was lost."""
    if _final_code is not None:
        os._exit(_final_code)
    if _ending:
        # The main thread is ending the process, with a better message.
        time.sleep(2 * _LINGER_SECONDS)
    default = f'error: {_name_at_abort} lost another process, or failed as said above; {CONTINUES}'
    line, code = (_board and _board.peer_failure(query=False)) or (default, EXIT_FAILED)
    _end_with_line(line + '\n', code)


# Python's own handlers run in the main thread, later; this one runs in the thread that aborts.
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end_for_lost_peer)
