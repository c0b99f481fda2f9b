"""A command on rented Cloud TPUs without a cluster: what to request and what to run there."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.launch import cloud_tpu, command, names, queued, remote
from vit_jax.launch.cloud_job import CloudJob

DURATION = re.compile(r'([1-9]\d*[smhd])+')
OPTION = re.compile(r'(--)?[a-z][a-z-]*(=.*)?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuJob(CloudJob):
    """A queued resource and its command.

    Attributes:
      zone: where it is.
      project: the default one of gcloud if empty.
      extras: of the package that the command needs besides `tpu`.
      slices: their number.
      fewest: the number with which the job goes on if there are no more.
      flex_start: for how long it is rented by flex-start, as `24h`; '' for another model.
      prepare: shell commands that prepare each machine, as mounting a disk.
      options: more options of the request, as `network=lab`.
    """

    launcher = 'tpu'

    zone: str
    project: str = ''
    extras: Sequence[str] = ()
    slices: int = 1
    fewest: int = 1
    flex_start: str = ''
    prepare: str = ''
    options: Sequence[str] = ()

    def resource(self) -> queued.Resource:
        """The queued resource of the job; its label tells the jobs of one name apart."""
        what = repr((*self.words, self.tpu, self.slices, self.fewest))
        return queued.Resource(
            self.name,
            self.zone,
            self.tpu,
            project=self.project,
            spot=self.spot,
            flex_start=self.flex_start,
            label=hashlib.sha256(what.encode()).hexdigest()[:16],
            options=self.options,
        )

    def install(self) -> str:
        """The script that installs the code on a machine."""
        return remote.install(self.name, self.extras, self.words[0] == 'sweep', self.prepare)

    def start(self, slices: int) -> str:
        """The script that starts the command on a machine of so many slices."""
        words = command.for_processes(self.words, slices * cloud_tpu.hosts(self.tpu))
        return remote.start(self.name, words, {**cloud_tpu.ENVIRON, **self.env})


def check(job: TpuJob) -> None:
    """Check the job before anything is rented.

    Raises:
      UserError: for an invalid name or number, data that cannot be reached, or results that would
        be lost.
    """
    names.check_short('tpu', '--job-name', job.name)
    cloud_tpu.runtime(job.tpu)
    cloud_tpu.check_slices('tpu', job.tpu, job.slices, job.fewest)
    names.check_places('tpu', {'--zone': job.zone, '--project': job.project})
    if job.flex_start and (job.spot or not DURATION.fullmatch(job.flex_start)):
        raise UserError(
            f'launch tpu: --flex-start {job.flex_start!r}: must be a duration, as 24h, and '
            'without --spot'
        )
    for option in job.options:
        if not OPTION.fullmatch(option):
            raise UserError(f'launch tpu: --gcloud {option!r}: must be NAME or NAME=VALUE')
    job.check_command('copy or mount them by --setup')
    for slices in range(job.fewest, job.slices + 1):
        job.start(slices)


def text(job: TpuJob) -> str:
    """The commands of a job that is never preempted, one a line or paragraph."""
    resource = job.resource()
    lines = [
        resource.creation(job.slices),
        resource.description(),
        resource.upload('CODE.tgz', f'{job.name}.tgz'),
        resource.remote(job.install(), everywhere=True),
        resource.remote(job.start(job.slices), everywhere=True),
        resource.remote(remote.status(job.name, 0), everywhere=False),
        resource.deletion(),
    ]
    return ''.join(f'{queued.shown(line)}\n' for line in lines)
