"""Compile ViTs of several sizes and layouts for one slice, and write the table of docs/layouts.md.

    python tests/bench/tpu_layouts.py H/14    # rows whose names contain a word; without one, all

Takes one to five minutes of CPU a row, a quarter of an hour in all; nothing is trained.
"""

from __future__ import annotations

import sys

import pages
import tpu_recipes

from vit_jax.config import load
from vit_jax.profiling import preflight, topology
from vit_jax.rehearsal import ahead_of_time

TABLE = pages.ROOT / 'docs' / 'layouts.md', 'tests/bench/tpu_layouts.py', 'layouts'
RECIPE, SLICE = 'experiments/vit/imagenet2012.py', 'v5e:4x4'
FSDP, ACCUM = 'parallel.fsdp=16', 'step.accum_steps=4'
# Sizes of 87 million to a billion parameters.
ROWS = (
    *(('B/16', ''), ('B/16', FSDP)),
    *(('L/16', ''), ('L/16', FSDP)),
    *(('H/14', ''), ('H/14', ACCUM), ('H/14', FSDP)),
    *(('g/14', ''), ('g/14', ACCUM), ('g/14', FSDP)),
)
BATCH_SIZE = 512
HEADINGS = (
    *('model', 'parameters', '`--config.`', 'fits', 'GiB per chip', 'ms at least', 'MFU at most'),
    'exchanges ms',
)


def row(size: str, layout: str) -> list[str]:
    """The cells of a size in a layout."""
    words = [f'batch_size={BATCH_SIZE}', *layout.split()]
    config = load.load(f'{pages.ROOT / RECIPE}:{size},300ep,fast', words)
    (report, *_), run = preflight.preflight(
        config, topology.parse_topology(SLICE), ahead_of_time.PROGRAM
    )
    keys = ', '.join(f'`{word}`' for word in layout.split()) or 'as it is'
    return [size, f'{report.parameters / 1e6:,.0f} M', keys, *tpu_recipes.needs(report, run)]


def main(words: list[str]) -> None:
    for size, layout in ROWS:
        if words and not any(word in f'{size} {layout}' for word in words):
            continue
        made = row(size, layout)
        print(' | '.join(made), flush=True)
        rows = {(c[0], c[2]): c for c in pages.read(*TABLE)} | {(made[0], made[2]): made}
        order = [size for size, _ in ROWS]
        pages.write(*TABLE, HEADINGS, sorted(rows.values(), key=lambda c: order.index(c[0])))


if __name__ == '__main__':
    main(sys.argv[1:])
