"""A queued resource of Cloud TPUs, through the Google Cloud CLI.

The commands come from `gcloud compute tpus queued-resources`
(cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources), and the states those of
`QueuedResourceState` of the Cloud TPU API.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.launch import cloud_tpu, command, remote
from vit_jax.launch.cloud_tpu import CloudJob

ACTIVE = 'ACTIVE'
ABSENT = 'ABSENT'
UNKNOWN = 'UNKNOWN'  # gcloud itself failed
LABEL = 'vit-jax'
INSTALL = 'cloud.google.com/sdk/docs/install'
SECONDS = 600  # limit for a call that only asks
LONG_SECONDS = 3600  # limit for a call that copies or installs


@dataclasses.dataclass(frozen=True)
class Answer:
    """Result of a call.

    Attributes:
      code: Exit code; 255 if a machine could not be reached.
      out, err: Text that it printed.
    """

    code: int
    out: str = ''
    err: str = ''

    @property
    def reason(self) -> str:
        """Line of the output that explains the failure."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith('ERROR:')]
        return (errors or lines or ['it gives no reason'])[-1].removeprefix('ERROR: ')


@dataclasses.dataclass(frozen=True)
class Description:
    """A queued resource as the service describes it.

    Attributes:
      state: State of the request; `ABSENT` if there is none.
      label: Label of its job, see `TpuJob.resource`.
      slices: Number of slices.
      error: Reason of a failure.
    """

    state: str
    label: str = ''
    slices: int = 1
    error: str = ''


@dataclasses.dataclass(frozen=True)
class Resource:
    """One queued resource.

    Attributes:
      name: Name of the resource, and of its nodes.
      zone: Zone of the machines.
      tpu: Type of its slices, such as `v5litepod-16`.
      project: The default one of gcloud if empty.
      spot: Whether it may be preempted, at a lower price.
      flex_start: Duration of a flex-start rental, such as `24h`; '' for other models.
      label: Label of its job.
      options: More options of `create`, such as `network=lab`.
    """

    name: str
    zone: str
    tpu: str
    project: str = ''
    spot: bool = False
    flex_start: str = ''
    label: str = ''
    options: Sequence[str] = ()

    def create_command(self, slices: int) -> list[str]:
        """Return the command that requests slices; only the alpha commands have flex-start."""
        nodes = [f'--node-count={slices}', f'--node-prefix={self.name}']
        flex = ['--provisioning-model=flex-start', f'--max-run-duration={self.flex_start}']
        return [
            *self._command('create', 'alpha' if self.flex_start else ''),
            f'--accelerator-type={self.tpu.removeprefix("tpu-")}',
            f'--runtime-version={cloud_tpu.runtime(self.tpu)}',
            *(nodes if slices > 1 else [f'--node-id={self.name}']),
            f'--labels={LABEL}={self.label}',
            *(['--spot'] if self.spot else []),
            *(flex if self.flex_start else []),
            *(f'--{option.removeprefix("--")}' for option in self.options),
        ]

    def delete_command(self) -> list[str]:
        """Return the command that deletes the resource with its machines."""
        return [*self._command('delete'), '--force']

    def describe_command(self) -> list[str]:
        """Return the command that describes the resource."""
        return [*self._command('describe'), '--format=json']

    def ssh_command(self, script: str, everywhere: bool) -> list[str]:
        """Return the command that runs a script on every machine, or on the first."""
        which = 'all' if everywhere else '0'
        return [
            *self._command('ssh'),
            f'--node={which}',
            f'--worker={which}',
            '--strict-host-key-checking=no',
            f'--command={script}',
        ]

    def scp_command(self, path: str | pathlib.Path, to: str) -> list[str]:
        """Return the command that copies a file into the home folder on every machine."""
        return [
            *self._words('scp', ''),
            str(path),
            f'{self.name}:{to}',
            *self._where(),
            '--node=all',
            '--worker=all',
            '--strict-host-key-checking=no',
        ]

    def describe(self) -> Description:
        """Ask gcloud for the present state of the resource."""
        answer = call(self.describe_command())
        if answer.code:
            is_absent = 'NOT_FOUND' in answer.err
            return Description(ABSENT) if is_absent else Description(UNKNOWN, error=answer.reason)
        return parse_description(answer.out)

    def _command(self, verb: str, track: str = '') -> list[str]:
        return [*self._words(verb, track), self.name, *self._where()]

    def _words(self, verb: str, track: str) -> list[str]:
        return [
            'gcloud',
            *([track] if track else []),
            *f'compute tpus queued-resources {verb}'.split(),
        ]

    def _where(self) -> list[str]:
        project = [f'--project={self.project}'] if self.project else []
        return [f'--zone={self.zone}', *project, '--quiet']


