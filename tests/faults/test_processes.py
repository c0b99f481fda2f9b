"""Two processes on this machine, one device each, that train one model by the usual command."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
from helpers import forked
from helpers.messages import mentions
from helpers.runs import undrawn  # noqa: F401
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_jax.__main__ import main
from vit_jax.checkpoints.checkpointer import load_variables
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.tree_paths import param_paths

pytestmark = [pytest.mark.process, pytest.mark.slow]

# SGD, because Adam turns rounding into steps where the gradient is zero but for rounding.
CONFIG = """
from helpers import linear

def get_config(arg=None):
    config = linear.get_config()
    config.optim = dict(name='sgd', lr=0.5, momentum=0.9, schedule=dict(name='cosine'))
    config.total, config.batch_size = arg, 16
    config.every = dict(log='1', eval='3', checkpoint='3')
    config.parallel = dict(strategy='jit', fsdp=1, min_split_size=64)
    if int(arg) > 6:
        # What is stopped on the way is never evaluated, and needs less to compile.
        config.every.eval = arg
        config.evals = {}
    else:
        config.model.name = 'helpers.two_layers'
        config.evals.few = dict(
            evaluator='fewshot', source='digits', split='test', fit='train[:301]', seeds=2
        )
        config.evals.few.batch_size = 120
        # Nothing is better by so much: all processes have to end at the second evaluation.
        config.total = '9'
        config.early_stop = dict(metric='min:test/loss', patience=1, min_delta=10.0)
        config.checkpoint = dict(keep_best='test/accuracy')
    return config
"""
ENDLESS = '1000000'


def command(folder, total, *flags):
    config = folder.with_suffix('.py')
    config.write_text(CONFIG)
    return ['train', '--workdir', folder, '--config', f'{config}:{total}', *flags]


def environment():
    flags = re.sub(
        r'\S*host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', '')
    ).strip()
    return {**os.environ, 'XLA_FLAGS': flags, 'PYTHONUNBUFFERED': '1'}


def free_address():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return f'127.0.0.1:{probe.getsockname()[1]}'


@contextlib.contextmanager
def two_processes(repo, folder, total, *flags, heartbeat=20, second=(), address='', code=''):
    """Both processes of a job.

    Args:
      repo, folder, total, flags: of the command.
      heartbeat: in seconds.
      second: flags of process 1 alone.
      address: of process 0; a free one by default.
      code: a program to run in place of the command, with its words.
    """
    meeting = ['--coordinator', address or free_address(), '--num-processes', '2']
    words = command(folder, total, *flags, *meeting, '--heartbeat', str(heartbeat))
    processes = [
        forked.start(
            [*words, '--process-id', rank, *(second if rank else ())],
            environment(),
            code=code,
            cwd=repo,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def finish(process, timeout=90):
    """Exit code and all that was printed."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def metrics(folder):
    path = folder / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith('\n')]


def wait_for_steps(folder, processes, steps=3, timeout=120):
    deadline = time.monotonic() + timeout
    while len(metrics(folder)) < steps:
        for process in processes:
            assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, 'no step was taken'
        time.sleep(0.05)


