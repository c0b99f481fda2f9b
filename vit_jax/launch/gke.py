"""The JobSet of a command on TPUs of a GKE cluster (jobset.sigs.k8s.io)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, command
from vit_jax.launch.cloud_tpu import MOUNT, CloudJob, yaml_text

CONTAINER = 'train'
GRACE_SECONDS = 120  # to save the state
FINAL = [2, 3]  # exit codes that a further start would only repeat
# For one slice; else JAX asks a metadata server that pods may not reach. For several, GKE sets
# these variables (docs.cloud.google.com/tpu/docs/tpu-gke-multislice).
ONE_SLICE = {
    'MEGASCALE_NUM_SLICES': '1',
    'MEGASCALE_SLICE_ID': '0',
    'MEGASCALE_COORDINATOR_ADDRESS': '',
}
PORTS = (8471, 8476)  # between TPUs, and of JAX
DISRUPTED = 'condition DisruptionTarget'
# Kubernetes writes these into the message of a failed Job.
FREE = [DISRUPTED, f'exit code {EXIT_PREEMPTED} ']


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeJob(CloudJob):
    """A JobSet.

    Attributes:
      image: with the repository and its extras.
      slices: their number.
      topology: chips along each dimension, as `4x4`; the usual one of the type if empty.
      flex_start: whether to use nodes of flex-start.
      queue: of Kueue; '' without it.
      namespace: of the cluster; the current one if empty.
      account: Kubernetes service account; the default one if empty.
      mounts: buckets, as `gs://BUCKET`, by their folders in the container.
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
    """The fields of the JobSet.

    Raises:
      UserError: for an invalid name, slices that GKE lacks, or results that would be lost.
    """
    _check(job)
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


def text(job: GkeJob) -> str:
    """The JobSet as YAML; raises UserError as `jobset`."""
    return yaml_text(jobset(job))


def _jobset_rules() -> list[dict[str, Any]]:
    """Restart without counting after preemption, and never what would only be repeated."""
    return [
        {
            'name': 'stopped',
            'action': 'RestartJobSetAndIgnoreMaxRestarts',
            'onJobFailureReasons': ['PodFailurePolicy'],
            'onJobFailureMessagePatterns': FREE,
        },
        {
            'name': 'final',
            'action': 'FailJobSet',
            'onJobFailureReasons': ['PodFailurePolicy'],
        },
    ]


def _pod_rules() -> list[dict[str, Any]]:
    """Tell the JobSet of ends that it treats differently from other failures."""
    codes = {'containerName': CONTAINER, 'operator': 'In', 'values': [*FINAL, EXIT_PREEMPTED]}
    disrupted = [{'type': 'DisruptionTarget', 'status': 'True'}]
    return [
        {'action': 'FailJob', 'onPodConditions': disrupted},
        {'action': 'FailJob', 'onExitCodes': codes},
    ]


def _pod(job: GkeJob) -> dict[str, Any]:
    hosts = cloud_tpu.hosts(job.tpu)
    words = command.for_processes(job.words, job.slices * hosts)
    slices = ONE_SLICE if job.slices == 1 else {}
    environ = {**cloud_tpu.ENVIRON, **slices, **job.env}
    volumes, mounts = _volumes(job)
    # Cloud Storage FUSE is a container of its own, which this adds.
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
                'command': ['python', '-m', 'vit_jax', *words],
                'env': [{'name': name, 'value': value} for name, value in environ.items()],
                'ports': [{'containerPort': port} for port in PORTS],
                'resources': {'limits': {'google.com/tpu': cloud_tpu.chips(job.tpu) // hosts}},
                'volumeMounts': mounts,
            }
        ],
        'volumes': volumes,
    }
    return {**({'metadata': fuse} if fuse else {}), 'spec': spec}


def _nodes(job: GkeJob) -> dict[str, str]:
    """Labels of the nodes to run on."""
    cloud = 'cloud.google.com/gke'
    return {
        f'{cloud}-tpu-accelerator': cloud_tpu.GENERATIONS[cloud_tpu.parse(job.tpu)[0]].gke,
        f'{cloud}-tpu-topology': job.topology or cloud_tpu.topology(job.tpu),
        **({f'{cloud}-spot': 'true'} if job.spot else {}),
        **({f'{cloud}-flex-start': 'true'} if job.flex_start else {}),
    }


def _volumes(job: GkeJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of a pod, and where the container has them."""
    # Workers exchange batches in shared memory, of which containers get 64 MiB.
    volumes: list[dict[str, Any]] = [{'name': 'shm', 'emptyDir': {'medium': 'Memory'}}]
    mounts: list[dict[str, Any]] = [{'name': 'shm', 'mountPath': '/dev/shm'}]
    for i, (path, source) in enumerate(job.mounts.items()):
        bucket = source.removeprefix('gs://').rstrip('/')
        fuse = {'bucketName': bucket, 'mountOptions': 'implicit-dirs'}
        driver = {'driver': 'gcsfuse.csi.storage.gke.io', 'readOnly': True}
        volumes.append({'name': f'bucket-{i}', 'csi': {**driver, 'volumeAttributes': fuse}})
        mounts.append({'name': f'bucket-{i}', 'mountPath': path, 'readOnly': True})
    return volumes, mounts


def _check(job: GkeJob) -> None:
    cloud_tpu.check_short('gke', '--job-name', job.name)
    others = {
        '--queue': job.queue,
        '--namespace': job.namespace,
        '--service-account': job.account,
    }
    for flag, name in others.items():
        if name:
            cloud_tpu.check_short('gke', flag, name)
    if not re.fullmatch(r'[^\s@-][^\s]*', job.image):
        raise UserError(f'launch gke: --image {job.image!r}: must be the name of an image')
    cloud_tpu.check_slices('gke', job.tpu, job.slices, job.slices)
    if job.slices > 1 and cloud_tpu.hosts(job.tpu) == 1:
        raise UserError(
            f'launch gke: --slices {job.slices}: GKE joins slices of several machines each, and '
            f'{job.tpu} is one'
        )
    if not cloud_tpu.GENERATIONS[cloud_tpu.parse(job.tpu)[0]].gke:
        raise UserError(f'launch gke: --tpu {job.tpu}: GKE offers v4 and later')
    if not _holds(job.topology or cloud_tpu.topology(job.tpu), chips := cloud_tpu.chips(job.tpu)):
        raise UserError(
            f'launch gke: --topology {job.topology!r}: give a shape of the {chips} chips of '
            f'{job.tpu}, as 4x4 or 2x2x4'
        )
    if job.spot and job.flex_start:
        raise UserError('launch gke: give --spot or --flex-start, not both')
    cloud_tpu.check_mounts('gke', job.mounts, ('gs',))
    job.check_command(MOUNT)


def _holds(topology: str, chips: int) -> bool:
    match = re.fullmatch(r'[1-9]\d*(x[1-9]\d*){1,2}', topology)
    return match is not None and math.prod(map(int, topology.split('x'))) == chips
