"""Pack the examples of a source into shards for fast reading from a disk or over a network."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vit_jax.commands._parser import Parser, writing
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Write the shards and their manifest, and print a summary.

    Raises:
      UserError: The number of workers is negative, or given with `--beam`.
    """
    parser = Parser('pack', __doc__)
    parser.add_argument(
        'source', help='source, such as folder:/data/flowers, tfds:NAME, hf:PATH or tar:PATTERN'
    )
    parser.add_argument(
        'out', help='folder to write: a new one, or one that the same command began'
    )
    parser.add_argument(
        '--split',
        action='append',
        metavar='NAME[=EXPRESSION]',
        help="split such as test, or train='train[:90%%]'; may be repeated (default: train)",
    )
    parser.add_argument(
        '--per-shard',
        type=int,
        default=2048,
        metavar='N',
        help='examples per shard (default: 2048)',
    )
    parser.add_argument(
        '--shorter-side',
        type=int,
        default=0,
        metavar='PIXELS',
        help='shorter side to which larger images are shrunk, as JPEG (default: 0, no shrinking)',
    )
    parser.add_argument(
        '--quality', type=int, default=92, help='JPEG quality of shrunk images (default: 92)'
    )
    parser.add_argument(
        '--workers',
        type=int,
        metavar='N',
        help='number of worker processes; 0 for none (default: one per core)',
    )
    parser.add_argument(
        '--beam',
        metavar='OPTIONS',
        help="options of Apache Beam, for several machines: --beam='--runner=DataflowRunner ...'",
    )
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 0:
        raise UserError(f'--workers {args.workers}: must be 0 or more')
    if args.beam is not None and args.workers is not None:
        raise UserError('--workers does not apply with --beam: use the options of Beam')
    from vit_jax.data import packing
    from vit_jax.runtime import console, environment

    splits = dict(_parse_split(text) for text in args.split or ['train'])
    out = os.path.expanduser(args.out)
    job = packing.Job(args.source, splits, out, args.per_shard, args.shorter_side, args.quality)
    shards = job.shards()
    workers = environment.available_cores() if args.workers is None else args.workers
    bar = console.progress('shards', len(shards), quiet=args.beam is not None)
    with writing(out, 'OUT'), bar as advance:
        if args.beam is not None:
            manifest = packing.pack_with_beam(job, shards, args.beam)
        else:
            manifest = packing.pack(job, shards, min(workers, len(shards)), lambda _: advance())
    for split, files in manifest.splits.items():
        examples, size = (sum(f.examples for f in files), sum(f.size for f in files))
        print(f'{split}: {examples:,} examples in {len(files)} shards of {size / 1e6:,.1f} MB')
    print(f'read them with --config.data.source=packed:{args.out}')
    return 0


def _parse_split(text: str) -> tuple[str, str]:
    name, _, expression = text.partition('=')
    return name, expression or name