@pytest.fixture(scope='module')
def alone(run_cli, tmp_path_factory):
    """Six steps by one process, which ends early there."""
    folder = tmp_path_factory.mktemp('alone') / 'run'
    done = run_cli(*command(folder, 6))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    'flag',
    [
        '--config.parallel.fsdp=2',
        pytest.param('--config.parallel.strategy=pmap', marks=pytest.mark.long),
        pytest.param('--config.parallel.slices=2', marks=pytest.mark.long),
    ],
)
def test_two_processes_train_like_one(repo, alone, tmp_path, flag):
    folder = tmp_path / 'run'
    with two_processes(repo, folder, 6, flag) as processes:
        results = [finish(process, timeout=200) for process in processes]
    assert [code for code, _ in results] == [0, 0], results

    step, ours, _ = load_variables(folder / 'checkpoints')
    expected_step, theirs, _ = load_variables(alone / 'checkpoints')
    assert step == expected_step == 6
    theirs = param_paths(theirs)
    for path, value in param_paths(ours).items():
        np.testing.assert_allclose(value, theirs[path], rtol=0, atol=1e-5, err_msg=path)
    for line, reference in zip(metrics(folder), metrics(alone), strict=True):
        assert line.keys() == reference.keys()
        for name in {'step', 'train/loss', 'test/loss', 'test/accuracy'} & line.keys():
            assert line[name] == pytest.approx(reference[name], rel=1e-5), name
        for name in {'few/1_shot', 'few/25_shot'} & line.keys():
            # What two processes learn from is the same; rounding may turn single answers.
            assert line[name] == pytest.approx(reference[name], abs=2 / 360), name
    assert 'few/25_shot' in metrics(folder)[-1]

    (_, spoken), (_, silent) = results
    assert 'step 6/9' in spoken
    best = [load_variables(run / 'checkpoints', 'best')[0] for run in (folder, alone)]
    assert best[0] == best[1]
    assert (
        'no better in 1 evaluation since'
        in json.loads((folder / 'result.json').read_text())['ended']
    )
    assert 'step' not in silent
    assert 'complete: ' in spoken
    assert 'complete: ' not in silent
    assert len(list(folder.glob('events.*'))) == 1
    shown = EventAccumulator(str(folder)).Reload().Images('test/examples')
    assert [each.step for each in shown] == [3, 6]
    assert 'no examples' not in spoken


@pytest.mark.fault(117)
@pytest.mark.long
def test_two_processes_whose_data_stall_save_the_same_step(repo, tmp_path):
    folder = tmp_path / 'run'
    # By one thread each, so that both have made as many batches.
    values = {'data.cache': False, 'data.threads': 1, 'every.checkpoint': ENDLESS}
    values['data.source'] = f'helpers.stalling:{tmp_path}'
    flags = [f'--config.{key}={value}' for key, value in values.items()]
    (tmp_path / 'stall').touch()
    with two_processes(repo, folder, ENDLESS, *flags) as processes:
        wait_for_steps(folder, processes, 20)
        time.sleep(2)
        processes[1].send_signal(signal.SIGTERM)
        results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_PREEMPTED] * 2, results
    assert len(list((folder / 'checkpoints').iterdir())) == 1


ROWS = """
import hashlib, json, sys
import jax
import numpy as np
from helpers import linear
from vit_jax.config import load
from vit_jax.runtime import processes
from vit_jax.trainer import build, evaluate

address, count, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    processes.initialize(address, count, rank)

def train(devices, **parallel):
    config = linear.get_config()
    config.batch_size, config.parallel = 16, parallel
    config.data.transforms = 'pad_and_crop(2)'
    made = build.build(load.override(config, ()), devices)
    program = made.program
    state, batches = program.layout.create(program.init), made.data.train_batches()
    found = {'losses': [], 'counts': [], 'images': {}}
    for _ in range(2):
        batch = next(batches)
        placed = program.layout.put_batch(batch)
        for part in placed['image'].addressable_shards:
            content = np.asarray(part.data).tobytes()
            found['images'][part.index[0].start or 0] = hashlib.sha256(content).hexdigest()
        state, metrics = program.train_step(state, placed)
        found['losses'].append(float(jax.device_get(metrics['loss'])))
        found['counts'].append(made.data.count(batch)['images'])
        jax.block_until_ready(state)  # Gloo hangs where steps of two devices a process overlap
    if parallel:
        found['results'] = evaluate.run(program.eval_steps, made.evaluations, state.variables)
    return found

a, b, c, d = jax.devices()
print(json.dumps({
    'interleaved': train([a, c, b, d]),
    'reversed': train([c, a]),
    'shared': train([a, c], tensor=2),
}))
"""