def parse_description(text: str) -> Description:
    """Parse the JSON that `describe` prints."""
    try:
        fields = json.loads(text)
        state = fields['state']
        (spec,) = fields.get('tpu', {}).get('nodeSpec', [{}])
        return Description(
            state['state'],
            label=spec.get('node', {}).get('labels', {}).get(LABEL, ''),
            slices=int(spec.get('multisliceParams', {}).get('nodeCount', 1)),
            error=state.get('failedData', {}).get('error', {}).get('message', ''),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Description(UNKNOWN, error='gcloud describes the resource in an unknown form')


def call(args: Sequence[str], limit: float = SECONDS) -> Answer:
    """Run a command to its end and return its result; Ctrl-C kills it.

    Args:
      args: Arguments of the command line.
      limit: Seconds after which it is killed.

    Raises:
      UserError: if gcloud is not installed.
    """
    try:
        # A separate session, so that Ctrl-C reaches only this process.
        process = subprocess.Popen(
            args,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors='replace',
            start_new_session=True,
        )
    except FileNotFoundError as e:
        raise UserError(
            f'launch tpu: {args[0]} was not found; install it ({INSTALL}), or use --dry-run'
        ) from e
    with process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Answer(255, err=f'no answer within {limit:.0f} seconds')
        except BaseException:
            _kill(process)
            raise
    return Answer(process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command with all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


DURATION = re.compile(r'([1-9]\d*[smhd])+')
OPTION = re.compile(r'(--)?[a-z][a-z-]*(=.*)?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuJob(CloudJob):
    """A queued resource and its command.

    Attributes:
      zone: Zone of the machines.
      project: The default one of gcloud if empty.
      extras: Extras of the package that the command needs besides `tpu`.
      slices: Number of slices.
      min_slices: Smallest number of slices that the job accepts.
      flex_start: Duration of a flex-start rental, such as `24h`; '' for other models.
      prepare: Shell commands that prepare each machine, such as mounting a disk.
      options: More options of the request, such as `network=lab`.
    """

    launcher = 'tpu'

    zone: str
    project: str = ''
    extras: Sequence[str] = ()
    slices: int = 1
    min_slices: int = 1
    flex_start: str = ''
    prepare: str = ''
    options: Sequence[str] = ()

    def resource(self) -> Resource:
        """Queued resource of the job; its label distinguishes jobs with the same name."""
        identity = repr((*self.args, self.tpu, self.slices, self.min_slices))
        return Resource(
            self.name,
            self.zone,
            self.tpu,
            project=self.project,
            spot=self.spot,
            flex_start=self.flex_start,
            label=hashlib.sha256(identity.encode()).hexdigest()[:16],
            options=self.options,
        )

    def install(self) -> str:
        """Return the script that installs the code on a machine."""
        return remote.install(self.name, self.extras, self.args[0] == 'sweep', self.prepare)

    def start(self, slices: int) -> str:
        """Return the script that starts the command on each machine of the slices."""
        args = command.for_processes(self.args, slices * cloud_tpu.hosts(self.tpu))
        return remote.start(self.name, args, {**cloud_tpu.ENVIRON, **self.env})


def check_job(job: TpuJob) -> None:
    """Check the job before anything is rented.

    Raises:
      UserError: for an invalid name or number, data that cannot be reached, or results that would
        be lost.
    """
    cloud_tpu.check_resource_name('tpu', '--job-name', job.name)
    cloud_tpu.runtime(job.tpu)
    cloud_tpu.check_slices('tpu', job.tpu, job.slices, job.min_slices)
    cloud_tpu.check_locations('tpu', {'--zone': job.zone, '--project': job.project})
    if job.flex_start and (job.spot or not DURATION.fullmatch(job.flex_start)):
        raise UserError(
            f'launch tpu: --flex-start {job.flex_start!r}: must be a duration such as 24h, and '
            'without --spot'
        )
    for option in job.options:
        if not OPTION.fullmatch(option):
            raise UserError(f'launch tpu: --gcloud {option!r}: must be NAME or NAME=VALUE')
    job.check_command('copy or mount them by --setup')
    for slices in range(job.min_slices, job.slices + 1):
        job.start(slices)


def text(job: TpuJob) -> str:
    """List the commands of a job that is never preempted, one per line or paragraph."""
    resource = job.resource()
    lines = [
        resource.create_command(job.slices),
        resource.describe_command(),
        resource.scp_command('CODE.tgz', f'{job.name}.tgz'),
        resource.ssh_command(job.install(), everywhere=True),
        resource.ssh_command(job.start(job.slices), everywhere=True),
        resource.ssh_command(remote.status(job.name, 0), everywhere=False),
        resource.delete_command(),
    ]
    return ''.join(f'{shlex.join(line)}\n' for line in lines)
