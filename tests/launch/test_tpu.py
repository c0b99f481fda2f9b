"""`launch tpu` with a service that plays courses of events: the run ends and nothing is left."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import time

import pytest
from helpers.messages import mentions

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.launch import queued, remote, tpu_loop
from vit_jax.launch.queued import Answer

CONFIG = f'{pathlib.Path(__file__).resolve().parents[2]}/experiments/vit/digits.py:smoke'
TRAIN = ['train', '--config', CONFIG, '--workdir', 'gs://lab/a']
USUAL = {
    'create': 'ok',
    'describe': 'WAITING_FOR_RESOURCES, ACTIVE',
    'scp': 'ok',
    'install': 'ok',
    'start': 'ok',
    'stop': 'ok',
    'status': 'running step 1, running step 2, 0 done',
    'delete': 'ok',
}
SCRIPTS = {
    remote.READY: 'install',
    remote.STARTED: 'start',
    remote.STOPPED: 'stop',
    remote.STATE: 'status',
}


class Cloud:
    """One resource, and the answers to gcloud about it: an event a call, of which the last stays.

    `fails TEXT` is an error, `orphans TEXT` one of a request that is granted all the same. `status`
    has the state of the run and a line of its log, `install` and `start` the number of machines
    that do not answer.
    """

    def __init__(self):
        self.exists, self.slices, self.label, self.heard = False, 1, '', []
        self.plays()

    def plays(self, **events):
        self.events = {verb: text.split(', ') for verb, text in {**USUAL, **events}.items()}

    def call(self, words, limit=0):
        verb = words[words.index('queued-resources') + 1]
        verb = next((name for marker, name in SCRIPTS.items() if marker in words[-1]), verb)
        self.heard.append((verb, words))
        if verb == 'describe' and not self.exists:
            return Answer(1, err='ERROR: (gcloud.describe) NOT_FOUND: no such resource')
        events = self.events[verb]
        event, _, text = (events.pop(0) if len(events) > 1 else events[0]).partition(' ')
        if verb in ('create', 'delete') and event != 'fails':
            self.exists = verb == 'create'
        if event in ('fails', 'orphans'):
            return Answer(1, err=f'ERROR: (gcloud.{verb}) {text}')
        if verb == 'create':
            self.slices = int(option(words, '--node-count') or 1)
            self.label = option(words, f'--labels={queued.LABEL}')
        return Answer(0, getattr(self, verb, lambda *_: '')(event, text))

    def describe(self, event, text):
        node = {'labels': {queued.LABEL: self.label}}
        spec = {'node': node, 'multisliceParams': {'nodeCount': str(self.slices)}}
        state = {'state': event, 'failedData': {'error': {'message': text}}}
        return json.dumps({'state': state, 'tpu': {'nodeSpec': [spec]}})

    def status(self, event, text):
        return f'{text}\n\n{remote.STATE} {event} 5\n'

    def install(self, event, text):
        return f'{remote.READY}\n' * self.machines(event)

    def start(self, event, text):
        return f'{remote.STARTED}\n' * self.machines(event)

    def machines(self, event):
        return 4 * self.slices - (0 if event == 'ok' else int(event))

    def calls(self, verb):
        """The command lines of one verb."""
        return [words for name, words in self.heard if name == verb]

    def story(self):
        """The verbs in order, without those that only ask."""
        return ' '.join(verb for verb, _ in self.heard if verb not in ('describe', 'status'))


def option(words, name):
    return next((word.partition(f'{name}=')[2] for word in words if word.startswith(name)), '')


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / 'constraints.txt').write_text('jax\n')
    subprocess.run(['git', 'init', '-q', str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cloud(repository, monkeypatch):
    cloud = Cloud()
    monkeypatch.setattr(queued, 'call', cloud.call)
    return cloud


def launch(*flags, command=TRAIN):
    words = ['tpu', '--tpu', 'v5litepod-16', '--zone', 'us-a', '--poll', '0', *flags]
    return cli.main(['launch', *words, '--', *command])


BEGUN = 'create scp install start'
ONCE = f'{BEGUN} delete'
AGAIN = f'{BEGUN} start start delete'
TAKEN = 'ACTIVE, SUSPENDED, SUSPENDED, SUSPENDED, ACTIVE'
# Name, exit code, what is done, and what is said; then flags, and what is not as in USUAL.
COURSES = """
success | 0 | ONCE | nothing is left
stock-out | 0 | create delete ONCE | FAILED (no more capacity)
  describe: WAITING_FOR_RESOURCES, FAILED no more capacity, FAILED, ACTIVE
preemption while copying | 0 | create scp delete ONCE | the machines were taken away
  scp: fails lost connection, ok
  describe: TAKEN