@pytest.mark.fault(101)
@pytest.mark.long
def test_rows_go_to_the_devices_that_hold_them(repo):
    """Two processes whose devices interleave, come in another order, or hold the same rows."""
    address = free_address()
    flags = '--xla_force_host_platform_device_count='
    jobs = [(1, 0, 4), (2, 0, 2), (2, 1, 2)]
    started = [
        forked.start(
            [address, count, rank],
            environment() | {'XLA_FLAGS': f'{environment()["XLA_FLAGS"]} {flags}{devices}'},
            code=ROWS,
            cwd=repo,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for count, rank, devices in jobs
    ]
    results = [finish(process) for process in started]
    assert [code for code, _ in results] == [0] * 3, results
    alone, first, second = (json.loads(text.splitlines()[-1]) for _, text in results)
    for name, expected in alone.items():
        assert expected['counts'] == [16, 16]
        assert first[name]['images'] | second[name]['images'] == expected['images'], name
        for found in (first[name], second[name]):
            assert found['counts'] == expected['counts'], name
            # Gloo adds up four numbers in another order than one process does.
            rounding = 1e-6 if name == 'interleaved' else 0
            assert found['losses'] == pytest.approx(expected['losses'], rel=rounding, abs=0), name
            assert found.get('results') == expected.get('results'), name
    assert sorted(first['interleaved']['images']) == ['0', '8']
    assert sorted(second['interleaved']['images']) == ['12', '4']
    assert first['shared']['images'] == second['shared']['images']


@pytest.mark.fault(4)
def test_sigterm_to_one_makes_both_save_the_same_step(repo, tmp_path, one_device, capsys):
    folder = tmp_path / 'run'
    with two_processes(repo, folder, ENDLESS) as processes:
        wait_for_steps(folder, processes)
        processes[1].send_signal(signal.SIGTERM)
        results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_PREEMPTED] * 2, results
    steps = [int(re.search(r'stopped after step (\d+)/', text)[1]) for _, text in results]
    saved, variables, _ = load_variables(folder / 'checkpoints')
    assert steps == [saved, saved]
    assert metrics(folder)[-1]['step'] == saved
    assert all(np.isfinite(x).all() for x in param_paths(variables).values())

    words = command(folder, ENDLESS, f'--stop-at={saved + 2}')
    assert main([*map(str, words)]) == EXIT_PREEMPTED
    assert f'resumes after step {saved}' in capsys.readouterr().out
    assert metrics(folder)[-1]['step'] == saved + 2


@pytest.mark.fault(6)
def test_a_killed_process_ends_the_other_at_once(repo, tmp_path):
    folder = tmp_path / 'run'
    with two_processes(repo, folder, ENDLESS, heartbeat=60) as processes:
        wait_for_steps(folder, processes)
        processes[1].kill()
        code, output = finish(processes[0], timeout=30)
    assert code == 1, output
    assert mentions(output, 'error:', 'process 0 of 2')
    assert mentions(output, 'continues', 'checkpoint')
    assert 'Traceback' not in output


@pytest.mark.fault(46)
def test_the_death_of_the_coordinator_ends_the_other_at_once(repo, tmp_path):
    folder = tmp_path / 'run'
    with two_processes(repo, folder, ENDLESS, heartbeat=60) as processes:
        wait_for_steps(folder, processes)
        processes[0].kill()
        code, output = finish(processes[1], timeout=30)
    assert_lost(code, output, 'process 1 of 2')


@pytest.fixture(scope='module')
def hanging(repo, tmp_path_factory):
    """The folder and the first process of a job whose second hangs; it ends during other tests."""
    folder = tmp_path_factory.mktemp('hanging') / 'run'
    with two_processes(repo, folder, ENDLESS, '--step-timeout=15', heartbeat=300) as processes:
        wait_for_steps(folder, processes)
        processes[1].send_signal(signal.SIGSTOP)
        yield folder, processes[0]


@pytest.mark.fault(46)
@pytest.mark.usefixtures('hanging')
@pytest.mark.long
def test_a_silent_process_ends_the_job_after_the_heartbeat(repo, tmp_path):
    folder = tmp_path / 'run'
    with two_processes(repo, folder, ENDLESS, heartbeat=5) as processes:
        wait_for_steps(folder, processes)
        processes[1].send_signal(signal.SIGSTOP)
        code, output = finish(processes[0], timeout=40)
    assert_lost(code, output, 'process 0 of 2')


