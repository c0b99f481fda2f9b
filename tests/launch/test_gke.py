"""`launch gke`: the JobSet and its submission."""

import math
import pathlib
import re

import pytest
import yaml
from helpers.messages import mentions

from vit_jax import __main__ as cli
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.launch import cloud_tpu, manifests

CONFIG = f'{pathlib.Path(__file__).resolve().parents[2]}/experiments/vit/digits.py:smoke'
TRAIN = ['train', '--config', CONFIG, '--workdir', 'gs://lab/a']
# Fields of each level (jobset.sigs.k8s.io/docs/reference, kubernetes.io/docs/reference).
CONTAINER = {'name', 'image', 'command', 'env', 'ports', 'resources', 'securityContext'}
CONTAINER |= {'volumeMounts'}
POD = {'restartPolicy', 'terminationGracePeriodSeconds', 'serviceAccountName', 'nodeSelector'}
JOB = {'parallelism', 'completions', 'backoffLimit', 'podFailurePolicy', 'template'}


def made(tpu='v6e-16', **fields):
    return manifests.jobset(manifests.GkeJob(TRAIN, 'a', tpu, image='image', **fields))


def job_of(jobset):
    (replicated,) = jobset['spec']['replicatedJobs']
    return replicated, replicated['template']['spec']


def pod_of(jobset):
    return job_of(jobset)[1]['template']['spec']


def launch(*flags, command=TRAIN):
    words = ['gke', '--tpu', 'v6e-16', '--image', 'image', *flags]
    return cli.main(['launch', *words, '--', *command])