preemption while running | 0 | ONCE ONCE | taken away (SUSPENDING)
  status: running step 1, fails unreachable, running step 1, 0
  describe: ACTIVE, SUSPENDING, SUSPENDING, SUSPENDED, SUSPENDED, ACTIVE
a run that ends because others were preempted | 0 | ONCE ONCE | the run ended with exit code 1
  flags: --restarts 0
  status: 1, 0
  describe: TAKEN
the first machine falls silent | 0 | ONCE ONCE | the first machine does not answer
  status: fails unreachable, fails unreachable, fails unreachable, 0
a machine that never answers | 1 | AGAIN AGAIN | gave up after 1 restarts
  flags: --restarts 1
  start: 1
a machine that answers late | 0 | create scp install install start delete | trying again: 3 of 4
  install: 1, ok
quota refused | 2 | create | Quota limit
  create: fails RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded
quota refused in the queue | 2 | create delete | gcloud refused: quota exceeded
  describe: FAILED quota exceeded
quota not free yet after a preemption | 0 | ONCE create ONCE | not granted yet
  create: ok, fails Quota exceeded, ok
  status: fails, 0
  describe: TAKEN
a service that is busy | 0 | create ONCE | not granted yet
  create: fails UNAVAILABLE: try later, ok
a request that was granted in silence | 2 | create delete | (gcloud.create) PERMISSION_DENIED
  create: orphans PERMISSION_DENIED
bad SSH keys | 2 | create scp scp scp delete | refuse your SSH key
  scp: fails Permission denied (publickey).
SUSPENDED while waiting | 0 | create delete ONCE | SUSPENDED
  describe: PROVISIONING, SUSPENDED, SUSPENDED, ACTIVE
a mistake of the user | 2 | ONCE | nothing is left
  status: running, 2
a run that diverges | 3 | ONCE | nothing is left
  status: 3
a run that is stopped with its state saved | 0 | AGAIN | exit code 75
  flags: --restarts 0
  status: 75, 75, 0
a run that fails too often | 1 | AGAIN | exit code 137
  flags: --restarts 2
  status: 1, 137, 1
a deletion that fails once | 0 | ONCE delete | nothing is left
  delete: fails INTERNAL, ok