TWO_ENDS = """
import os, threading, time
from vit_jax.runtime import processes

processes.handle_abort('process 1 of 2')
write = os.write

def interrupted(descriptor, line):
    # What C++ does meanwhile, in a thread of its own.
    write(2, b'terminate called\\n')
    threading.Thread(target=os.abort).start()
    time.sleep(1)
    return write(descriptor, line)

os.write = interrupted
processes.end_process('error: the reason', 3)
"""


@pytest.mark.fault(46)
def test_an_abort_in_the_middle_of_the_end_adds_nothing(repo):
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    code, output = finish(forked.start([], environment(), code=TWO_ENDS, cwd=repo, **pipes))
    assert (code, output) == (3, 'error: the reason\n')


def assert_lost(code, output, who):
    """One line that says so comes last, without a stack of C++."""
    assert code == 1, output
    last = output.splitlines()[-1]
    assert last.startswith(f'error: {who} lost another process'), output
    assert mentions(last, 'continues', 'checkpoint')
    assert 'stack trace' not in output


@pytest.mark.fault(39)
@pytest.mark.parametrize(
    ('flags', 'second', 'said'),
    [
        (
            ('--config.optim.lr=0.001',),
            ('--config.optim.lr=0.002',),
            'process 1 has config.optim.lr=0.002, process 0 0.001: start every process',
        ),
        (
            (),
            ('--stop-at=3', '--config.data.split=train[2000:]'),
            'process 1 has config.data.split="train[2000:]", process 0 "train"; '
            '--stop-at=3, process 0 null: ',
        ),
    ],
)
def test_processes_that_differ_end_together(repo, tmp_path, flags, second, said):
    folder = tmp_path / 'run'
    with two_processes(repo, folder, 6, *flags, second=second) as processes:
        results = [finish(process, 60) for process in processes]
    assert [code for code, _ in results] == [2, 2], results
    for rank, (_, output) in enumerate(results):
        assert f'error: process {rank} of 2: {said}' in output
    assert not folder.exists()


FACTS = """
import sys
from vit_jax.errors import UserError
from vit_jax.runtime import processes

rank = int(sys.argv[1][-1])
processes.initialize(sys.argv[1][:-1], 2, rank)
print(processes.gather(['a' * rank, rank]), processes.gather([]), processes.gather([1][rank:]))
for animal in sys.argv[2:]:
    try:
        facts = {'classes': ['cat', animal], 'vocabulary': animal, 'examples': 7}
        processes.require_same_facts(facts)
        print('alike')
    except UserError as error:
        print(error)
"""


@pytest.mark.fault(39)
def test_facts_that_differ_are_named_on_every_process(repo):
    address = free_address()
    words = [[f'{address}0', 'dog', 'dog'], [f'{address}1', 'dog', 'cow']]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    started = [forked.start(w, environment(), code=FACTS, cwd=repo, **pipes) for w in words]
    results = [finish(process, 60) for process in started]
    assert [code for code, _ in results] == [0, 0], results
    for _, output in results:
        assert "[['', 0], ['a', 1]] [] [[1]]" in output
        assert output.count('alike\n') == output.count('process 1 has classes=') == 1
        assert 'vocabulary="cow", process 0 "dog"' in output
        assert 'examples' not in output


DIGITS_APART = """
from helpers import linear

def get_config(arg=None):
    config = linear.get_config()
    config.data.update(source='folder:images', split='train', transforms='', cache=False)
    config.evals.test = dict(source='folder:images', split='val')
    config.total, config.batch_size = '2', 8
    return config
"""


