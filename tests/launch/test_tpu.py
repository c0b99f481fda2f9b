"""`launch tpu` against a gcloud that plays courses of events: the run ends and nothing is left."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import time

import pytest

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.launch import queued, remote, tpu, tpu_loop

CONFIG = f'{pathlib.Path(__file__).resolve().parents[2]}/experiments/vit/digits.py:smoke'
TRAIN = ['train', '--config', CONFIG, '--workdir', 'gs://lab/a']
# One line an event, in a file for each call; the last event stays.
GCLOUD = r"""#!/bin/bash
cd "$(dirname "$0")/cloud" || exit 9
printf '%s\0' "$@" $'\x1e' >> calls
while [ "$1" != queued-resources ]; do shift; done
verb=$2; command="${!#}"
case "$command" in
  *vit-jax:ready*) verb=install;; *vit-jax:started*) verb=start;;
  *vit-jax:stopped*) verb=stop;; *vit-jax:state*) verb=status;;
esac
echo $verb >> verbs
if [ $verb = describe ] && [ ! -f exists ]; then
  echo "ERROR: (gcloud.describe) NOT_FOUND: no such resource" >&2; exit 1
fi
read -r event text < $verb
[ "$(wc -l < $verb)" -gt 1 ] && sed -i 1d $verb
[ "$event" = fails ] && { echo "ERROR: (gcloud.$verb) $text" >&2; exit 1; }
[ "$event" = orphans ] && { touch exists; echo "ERROR: (gcloud.$verb) $text" >&2; exit 1; }
case $verb in
  create) touch exists; [[ "$*" =~ node-count=([0-9]+) ]]; echo "${BASH_REMATCH[1]:-1}" > slices
    [[ "$*" =~ vit-jax=([0-9a-f]+) ]]; echo "${BASH_REMATCH[1]}" > label;;
  delete) rm -f exists;;
  describe) echo '{"state": {"state": "'$event'", "failedData": {"error": {"message": "'$text'"}}},
      "tpu": {"nodeSpec": [{"node": {"labels": {"vit-jax": "'$(cat label)'"}},
      "multisliceParams": {"nodeCount": "'$(cat slices)'"}}]}}';;
  status) printf '%s\n\nvit-jax:state %s 5\n' "$text" "$event";;
  install|start) hosts=$(($(cat slices) * 4 - ${event/ok/0}))
    for _ in $(seq $hosts); do echo "${command##*echo }"; done;;