"""


def courses():
    text = COURSES.replace('ONCE', ONCE).replace('AGAIN', AGAIN).replace('TAKEN', TAKEN)
    for block in re.split(r'\n(?=\S)', text.strip()):
        head, *lines = block.splitlines()
        name, code, story, said = head.split(' | ')
        events = {'flags': '', **dict(line.strip().split(': ', 1) for line in lines)}
        yield pytest.param(int(code), story, said, events, id=name)


@pytest.mark.fault(102, 103, 104, 105, 107)
@pytest.mark.parametrize(('code', 'story', 'said', 'events'), [*courses()])
def test_course_of_events(code, story, said, events, cloud, capsys):
    flags = events.pop('flags').split()
    cloud.plays(**events)
    assert launch(*flags) == code
    assert cloud.story() == story
    assert not cloud.exists
    assert said in capsys.readouterr().err


def test_what_is_requested_and_run(cloud, capsys):
    flags = ['--spot', '--slices=2', '--project=lab', '--gcloud=network=n']
    assert launch(*flags, '--env', 'A=b c', '--setup', 'echo disk') == 0
    assert capsys.readouterr().out == 'step 1\nstep 2\ndone\n'
    (create,), (install,), (start,) = map(cloud.calls, ('create', 'install', 'start'))
    assert create[:6] == ['gcloud', 'compute', 'tpus', 'queued-resources', 'create', JOB.name]
    wanted = '--node-count=2 --node-prefix=vit-jax-train --accelerator-type=v5litepod-16 --spot'
    wanted += ' --runtime-version=v2-alpha-tpuv5-lite --zone=us-a --project=lab --network=n --quiet'
    assert set(wanted.split()) <= set(create)
    assert {'--node=all', '--worker=all'} <= set(start) & set(install)
    assert "'.[tpu,gcs]'" in install[-1] and 'echo disk' in install[-1]
    assert '--distributed' in start[-1] and 'JAX_COORDINATOR_PORT=8476' in start[-1]
    assert all({'--node=0', '--worker=0'} <= set(call) for call in cloud.calls('status'))


def test_flex_start_is_requested_by_its_name(cloud):
    assert launch('--flex-start', '24h') == 0
    (create,) = cloud.calls('create')
    assert create[1] == 'alpha'
    assert {'--provisioning-model=flex-start', '--max-run-duration=24h'} <= set(create)
    assert '--node-id=vit-jax-train' in create and '--spot' not in create


@pytest.mark.fault(102)
def test_fewer_slices_will_do(cloud, capsys):
    cloud.plays(describe=', '.join(['WAITING_FOR_RESOURCES'] * 4 + ['ACTIVE']), status='0')
    assert launch('--slices=3', '--min-slices=1', '--patience=0') == 0
    counts = [next(word for word in call if 'node-' in word) for call in cloud.calls('create')]
    assert counts == ['--node-count=3', '--node-count=2', '--node-id=vit-jax-train']
    assert mentions(capsys.readouterr().err, '2 slices', '1')
    assert not cloud.exists


@pytest.mark.fault(104)
def test_a_run_that_fails_on_fewer_slices_is_started_on_these_again(cloud):
    cloud.plays(describe='WAITING_FOR_RESOURCES, WAITING_FOR_RESOURCES, ACTIVE', status='1, 75, 0')
    assert launch('--slices=2', '--min-slices=1', '--patience=0', '--restarts=1') == 0
    assert cloud.story() == f'create delete {BEGUN} start start delete'


@pytest.mark.fault(102)
def test_fewer_slices_than_the_minimum_are_not_asked_for(cloud):
    cloud.plays(describe=', '.join(['WAITING_FOR_RESOURCES'] * 6 + ['ACTIVE']))
    assert launch('--slices', '2', '--patience', '0') == 0
    assert len(cloud.calls('create')) == 1


JOB = queued.TpuJob(TRAIN, 'vit-jax-train', 'v5litepod-16', zone='us-a', extras=['gcs'])


def interrupted(pauses):
    """The loop of JOB, whose n-th pause is cut short by Ctrl-C, and every pause after it."""
    left = [None] * (pauses - 1)

    def sleep(seconds):
        if not left:
            raise KeyboardInterrupt
        left.pop()

    return tpu_loop.Loop(JOB, tpu_loop.LoopTimes(sleep=sleep))


@pytest.mark.fault(106)
@pytest.mark.parametrize(('pauses', 'story'), [(1, 'create delete'), (3, f'{BEGUN} stop delete')])
def test_ctrl_c_saves_the_state_and_leaves_nothing(pauses, story, cloud, capsys):
    cloud.plays(status='running')
    with pytest.raises(KeyboardInterrupt):
        interrupted(pauses).run()
    assert cloud.story() == story
    assert not cloud.exists
    assert mentions(capsys.readouterr().err, 'nothing', 'us-a')


@pytest.mark.fault(107)
def test_ctrl_c_again_says_what_is_left(cloud):
    cloud.plays(status='running', delete='fails INTERNAL')
    with pytest.raises(UserError, match=r'vit-jax-train is left \(ACTIVE\) .*: gcloud'):
        interrupted(3).run()


@pytest.mark.fault(107)
def test_a_deletion_that_fails_is_the_last_word(cloud, capsys):
    cloud.plays(delete='fails INTERNAL')
    assert launch() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert mentions(last, 'vit-jax-train', '(gcloud.delete) INTERNAL')
    assert last.endswith('delete vit-jax-train --zone=us-a --quiet --force')


@pytest.mark.fault(106)
def test_a_loop_that_was_killed_goes_on(cloud, capsys):
    cloud.plays(describe='ACTIVE')
    cloud.exists, cloud.label = True, JOB.resource().label
    assert launch() == 0
    assert cloud.story() == 'delete'
    assert capsys.readouterr().out == 'step 2\ndone\n', 'the first look was for the state'


@pytest.mark.fault(106)
def test_a_loop_that_was_killed_before_the_start_goes_on(cloud):
    cloud.plays(describe='ACTIVE', status='new, 0')
    cloud.exists, cloud.label = True, JOB.resource().label
    assert launch() == 0
    assert cloud.story() == ONCE.removeprefix('create ')


def test_the_resource_of_another_command_is_left_alone(cloud, capsys):
    cloud.exists, cloud.label = True, '0'
    assert launch() == 2
    assert '--job-name' in capsys.readouterr().err
    assert cloud.exists and cloud.story() == ''


def test_gcloud_that_cannot_describe(cloud, capsys):
    cloud.exists = True
    cloud.plays(describe='fails You do not have an active account selected.')
    assert launch() == 2
    assert 'active account' in capsys.readouterr().err


def test_dry_run_prints_the_commands(cloud, capsys):
    assert launch('--dry-run', '--slices', '2') == 0
    words = shlex.split(capsys.readouterr().out)
    verbs = [words[i + 1] for i, word in enumerate(words) if word == 'queued-resources']
    assert verbs == ['create', 'describe', 'scp', 'ssh', 'ssh', 'ssh', 'delete']
    assert not cloud.heard


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ('--tpu tpu7x-16', 'launch gke'),
        ('--tpu v3-32 --slices 2', ('v3', 'together')),
        ('--min-slices 2', '--min-slices 2 is more than --slices 1'),
        ('--flex-start soon', "--flex-start 'soon'"),
        ('--flex-start 1h --spot', 'without --spot'),
        ("--job-name 'A b'", 'lower-case letters'),
        ("--zone 'us a'", "--zone 'us a'"),
        ('--env A-B=1', '--env'),
        ("--gcloud 'two words'", "--gcloud 'two words'"),
        ('--env TFDS_DATA_DIR=gs://a', '--setup'),
        ('-- evaluate --workdir gs://lab/a', ('evaluate', 'process')),
        (f'-- train --config {CONFIG} --workdir runs/a', ('machine', 'deleted')),
    ],
)
def test_a_mistake_is_one_line_and_rents_nothing(flags, message, cloud, capsys):
    flags, _, command = flags.partition('-- ')
    assert launch(*shlex.split(flags), command=command.split() or TRAIN) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, message)
    assert not cloud.heard


def test_a_machine_without_gcloud_and_a_folder_without_the_repository(
    repository, tmp_path, capsys, monkeypatch
):
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'git').symlink_to(shutil.which('git'))
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    for said in (('gcloud', 'install'), ('root', 'repository')):
        assert launch() == 2
        assert mentions(capsys.readouterr().err, said)
        pathlib.Path('constraints.txt').unlink(missing_ok=True)


def test_a_call_that_hangs_is_ended_with_its_children():
    nap = f'86400.{os.getpid()}'  # a day, so that a test which waits for its end does not pass
    assert queued.call(['bash', '-c', 'echo a; echo b >&2; exit 3']) == Answer(3, 'a\n', 'b\n')
    answer = queued.call(['bash', '-c', f'sleep {nap} & wait'], limit=0.5)
    assert answer.code == 255 and 'no answer within' in answer.reason
    assert nap not in subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout


def test_an_unknown_description_is_no_resource():
    assert queued.parse_description('{}').state == queued.UNKNOWN
    assert queued.parse_description('no JSON').state == queued.UNKNOWN
    assert queued.parse_description(json.dumps({'state': {'state': 'ACTIVE'}})).slices == 1


@pytest.fixture
def machine(tmp_path):
    """Runs scripts as a machine would: its home folder has the code of a command."""
    code = tmp_path / 'a' / '.venv' / 'bin'
    code.mkdir(parents=True)

    def run(script):
        environ = {'HOME': str(tmp_path), 'PATH': '/usr/bin:/bin'}
        words = ['bash', '-c', script]
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=30).stdout

    run.python = code / 'python'
    return run


def wait_for(machine, state, seen=0):
    for _ in range(200):
        status = remote.read_status(machine(remote.status('a', seen)))
        if status.state == state:
            return status
        time.sleep(0.02)
    raise AssertionError(status)


def test_the_scripts_start_show_and_end_a_command(machine):
    machine.python.write_text('#!/bin/bash\necho "$A" "$@"; echo Zoë; exit 3\n')
    machine.python.chmod(0o755)
    assert wait_for(machine, remote.NEW).log == ''
    start = remote.start('a', ['train', "it's $HOME"], {'A': 'b c'})
    assert remote.STARTED in machine(start)
    status = wait_for(machine, '3')
    assert status.log == "b c -m vit_jax train it's $HOME\nZoë\n"
    assert status.size == len(status.log.encode())
    rest = wait_for(machine, '3', seen=status.size - 5)
    assert rest.log == 'Zoë\n' and rest.size == status.size


@pytest.mark.slow
def test_a_command_that_is_stopped_saves_its_state_and_one_that_is_killed_is_known(machine):
    machine.python.write_text(
        '#!/bin/bash\ntrap "echo saved; exit 75" TERM\necho on\nwhile :; do sleep 0.05; done\n'
    )
    machine.python.chmod(0o755)
    assert remote.STARTED in machine(remote.start('a', ['train'], {}))
    wait_for(machine, remote.RUNNING)
    while 'on' not in wait_for(machine, remote.RUNNING).log:
        pass
    assert remote.STOPPED in machine(remote.stop('a'))
    assert wait_for(machine, '75').log.endswith('saved\n')
    machine(remote.start('a', ['train'], {}))
    wait_for(machine, remote.RUNNING)
    machine('kill -KILL -- -$(cat ~/a.run/pid)')
    assert wait_for(machine, str(remote.KILLED))


def test_the_archive_holds_what_git_does_not_ignore(repository):
    pathlib.Path('.gitignore').write_text('runs\n')
    pathlib.Path('runs').mkdir()
    pathlib.Path('runs/a').write_text('')
    with remote.archive() as path:
        listed = subprocess.run(['tar', 'tzf', path], capture_output=True, text=True).stdout
    assert sorted(listed.split()) == ['.gitignore', 'constraints.txt']