@pytest.mark.fault(119, 120)
def test_data_that_differ_are_named_on_every_process(repo, tmp_path):
    """A validation image of another class, and a training image replaced; each host has its own."""
    config = tmp_path / 'config.py'
    config.write_text(DIGITS_APART)
    meeting = ['--coordinator', free_address(), '--num-processes', 2, '--heartbeat', 20]
    words = ['train', '--config', config, '--workdir', tmp_path / 'run', *meeting]
    started = []
    for rank in (0, 1):
        images = tmp_path / f'host_{rank}' / 'images'
        write_images(images / 'train', 8)
        write_images(images / 'val', 4)
        if rank:
            (images / 'val' / 'a' / '0.png').rename(images / 'val' / 'b' / '9.png')
            Image.new('RGB', (8, 8)).save(images / 'train' / 'a' / '0.png')
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
        env = environment() | {'PYTHONPATH': f'{repo}:{repo}/tests'}
        rest = {'cwd': images.parent, **pipes}
        started.append(forked.start([*words, '--process-id', rank], env, **rest))
    results = [finish(process) for process in started]
    assert [code for code, _ in results] == [2, 2], results
    for _, output in results:
        assert mentions(output, '1', 'config.data', 'files=')
        assert mentions(output, 'config.evals.test', 'labels=')
        assert 'config.data: names' not in output
        assert 'examples=' not in output
    assert not (tmp_path / 'run').exists()


def write_images(folder, count):
    """So many images of noise for each of two classes."""
    for name in ('a', 'b'):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f'{i}.png')


@pytest.mark.fault(39)
@pytest.mark.fault(132)
@pytest.mark.long
@pytest.mark.parametrize('mistaken', [0, 1])
def test_a_mistake_in_one_process_ends_both_alike(repo, tmp_path, mistaken):
    folder = tmp_path / 'run'
    first, second = (f'--step-timeout={-1 if rank == mistaken else 0}' for rank in (0, 1))
    with two_processes(repo, folder, 6, first, heartbeat=60, second=(second,)) as processes:
        results = [finish(process, 60) for process in processes]
    assert [code for code, _ in results] == [2, 2], results
    for _, output in results:
        assert output.splitlines()[-1].startswith(
            f'error: process {mistaken} of 2: --step-timeout -1'
        )
        assert 'Traceback' not in output
    assert not folder.exists()


ONE_FAILS = """
import sys
import jax
from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.trainer.loop import Loop

run = Loop.run

def fails(loop):
    if jax.process_index() == 1:
        raise REASON
    return run(loop)

Loop.run = fails
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.fault(132)
@pytest.mark.parametrize(
    ('reason', 'code', 'said'),
    [
        ("UserError('record 7 is damaged')", 2, 'process 1 of 2: record 7 is damaged'),
        pytest.param(
            *("ZeroDivisionError('a defect')", 1),
            'process 1 of 2 failed (ZeroDivisionError: a defect)',
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_reason_of_one_process_is_that_of_all(repo, tmp_path, reason, code, said):
    folder, program = tmp_path / 'run', ONE_FAILS.replace('REASON', reason)
    with two_processes(repo, folder, ENDLESS, heartbeat=60, code=program) as processes:
        results = [finish(process, 60) for process in processes]
    assert [found for found, _ in results] == [code] * 2, results
    for _, output in results:
        assert output.splitlines()[-1].startswith(f'error: {said}')
    assert folder.exists() == (code == 1), 'a mistake leaves no folder'


HASTY = """
import sys
from vit_jax.runtime import rendezvous
from vit_jax.trainer import guards
rendezvous.PORT_SECONDS = rendezvous.STRANGER_SECONDS = rendezvous.FIRST_LINE_SECONDS = 0.5
guards.SHARED_SECONDS = 0.5
rendezvous.WAIT_SECONDS = 30
from vit_jax.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.fault(129)
def test_a_port_that_another_program_has_is_told_by_both(repo, tmp_path):
    # The program never answers, and there is no process 0 that might take longer.
    code = HASTY.replace('WAIT_SECONDS = 30', 'WAIT_SECONDS, rendezvous._ANSWER_SECONDS = 30, 0.5')
    with socket.create_server(('127.0.0.1', 0)) as other:
        address = f'127.0.0.1:{other.getsockname()[1]}'
        with two_processes(repo, tmp_path / 'run', 6, address=address, code=code) as processes:
            results = [finish(process, 60) for process in processes]
    assert [code for code, _ in results] == [1, 1], results
    for _, output in results:
        assert output.splitlines()[-1].startswith('error: ')
        assert address.rpartition(':')[2] in output
        assert 'Traceback' not in output