@pytest.mark.parametrize('spot', [False, True])
def test_the_manifest_has_the_fields_of_a_jobset(spot):
    jobset = made(slices=2, spot=spot, mounts={'/data': 'gs://lab'}, account='a')
    assert (jobset['apiVersion'], jobset['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
    replicated, job = job_of(jobset)
    assert set(jobset['spec']) == {'failurePolicy', 'replicatedJobs', 'ttlSecondsAfterFinished'}
    assert set(replicated) == {'name', 'replicas', 'template'}
    assert set(job) == JOB
    pod = pod_of(jobset)
    assert set(pod) - {'tolerations'} == POD | {'containers', 'volumes'}
    (container,) = pod['containers']
    assert set(container) == CONTAINER
    assert {volume['name'] for volume in pod['volumes']} == {
        mount['name'] for mount in container['volumeMounts']
    }
    assert ('tolerations' in pod) == spot
    assert container['resources']['requests'] == {'cpu': 32, 'memory': '64Gi'}  # of 4 chips
    assert not container['securityContext']['allowPrivilegeEscalation']


@pytest.mark.parametrize(
    ('tpu', 'slices', 'machines', 'chips', 'kind', 'topology'),
    [
        ('v5litepod-8', 1, 1, 8, 'tpu-v5-lite-podslice', '2x4'),
        ('v6e-16', 2, 4, 4, 'tpu-v6e-slice', '4x4'),
        ('v4-8', 1, 1, 4, 'tpu-v4-podslice', '2x2x1'),
        ('v5p-32', 3, 4, 4, 'tpu-v5p-slice', '2x2x4'),
        ('tpu7x-128', 2, 16, 4, 'tpu7x', '4x4x4'),
    ],
)
def test_slices_are_replicas_and_machines_are_pods(tpu, slices, machines, chips, kind, topology):
    jobset = made(tpu, slices=slices)
    replicated, job = job_of(jobset)
    assert replicated['replicas'] == slices
    assert job['parallelism'] == job['completions'] == machines
    pod = pod_of(jobset)
    assert pod['nodeSelector'] == {
        'cloud.google.com/gke-tpu-accelerator': kind,
        'cloud.google.com/gke-tpu-topology': topology,
    }
    (container,) = pod['containers']
    assert container['resources']['limits'] == {'google.com/tpu': chips}
    assert ('--distributed' in container['command']) == (slices * machines > 1)
    environ = {variable['name']: variable['value'] for variable in container['env']}
    assert environ.get('MEGASCALE_NUM_SLICES') == ('1' if slices == 1 else None)


@pytest.mark.parametrize(
    ('tpu', 'machines', 'topology'),
    [('v5e-64', 16, '8x8'), ('v5e:8x8', 16, '8x8'), ('v5p:2x2x32', 32, '2x2x32')],
)
def test_slices_are_named_as_for_preflight(capsys, tpu, machines, topology):
    assert launch('--tpu', tpu, '--dry-run') == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    assert job_of(jobset)[1]['completions'] == machines
    assert pod_of(jobset)['nodeSelector']['cloud.google.com/gke-tpu-topology'] == topology


def expanded(text, environ):
    """What a container gets of a field: `$$` is `$`, `$(NAME)` the variable's value if known."""
    pattern = r'\$\$|\$\((\w+)\)'
    return re.sub(pattern, lambda m: environ.get(m[1], m[0]) if m[1] else '$', text)


@pytest.mark.parametrize('text', ['a$$b$(HOSTNAME)', '$(TPU_NAME)', 'a$', '$$$(A)', "$A'${B}$("])
def test_dollar_signs_reach_the_container_unchanged(text):
    jobset = manifests.jobset(
        manifests.GkeJob([*TRAIN, text], 'a', 'v6e-16', image='image', env={'PGPASSWORD': text})
    )
    (container,) = pod_of(jobset)['containers']
    environ = {variable['name']: variable['value'] for variable in container['env']}
    variables = {'HOSTNAME': 'pod', 'TPU_NAME': 'tpu', 'A': 'a'}
    assert expanded(environ['PGPASSWORD'], variables) == text
    assert [expanded(word, variables) for word in container['command'][3:-1]] == [*TRAIN, text]


@pytest.mark.parametrize(
    ('message', 'action'),
    [
        ('Pod a/b has condition DisruptionTarget matching FailJob rule at index 0', 'Restart'),
        ('Container train for pod a/b failed with exit code 75 matching FailJob', 'Restart'),
        ('Container train for pod a/b failed with exit code 2 matching FailJob', 'Fail'),
        ('Container train for pod a/b failed with exit code 3 matching FailJob', 'Fail'),
    ],
)
def test_how_a_pod_ends_decides_whether_the_job_starts_again(message, action):
    jobset = made(restarts=5)
    policy = jobset['spec']['failurePolicy']
    assert policy['maxRestarts'] == 5
    matching = (
        rule['action']
        for rule in policy['rules']
        if any(re.search(p, message) for p in rule.get('onJobFailureMessagePatterns', ['']))
    )
    assert next(matching).startswith(action)
    _, job = job_of(jobset)
    assert job['backoffLimit'] == 0 and pod_of(jobset)['restartPolicy'] == 'Never'
    (codes,) = (r['onExitCodes'] for r in job['podFailurePolicy']['rules'] if 'onExitCodes' in r)
    assert codes == {'containerName': 'train', 'operator': 'In', 'values': [2, 3, EXIT_PREEMPTED]}


def test_kubectl_gets_the_manifest_that_dry_run_prints(tmp_path, monkeypatch, capsys):
    program = tmp_path / 'kubectl'
    program.write_text(f'#!/bin/bash\ncat > {tmp_path}/manifest; echo "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    flags = ['--slices', '2', '--queue', 'team', '--env', 'A=1', '--job-name', 'b16']
    assert launch(*flags, '--dry-run') == 0
    shown = capsys.readouterr().out
    jobset = yaml.safe_load(shown)
    assert jobset['metadata']['labels'] == {'kueue.x-k8s.io/queue-name': 'team'}
    assert launch(*flags) == 0
    assert capsys.readouterr().out == 'create -f -\n'
    assert (tmp_path / 'manifest').read_text() == shown


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--tpu', 'v3-32'], 'GKE offers v4 and later'),
        (['--tpu', 'v6e-8', '--slices', '2'], ('several', 'machines')),
        (['--tpu', 'v5p-24'], ('shape', '12 chips')),
        (['--topology', '2x4'], ('shape', '16 chips')),
        (['--topology', 'many'], ('shape', '16 chips')),
        (['--spot', '--flex-start'], 'not both'),
        (['--queue', 'A'], ('--queue', "'A'", '40')),
        (['--namespace', 'a/b'], '--namespace'),
        (['--service-account', '$a'], '--service-account'),
        (['--job-name', 'a_b'], '--job-name'),
        (['--image', 'two words'], '--image'),
        (['--env', 'A-B=1'], '--env'),
        (['--mount', '/data=s3://lab'], 'bucket'),
        (['--env', 'TFDS_DATA_DIR=gs://a'], 'give --mount'),
        ([*TRAIN, '--workdir', 'runs/a'], ('machine', 'deleted')),
        ([], ('kubectl', 'install')),
    ],
)
def test_a_mistake_is_one_line(flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    flagged = not flags or flags[0].startswith('--')
    assert (launch(*flags) if flagged else launch(command=flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, message)


def test_every_slice_with_sides_of_powers_of_two_has_its_shape():
    for name, generation in cloud_tpu.GENERATIONS.items():
        for size in (n for n in generation.sizes if not n & (n - 1) and n <= 512):
            sides = [int(side) for side in cloud_tpu.topology(f'{name}-{size}').split('x')]
            assert len(sides) == (2 if generation.cores == 1 else 3)
            assert math.prod(sides) == cloud_tpu.chips(f'{name}-{size}')
