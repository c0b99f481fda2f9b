"""The flags of each launcher."""

from __future__ import annotations

import argparse

from vit_jax.commands._parser import Parser
from vit_jax.errors import count, positive


def slurm(made: Parser) -> None:
    """Add the flags of `launch slurm`."""
    made.add_argument('--nodes', type=positive, default=1, metavar='N')
    made.add_argument('--gpus', type=count, default=0, metavar='G', help='a node; one process each')
    made.add_argument(
        '--cpus-per-task', type=count, default=0, metavar='C', help='of each process, for loaders'
    )
    made.add_argument('--array', type=count, default=0, metavar='K', help='so many sweep workers')
    made.add_argument('--partition', default='', metavar='P')
    made.add_argument('--time', default='', metavar='T', help='the limit, as 12:00:00')
    made.add_argument(
        '--grace',
        type=positive,
        default=120,
        metavar='SECONDS',
        help='the job gets the signal to save its state so long before the limit; 120 by default',
    )
    made.add_argument(
        '--sbatch',
        action='append',
        default=[],
        metavar='OPTION',
        help='one more of sbatch, as account=vision; may be repeated',
    )


def sky(made: Parser) -> None:
    """Add the flags of `launch sky`."""
    _slices(made)
    made.add_argument('--region', default='')
    made.add_argument('--zone', default='')
    _preflight(made)
    _env(made)
    _mount(made)


def tpu(made: Parser) -> None:
    """Add the flags of `launch tpu`."""
    _slices(made)
    made.add_argument('--zone', required=True, help='as us-central1-a')
    made.add_argument('--project', default='', help="gcloud's own by default")
    made.add_argument(
        '--min-slices', type=positive, metavar='M', help='go on with so many; --slices by default'
    )
    made.add_argument(
        '--patience',
        type=count,
        default=30,
        metavar='MINUTES',
        help='to wait for slices before asking for one fewer, down to --min-slices; 30 by default',
    )
    made.add_argument(
        '--flex-start', default='', metavar='TIME', help='rent for at most so long, as 24h'
    )
    _preflight(made)
    _env(made)
    made.add_argument(
        '--setup', default='', metavar='COMMAND', help='prepares each machine, as mounting a disk'
    )
    made.add_argument(
        '--gcloud',
        action='append',
        default=[],
        metavar='OPTION',
        help='one more of queued-resources create, as network=lab; may be repeated',
    )
    made.add_argument(
        '--poll', type=count, default=30, metavar='SECONDS', help='between two looks; 30 by default'
    )


def gke(made: Parser) -> None:
    """Add the flags of `launch gke`."""
    _slices(made)
    made.add_argument('--image', required=True, help='a container with the repository')
    made.add_argument(
        '--topology', default='', metavar='SHAPE', help='as 4x4; the usual by default'
    )
    made.add_argument('--flex-start', action='store_true', help='use nodes of flex-start')
    made.add_argument('--queue', default='', metavar='NAME', help='a LocalQueue of Kueue')
    made.add_argument('--namespace', default='', metavar='NAME', help="kubectl's own by default")
    made.add_argument(
        '--service-account', default='', metavar='NAME', help='of Kubernetes, with access to data'
    )
    _preflight(made)
    _env(made)
    _mount(made)


def _slices(made: Parser) -> None:
    made.add_argument('--tpu', required=True, metavar='TYPE', help='the slice, as v5litepod-8')
    made.add_argument('--slices', type=positive, default=1, metavar='N', help='1 by default')
    made.add_argument('--spot', action='store_true', help='may be preempted; costs less')


def _preflight(made: Parser) -> None:
    made.add_argument(
        '--preflight', action='store_true', help='first compile for the slice: does training fit?'
    )


def _env(made: Parser) -> None:
    made.add_argument(
        '--env',
        action='append',
        type=pair,
        default=[],
        metavar='NAME=VALUE',
        help='a variable of the command; may be repeated',
    )


def _mount(made: Parser) -> None:
    made.add_argument(
        '--mount',
        action='append',
        type=pair,
        default=[],
        metavar='/FOLDER=gs://BUCKET',
        help='a bucket as a folder; may be repeated',
    )


def pair(text: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`; raises ArgumentTypeError for any other text."""
    name, equals, value = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return name, value