@pytest.mark.fault(131)
def test_a_folder_that_processes_do_not_share_is_refused_by_all(repo, tmp_path):
    folder, other = tmp_path / 'run', tmp_path / 'other'
    second = ('--workdir', str(other))
    with two_processes(repo, folder, 6, code=HASTY, second=second) as processes:
        results = [finish(process, 60) for process in processes]
    assert [code for code, _ in results] == [2, 2], results
    for rank, (_, output) in enumerate(results):
        last = output.splitlines()[-1]
        assert last.startswith(f'error: process {rank} of 2: --workdir: process 1 on ')
        assert str(folder) in last
        assert str(other) in last
    assert not folder.exists()
    assert not other.exists()


@pytest.mark.fault(133)
def test_a_process_says_whom_it_waits_for(repo, tmp_path):
    folder, address = tmp_path / 'run', free_address()
    words = [*command(folder, 6), '--coordinator', address, '--num-processes', '3']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    first, second = (
        forked.start([*words, '--process-id', rank], environment(), code=HASTY, cwd=repo, **pipes)
        for rank in (0, 1)
    )
    with first, second:
        try:
            said = iter(first.stdout.readline, '')
            assert any(line.endswith(' for process 2\n') for line in said)
            assert 'process 1 of 3 waits for ' in second.stdout.readline()
            second.send_signal(signal.SIGTERM)
            assert any(line.endswith(' for processes 1, 2\n') for line in said)
            assert first.poll() is None
        finally:
            first.kill()
            second.kill()


LEAVES = """
import atexit, threading
import jax
from vit_jax.runtime import processes
jax.process_count = lambda: 2
processes.BARRIER_SECONDS = processes.EXIT_SECONDS = 0.2
with processes.fail_together():
    atexit.register(threading.Event().wait)
"""


@pytest.mark.fault(58)
def test_an_exit_that_hangs_ends_all_the_same(repo):
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    code, output = finish(forked.start([], environment(), code=LEAVES, cwd=repo, **pipes))
    assert code == 1
    assert 'Timeout (' in output and 'in wait' in output


LOSES = """
import os, signal, sys
rank, address = int(sys.argv[1]), sys.argv[2]
from vit_jax.runtime import process, processes
processes.initialize(address, 2, rank, 3)
with processes.fail_together():
    assert processes.broadcast(7) == 7
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
process.exit_if_threads_hang(0)
"""


@pytest.mark.fault(46)
def test_a_process_that_is_lost_when_all_is_done_changes_nothing(repo):
    """JAX's exit ended in a traceback, `std::bad_cast`, among lines of C++."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    words = [free_address()]
    first, second = (
        forked.start([rank, *words], environment(), code=LOSES, cwd=repo, **pipes)
        for rank in (0, 1)
    )
    with first, second:
        code, output = finish(first)
        assert second.wait() == -signal.SIGKILL
    assert code == 0, output
    assert not [line for line in output.splitlines() if 'Gloo' not in line]


REPORTS_LATE = """
import os
import jax
from vit_jax.runtime import process, processes
def shutdown():
    raise RuntimeError('a process was lost')
jax.distributed.shutdown = shutdown
os._exit = lambda code, end=os._exit: (os.write(2, b'a report'), end(code))
processes._job.client = object()
process.exit_if_threads_hang(0)
"""


@pytest.mark.fault(46)
def test_reports_of_a_loss_after_all_is_done_are_not_shown(repo):
    """Threads of the coordination service still wrote when standard error was shown again."""
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    ended = finish(forked.start([], environment(), code=REPORTS_LATE, cwd=repo, **pipes))
    assert ended == (0, '')


@pytest.mark.fault(46)
def test_a_process_that_hangs_ends_the_job_after_the_step_timeout(hanging):
    folder, process = hanging
    code, output = finish(process, timeout=100)
    assert code == 1, output
    said = re.search(r'error: process 0 of 2: .*step (\d+) .*15 s', output)
    assert int(said[1]) >= metrics(folder)[-1]['step'] - 1
    assert '-- MainThread' in output
    assert 'vit_jax/trainer/loop.py' in output
