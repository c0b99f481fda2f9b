"""Manifests of jobs on Cloud TPUs: a SkyPilot task, and a JobSet for a GKE cluster.

A SkyPilot task is a managed job, which is restarted after preemption. JobSets are documented at
jobset.sigs.k8s.io.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, command
from vit_jax.launch.cloud_tpu import CloudJob

CONTAINER = 'train'
GRACE_SECONDS = 120  # to save the state
KEPT_SECONDS = 7 * 24 * 3600  # a JobSet and its logs, after its end
# Requests for each chip, less than any generation's machines have. Kueue counts them, and pods
# without requests are evicted first.
CPUS, MEMORY_GIB = 8, 16
# Without privileges: TPUs need locked memory, beyond the limit that SYS_RESOURCE may raise.
SECURITY = {
    'allowPrivilegeEscalation': False,
    'capabilities': {'add': ['SYS_RESOURCE']},
    'seccompProfile': {'type': 'RuntimeDefault'},
}
FINAL = [2, 3]  # exit codes that another start would only repeat
# For one slice; else JAX asks a metadata server that pods may not reach. For several, GKE sets
# these variables (docs.cloud.google.com/tpu/docs/tpu-gke-multislice).
ONE_SLICE = {
    'MEGASCALE_NUM_SLICES': '1',
    'MEGASCALE_SLICE_ID': '0',
    'MEGASCALE_COORDINATOR_ADDRESS': '',
}
PORTS = (8471, 8476)  # between TPUs, and of JAX
DISRUPTED = 'condition DisruptionTarget'
# Failures after which a restart does not count; Kubernetes writes these into their messages.
UNCOUNTED = [DISRUPTED, f'exit code {EXIT_PREEMPTED} ']
TASK_NAME = re.compile(r'[A-Za-z]([-_.A-Za-z0-9]*[A-Za-z0-9])?')


FOLDER = re.compile(r'(/(?!\.\.?(/|$))[-_.A-Za-z0-9]+)+/?')
MOUNT_HINT = 'give --mount /data=gs://BUCKET --env TFDS_DATA_DIR=/data/FOLDER'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyJob(CloudJob):
    """SkyPilot job.

    Attributes:
      extras: Extras of the package that the command needs besides `tpu`.
      region, zone: Region and zone; any if empty.
      mounts: Buckets, such as `gs://BUCKET`, by their folders on the machines.
    """

    launcher = 'sky'

    extras: Sequence[str] = ()
    region: str = ''
    zone: str = ''
    mounts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def task(job: SkyJob) -> dict[str, Any]:
    """Return the fields of the task, see docs.skypilot.co/en/latest/reference/yaml-spec.html.

    Raises:
      UserError: for an invalid name, an unknown type of TPU, data that cannot be reached, or
        results that would be lost.
    """
    if not TASK_NAME.fullmatch(job.name):
        raise UserError(
            f'launch sky: --job-name {job.name!r}: must be letters, digits, -, _ and ., and begin '
            'with a letter'
        )
    # SkyPilot inserts these into shell commands without quoting.
    job.check_command(MOUNT_HINT)
    cloud_tpu.check_locations('sky', {'--region': job.region, '--zone': job.zone})
    check_mounts('sky', job.mounts, ('gs', 's3'))
    args = command.for_processes(job.args, cloud_tpu.hosts(job.tpu))
    mounts = {path: {'source': source, 'mode': 'MOUNT'} for path, source in job.mounts.items()}
    return {
        'name': job.name,
        'workdir': '.',
        'resources': {
            'infra': '/'.join(['gcp', job.region or '*', job.zone or '*']),
            'accelerators': f'tpu-{job.tpu.removeprefix("tpu-")}',
            'accelerator_args': {'runtime_version': cloud_tpu.runtime(job.tpu)},
            'use_spot': job.spot,
            'job_recovery': {
                'strategy': 'EAGER_NEXT_REGION',
                'max_restarts_on_errors': job.restarts,
                'recover_on_exit_codes': [EXIT_PREEMPTED],
            },
        },
        'envs': {**cloud_tpu.ENVIRON, **job.env},
        **({'file_mounts': mounts} if mounts else {}),
        'setup': cloud_tpu.setup(job.extras, database=job.args[0] == 'sweep'),
        'run': shlex.join(['.venv/bin/python', '-m', 'vit_jax', *args]) + '\n',
    }


def task_text(job: SkyJob) -> str:
    """Format the task as YAML; raise UserError like `task`."""
    return yaml_text(task(job))


def submit_task(name: str, task: str) -> str:
    """Submit a SkyPilot task as a managed job and return SkyPilot's output.

    Raises:
      UserError: without SkyPilot, or if it refuses.
    """
    hint = "install it (uv tool install 'skypilot[gcp]'), or use --dry-run"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f'{name}.yaml'
        path.write_text(task)
        return command.submit(
            ['sky', 'jobs', 'launch', '--yes', '--detach-run', str(path)], '', hint
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeJob(CloudJob):
    """A JobSet.

    Attributes:
      image: Image of containers, with the repository and its extras.
      slices: Number of slices.
      topology: Chips along each dimension, such as `4x4`; the usual one of the type if empty.
      flex_start: Whether to use flex-start nodes.
      queue: Queue of Kueue; '' for none.
      namespace: Namespace of the cluster; the current one if empty.
      account: Kubernetes service account; the default one if empty.
      mounts: Buckets, such as `gs://BUCKET`, by their folders in the container.
    """

    launcher = 'gke'

    image: str
    slices: int = 1
    topology: str = ''
    flex_start: bool = False
    queue: str = ''
    namespace: str = ''
    account: str = ''
    mounts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def jobset(job: GkeJob) -> dict[str, Any]:
    """Return the fields of the JobSet.

    Raises:
      UserError: for an invalid name, slices that GKE lacks, or results that would be lost.
    """
    _check_jobset(job)
    hosts = cloud_tpu.hosts(job.tpu)
    kueue = {'labels': {'kueue.x-k8s.io/queue-name': job.queue}} if job.queue else {}
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': {
            'name': job.name,
            **({'namespace': job.namespace} if job.namespace else {}),
            **kueue,
            # One slice is one node pool.
            'annotations': {
                'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'
            },
        },
        'spec': {
            'ttlSecondsAfterFinished': KEPT_SECONDS,
            'failurePolicy': {'maxRestarts': job.restarts, 'rules': _jobset_rules()},
            'replicatedJobs': [
                {
                    'name': 'slice',
                    'replicas': job.slices,
                    'template': {
                        'spec': {
                            'parallelism': hosts,
                            'completions': hosts,
                            'backoffLimit': 0,
                            'podFailurePolicy': {'rules': _pod_rules()},
                            'template': _pod(job),
                        }
                    },
                }
            ],
        },
    }


def jobset_text(job: GkeJob) -> str:
    """Format the JobSet as YAML; raise UserError like `jobset`."""
    return yaml_text(jobset(job))


def _jobset_rules() -> list[dict[str, Any]]:
    """Restart after preemption without counting, and never after an error that would repeat."""
    return [
        {
            'name': 'stopped',
            'action': 'RestartJobSetAndIgnoreMaxRestarts',
            'onJobFailureReasons': ['PodFailurePolicy'],
            'onJobFailureMessagePatterns': UNCOUNTED,
        },
        {
            'name': 'final',
            'action': 'FailJobSet',
            'onJobFailureReasons': ['PodFailurePolicy'],
        },
    ]


def _pod_rules() -> list[dict[str, Any]]:
    """Report preemption and final errors to the JobSet, which has separate rules for them."""
    codes = {'containerName': CONTAINER, 'operator': 'In', 'values': [*FINAL, EXIT_PREEMPTED]}
    disrupted = [{'type': 'DisruptionTarget', 'status': 'True'}]
    return [
        {'action': 'FailJob', 'onPodConditions': disrupted},
        {'action': 'FailJob', 'onExitCodes': codes},
    ]


def _pod(job: GkeJob) -> dict[str, Any]:
    hosts = cloud_tpu.hosts(job.tpu)
    args = command.for_processes(job.args, job.slices * hosts)
    slices = ONE_SLICE if job.slices == 1 else {}
    environ = {**cloud_tpu.ENVIRON, **slices, **job.env}
    volumes, mounts = _volumes(job)
    # Adds the sidecar container of Cloud Storage FUSE.
    fuse = {'annotations': {'gke-gcsfuse/volumes': 'true'}} if job.mounts else {}
    spot = {'key': 'cloud.google.com/gke-spot', 'operator': 'Equal', 'value': 'true'}
    spec = {
        'restartPolicy': 'Never',
        'terminationGracePeriodSeconds': GRACE_SECONDS,
        **({'serviceAccountName': job.account} if job.account else {}),
        'nodeSelector': _nodes(job),
        **({'tolerations': [{**spot, 'effect': 'NoSchedule'}]} if job.spot else {}),
        'containers': [
            {
                'name': CONTAINER,
                'image': job.image,
                'command': ['python', '-m', 'vit_jax', *map(_verbatim, args)],
                'env': [{'name': k, 'value': _verbatim(v)} for k, v in environ.items()],
                'ports': [{'containerPort': port} for port in PORTS],
                'resources': _resources(cloud_tpu.chips(job.tpu) // hosts),
                'securityContext': SECURITY,
                'volumeMounts': mounts,
            }
        ],
        'volumes': volumes,
    }
    return {**({'metadata': fuse} if fuse else {}), 'spec': spec}


def _resources(chips: int) -> dict[str, Any]:
    return {
        'requests': {'cpu': CPUS * chips, 'memory': f'{MEMORY_GIB * chips}Gi'},
        'limits': {'google.com/tpu': chips},
    }


def _verbatim(text: str) -> str:
    """Escape text for a field in which Kubernetes expands `$(NAME)`, and reads `$$` as `$`."""
    return text.replace('$', '$$')


def _nodes(job: GkeJob) -> dict[str, str]:
    """Select nodes by their labels."""
    cloud = 'cloud.google.com/gke'
    return {
        f'{cloud}-tpu-accelerator': cloud_tpu.GENERATIONS[cloud_tpu.parse_type(job.tpu)[0]].gke,
        f'{cloud}-tpu-topology': job.topology or cloud_tpu.topology(job.tpu),
        **({f'{cloud}-spot': 'true'} if job.spot else {}),
        **({f'{cloud}-flex-start': 'true'} if job.flex_start else {}),
    }


def _volumes(job: GkeJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """List the volumes of a pod, and their mounts in the container."""
    # Workers exchange batches in shared memory; containers have 64 MiB by default.
    volumes: list[dict[str, Any]] = [{'name': 'shm', 'emptyDir': {'medium': 'Memory'}}]
    mounts: list[dict[str, Any]] = [{'name': 'shm', 'mountPath': '/dev/shm'}]
    for i, (path, source) in enumerate(job.mounts.items()):
        bucket = source.removeprefix('gs://').rstrip('/')
        fuse = {'bucketName': bucket, 'mountOptions': 'implicit-dirs'}
        driver = {'driver': 'gcsfuse.csi.storage.gke.io', 'readOnly': True}
        volumes.append({'name': f'bucket-{i}', 'csi': {**driver, 'volumeAttributes': fuse}})
        mounts.append({'name': f'bucket-{i}', 'mountPath': path, 'readOnly': True})
    return volumes, mounts


def _check_jobset(job: GkeJob) -> None:
    cloud_tpu.check_resource_name('gke', '--job-name', job.name)
    forbidden = {
        '--queue': job.queue,
        '--namespace': job.namespace,
        '--service-account': job.account,
    }
    for flag, name in forbidden.items():
        if name:
            cloud_tpu.check_resource_name('gke', flag, name)
    if not re.fullmatch(r'[^\s@-][^\s]*', job.image):
        raise UserError(f'launch gke: --image {job.image!r}: must be the name of an image')
    cloud_tpu.check_slices('gke', job.tpu, job.slices, job.slices)
    if job.slices > 1 and cloud_tpu.hosts(job.tpu) == 1:
        raise UserError(
            f'launch gke: --slices {job.slices}: GKE joins slices of several machines each, and '
            f'{job.tpu} is one'
        )
    if not cloud_tpu.GENERATIONS[cloud_tpu.parse_type(job.tpu)[0]].gke:
        raise UserError(f'launch gke: --tpu {job.tpu}: GKE offers v4 and later')
    if not _has_chips(
        job.topology or cloud_tpu.topology(job.tpu), chips := cloud_tpu.chips(job.tpu)
    ):
        raise UserError(
            f'launch gke: --topology {job.topology!r}: give a shape of the {chips} chips of '
            f'{job.tpu}, such as 4x4 or 2x2x4'
        )
    if job.spot and job.flex_start:
        raise UserError('launch gke: give --spot or --flex-start, not both')
    check_mounts('gke', job.mounts, ('gs',))
    job.check_command(MOUNT_HINT)


def _has_chips(topology: str, chips: int) -> bool:
    match = re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', topology)
    return match is not None and math.prod(map(int, topology.split('x'))) == chips


def create_jobset(manifest: str) -> str:
    """Create a JobSet in the current cluster and return kubectl's output.

    Raises:
      UserError: without kubectl, or if it refuses.
    """
    hint = 'install it with access to the cluster, or use --dry-run'
    return command.submit(['kubectl', 'create', '-f', '-'], manifest, hint)


def check_mounts(launcher: str, mounts: Mapping[str, str], schemes: Iterable[str]) -> None:
    """Raise UserError unless `mounts` maps folders to buckets of these schemes."""
    bucket = re.compile(rf'({"|".join(schemes)})://[a-z0-9][-_.a-z0-9]*/?')
    for path, source in mounts.items():
        if not (FOLDER.fullmatch(path) and bucket.fullmatch(source)):
            raise UserError(
                f'launch {launcher}: --mount {f"{path}={source}"!r}: must be /FOLDER=gs://BUCKET, '
                'of a whole bucket, in lower case; FOLDER may contain letters, digits, -, _ and .'
            )


def yaml_text(fields: Mapping[str, Any]) -> str:
    """Format fields as YAML that every parser reads alike: strings stay strings.

    Parsers differ in the words that they read as booleans, numbers, dates or null: `y` is true
    only for Kubernetes. So strings are quoted, and those that end in a newline become blocks.
    """
    return yaml.dump(fields, Dumper=_Dumper, sort_keys=False, width=float('inf'))


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes strings, except keys of more than a letter unless PyYAML does."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: Any = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if len(key.value) > 1:
                key.style = None
        return node


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(
        'tag:yaml.org,2002:str', value, style='|' if value.endswith('\n') else "'"
    )


_Dumper.add_representer(str, _text)