esac
exit 0
"""
USUAL = {
    'create': ['ok'],
    'describe': ['WAITING_FOR_RESOURCES', 'ACTIVE'],
    'scp': ['ok'],
    'install': ['ok'],
    'start': ['ok'],
    'stop': ['ok'],
    'status': ['running step 1', 'running step 2', '0 done'],
    'delete': ['ok'],
}


class Cloud:
    """A gcloud on the path, and what has become of its resource."""

    def __init__(self, folder):
        self.folder = folder / 'cloud'
        self.folder.mkdir()
        (folder / 'gcloud').write_text(GCLOUD)
        (folder / 'gcloud').chmod(0o755)
        self.plays({})

    def plays(self, course):
        for verb, events in {**USUAL, **course}.items():
            (self.folder / verb).write_text(''.join(f'{event}\n' for event in events))

    def holds(self, slices=1, label=''):
        """A resource of an earlier start."""
        for name, text in (('exists', ''), ('slices', slices), ('label', label)):
            (self.folder / name).write_text(str(text))

    @property
    def exists(self):
        return (self.folder / 'exists').exists()

    def calls(self, verb):
        """The command lines that were heard, of one verb."""
        heard = (self.folder / 'calls').read_text().split('\0\x1e\0')[:-1]
        verbs = (self.folder / 'verbs').read_text().split()
        return [line.split('\0') for line, said in zip(heard, verbs, strict=True) if said == verb]

    def story(self):
        """The verbs in order, without those that only ask."""
        verbs = (self.folder / 'verbs').read_text().split()
        return [verb for verb in verbs if verb not in ('describe', 'status')]


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    place = tmp_path / 'repository'
    place.mkdir()
    (place / 'constraints.txt').write_text('jax\n')
    subprocess.run(['git', 'init', '-q', str(place)], check=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    return Cloud(tmp_path)


def launch(*flags, command=TRAIN):
    words = ['tpu', '--tpu', 'v5litepod-16', '--zone', 'us-a', '--poll', '0', *flags]
    return cli.main(['launch', *words, '--', *command])


ONCE = ['create', 'scp', 'install', 'start', 'delete']
AGAIN = ['start', 'delete']
TWICE = [*ONCE, *ONCE]
# name: events, flags, exit code, what is done, what is said
COURSES = {
    'success': ({}, [], 0, ONCE, 'nothing is left'),
    'stock-out': (
        {'describe': ['WAITING_FOR_RESOURCES', 'FAILED no more capacity', 'FAILED', 'ACTIVE']},
        [],
        0,
        ['create', 'delete', *ONCE],
        'FAILED (no more capacity)',
    ),
    'preemption while copying': (
        {
            'scp': ['fails lost connection', 'ok'],
            'describe': ['ACTIVE', *['SUSPENDED'] * 3, 'ACTIVE'],
        },
        [],
        0,
        ['create', 'scp', 'delete', *ONCE],
        'the machines were taken away',
    ),
    'preemption while running': (
        {
            'status': ['running step 1', 'fails unreachable', 'running step 1', '0'],
            'describe': ['ACTIVE', 'SUSPENDING', 'SUSPENDING', *['SUSPENDED'] * 2, 'ACTIVE'],
        },
        [],
        0,
        TWICE,
        'taken away (SUSPENDING)',
    ),
    'a run that ends because others were preempted': (
        {'status': ['1', '0'], 'describe': ['ACTIVE', *['SUSPENDED'] * 3, 'ACTIVE']},
        ['--restarts', '0'],
        0,
        TWICE,
        'the run ended with exit code 1',
    ),
    'the first machine falls silent': (
        {'status': [*['fails unreachable'] * 3, '0']},
        [],
        0,
        TWICE,
        'the first machine does not answer',
    ),
    'a machine that never answers': (
        {'start': ['1']},
        ['--restarts', '1'],
        1,
        ['create', 'scp', 'install', *['start'] * 3, 'delete'] * 2,
        '3 of 4 machines answered; gave up after 1 restarts',
    ),
    'a machine that answers late': (
        {'install': ['1', 'ok']},
        [],
        0,
        ['create', 'scp', 'install', 'install', 'start', 'delete'],
        'trying again: 3 of 4 machines answered',
    ),
    'quota refused': (
        {'create': ["fails RESOURCE_EXHAUSTED: Quota limit 'TPUS' has been exceeded"]},
        [],
        2,
        ['create'],
        'Quota limit',
    ),
    'quota refused in the queue': (
        {'describe': ['FAILED quota exceeded']},
        [],
        2,
        ['create', 'delete'],
        'gcloud refused: quota exceeded',
    ),
    'quota not free yet after a preemption': (
        {
            'create': ['ok', 'fails Quota exceeded', 'ok'],
            'status': ['fails', '0'],
            'describe': ['ACTIVE', *['SUSPENDED'] * 3, 'ACTIVE'],
        },
        [],
        0,
        [*ONCE, 'create', *ONCE],
        'not granted yet',
    ),
    'a service that is busy': (
        {'create': ['fails UNAVAILABLE: try later', 'ok']},
        [],
        0,
        ['create', *ONCE],
        'not granted yet',
    ),
    'a request that was granted in silence': (
        {'create': ['orphans PERMISSION_DENIED']},
        [],
        2,
        ['create', 'delete'],
        'gcloud refused: (gcloud.create) PERMISSION_DENIED',
    ),
    'bad SSH keys': (
        {'scp': ['fails Permission denied (publickey).']},
        [],
        2,
        ['create', *['scp'] * 3, 'delete'],
        'refuse your SSH key',
    ),
    'SUSPENDED while waiting': (
        {'describe': ['PROVISIONING', 'SUSPENDED', 'SUSPENDED', 'ACTIVE']},
        [],
        0,
        ['create', 'delete', *ONCE],
        'SUSPENDED',
    ),
    'a mistake of the user': ({'status': ['running', '2']}, [], 2, ONCE, 'nothing is left'),
    'a run that diverges': ({'status': ['3']}, [], 3, ONCE, 'nothing is left'),
    'a run that is stopped with its state saved': (
        {'status': ['75', '75', '0']},
        ['--restarts', '0'],
        0,
        [*ONCE[:-1], 'start', *AGAIN],
        'exit code 75',
    ),
    'a run that fails too often': (
        {'status': ['1', '137', '1']},
        ['--restarts', '2'],
        1,
        [*ONCE[:-1], 'start', *AGAIN],
        'exit code 137',
    ),
    'a deletion that fails once': (
        {'delete': ['fails INTERNAL', 'ok']},
        [],
        0,
        [*ONCE, 'delete'],
        '',
    ),
}


@pytest.mark.fault(102, 103, 104, 105, 107)
@pytest.mark.parametrize('name', COURSES)
def test_course_of_events(name, cloud, capsys):
    events, flags, code, story, said = COURSES[name]
    cloud.plays(events)
    assert launch(*flags) == code
    assert cloud.story() == story
    assert not cloud.exists
    assert said in capsys.readouterr().err


def test_what_is_requested_and_run(cloud, capsys):
    flags = [
        '--spot',
        '--slices',
        '2',
        '--project',
        'lab',
        '--env',
        'A=b c',
        '--gcloud',
        'network=n',
    ]
    assert launch(*flags, '--setup', 'echo disk') == 0
    shown = capsys.readouterr()
    assert shown.out == 'step 1\nstep 2\ndone\n'
    (create,) = cloud.calls('create')
    assert create[:5] == ['compute', 'tpus', 'queued-resources', 'create', 'vit-jax-train']
    wanted = '--node-count=2 --node-prefix=vit-jax-train --accelerator-type=v5litepod-16 --spot'
    wanted += ' --runtime-version=v2-alpha-tpuv5-lite --zone=us-a --project=lab --network=n --quiet'
    assert set(wanted.split()) <= set(create)
    (start,) = cloud.calls('start')
    assert {'--node=all', '--worker=all'} <= set(start)
    (install,) = cloud.calls('install')
    assert "'.[tpu,gcs]'" in install[-1] and 'echo disk' in install[-1]
    assert '--distributed' in start[-1] and 'JAX_COORDINATOR_PORT=8476' in start[-1]
    assert all({'--node=0', '--worker=0'} <= set(call) for call in cloud.calls('status'))


def test_flex_start_is_requested_by_its_name(cloud):
    assert launch('--flex-start', '24h') == 0
    (create,) = cloud.calls('create')
    assert create[0] == 'alpha'
    assert {'--provisioning-model=flex-start', '--max-run-duration=24h'} <= set(create)
    assert '--node-id=vit-jax-train' in create and '--spot' not in create


@pytest.mark.fault(102)
def test_fewer_slices_will_do(cloud, capsys):
    cloud.plays({'describe': ['WAITING_FOR_RESOURCES'] * 4 + ['ACTIVE'], 'status': ['0']})
    assert launch('--slices', '3', '--min-slices', '1', '--patience', '0') == 0
    counts = [next(word for word in call if 'node-' in word) for call in cloud.calls('create')]
    assert counts == ['--node-count=3', '--node-count=2', '--node-id=vit-jax-train']
    assert '2 slices are not to be had; 1 will do' in capsys.readouterr().err
    assert not cloud.exists


@pytest.mark.fault(104)
def test_a_run_that_fails_on_fewer_slices_is_started_on_these_again(cloud):
    cloud.plays(
        {'describe': ['WAITING_FOR_RESOURCES'] * 2 + ['ACTIVE'], 'status': ['1', '75', '0']}
    )
    flags = ['--slices', '2', '--min-slices', '1', '--patience', '0', '--restarts', '1']
    assert launch(*flags) == 0
    assert cloud.story() == ['create', 'delete', *ONCE[:-1], 'start', *AGAIN]


@pytest.mark.fault(102)
def test_fewer_slices_than_the_minimum_are_not_asked_for(cloud):
    cloud.plays({'describe': ['WAITING_FOR_RESOURCES'] * 6 + ['ACTIVE']})
    assert launch('--slices', '2', '--patience', '0') == 0
    assert len(cloud.calls('create')) == 1


def job(**fields):
    fields = {'zone': 'us-a', 'extras': ['gcs'], **fields}
    return tpu.TpuJob(TRAIN, 'vit-jax-train', 'v5litepod-16', **fields)


class Interrupted:
    """A clock whose n-th pause is cut short by Ctrl-C, and every pause after it."""

    def __init__(self, pauses):
        self.left = pauses

    def sleep(self, seconds):
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt


@pytest.mark.fault(106)
@pytest.mark.parametrize(
    ('pauses', 'story'), [(1, ['create', 'delete']), (3, [*ONCE[:-1], 'stop', 'delete'])]
)
def test_ctrl_c_saves_the_state_and_leaves_nothing(pauses, story, cloud, capsys):
    cloud.plays({'status': ['running']})
    pace = tpu_loop.Pace(sleep=Interrupted(pauses).sleep)
    with pytest.raises(KeyboardInterrupt):
        tpu_loop.Loop(job(), pace).run()
    assert cloud.story() == story
    assert not cloud.exists
    assert 'nothing is left in us-a' in capsys.readouterr().err


@pytest.mark.fault(107)
def test_ctrl_c_again_says_what_is_left(cloud):
    cloud.plays({'status': ['running'], 'delete': ['fails INTERNAL']})
    pace = tpu_loop.Pace(sleep=Interrupted(3).sleep)
    with pytest.raises(UserError, match=r'vit-jax-train is left \(ACTIVE\) and may cost: gcloud'):
        tpu_loop.Loop(job(), pace).run()


@pytest.mark.fault(107)
def test_a_deletion_that_fails_is_the_last_word(cloud, capsys):
    cloud.plays({'delete': ['fails INTERNAL']})
    assert launch() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert 'vit-jax-train is left ((gcloud.delete) INTERNAL) and may cost: gcloud compute' in last
    assert last.endswith('delete vit-jax-train --zone=us-a --quiet --force')


@pytest.mark.fault(106)
def test_a_loop_that_was_killed_goes_on(cloud, capsys):
    cloud.plays({'describe': ['ACTIVE']})
    cloud.holds(label=job().resource().label)
    assert launch() == 0
    assert cloud.story() == ['delete']
    assert capsys.readouterr().out == 'step 2\ndone\n', 'the first look was for the state'


@pytest.mark.fault(106)
def test_a_loop_that_was_killed_before_the_start_goes_on(cloud):
    cloud.plays({'describe': ['ACTIVE'], 'status': ['new', '0']})
    cloud.holds(label=job().resource().label)
    assert launch() == 0
    assert cloud.story() == ONCE[1:]


def test_the_resource_of_another_command_is_left_alone(cloud, capsys):
    cloud.holds(label='0')
    assert launch() == 2
    assert 'exists already, for another command' in capsys.readouterr().err
    assert cloud.exists and cloud.story() == []


def test_gcloud_that_cannot_describe(cloud, capsys):
    cloud.holds()
    cloud.plays({'describe': ['fails You do not have an active account selected.']})
    assert launch() == 2
    assert 'active account' in capsys.readouterr().err


def test_dry_run_prints_the_commands(cloud, capsys):
    assert launch('--dry-run', '--slices', '2') == 0
    words = shlex.split(capsys.readouterr().out)
    verbs = [words[i + 1] for i, word in enumerate(words) if word == 'queued-resources']
    assert verbs == ['create', 'describe', 'scp', 'ssh', 'ssh', 'ssh', 'delete']
    assert not (cloud.folder / 'calls').exists()


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--tpu', 'tpu7x-16'], 'available on GKE only: launch gke'),
        (['--tpu', 'v3-32', '--slices', '2'], 'slices of v3 cannot work together'),
        (['--min-slices', '2'], '--min-slices 2 is more than --slices 1'),
        (['--flex-start', 'soon'], 'must be a duration, as 24h'),
        (['--flex-start', '1h', '--spot'], 'without --spot'),
        (['--job-name', 'A b'], 'lower-case letters'),
        (['--zone', 'us a'], "--zone 'us a': must be a name"),
        (['--env', 'A-B=1'], '--env'),
        (['--gcloud', 'two words'], "--gcloud 'two words': must be NAME"),
        (['--env', 'TFDS_DATA_DIR=gs://a'], 'copy or mount them by --setup'),
        ([*TRAIN, '--workdir', 'runs/a'], 'launch tpu: the machine is deleted'),
        (['evaluate', '--workdir', 'gs://lab/a'], 'evaluate runs in one process'),
    ],
)
def test_a_mistake_is_one_line_and_rents_nothing(flags, message, cloud, capsys):
    command = flags[0].startswith('--')
    assert (launch(*flags) if command else launch(command=flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (cloud.folder / 'calls').exists()


def test_a_machine_without_gcloud_and_a_folder_without_the_repository(
    cloud, tmp_path, capsys, monkeypatch
):
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'git').symlink_to(shutil.which('git'))
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    for said in ('gcloud was not found; install it', 'run it in the root of the repository'):
        assert launch() == 2
        assert said in capsys.readouterr().err
        pathlib.Path('constraints.txt').unlink(missing_ok=True)


def test_a_call_that_hangs_is_ended_with_its_children():
    nap = f'86400.{os.getpid()}'  # a day, so that a test which waits for its end does not pass
    answer = queued.call(['bash', '-c', f'sleep {nap} & wait'], limit=0.5)
    assert answer.code == 255 and 'no answer within' in answer.reason
    assert nap not in subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout


def test_an_unknown_description_is_no_resource():
    assert queued.described('{}').state == queued.UNKNOWN
    assert queued.described('no JSON').state == queued.UNKNOWN
    assert queued.described(json.dumps({'state': {'state': 'ACTIVE'}})).slices == 1


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


def test_the_archive_holds_what_git_does_not_ignore(cloud, tmp_path):
    pathlib.Path('.gitignore').write_text('runs\n')
    pathlib.Path('runs').mkdir()
    pathlib.Path('runs/a').write_text('')
    with remote.archive() as path:
        listed = subprocess.run(['tar', 'tzf', path], capture_output=True, text=True).stdout
    assert sorted(listed.split()) == ['.gitignore', 'constraints.txt']
