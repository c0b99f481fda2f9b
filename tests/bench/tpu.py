"""Compile published recipes for slices of TPUs, and write what they need into docs/tpu.md.

    make preflight

Takes about a minute a recipe; nothing is trained, and no data are needed.
"""

from __future__ import annotations

import os
import pathlib
import platform
from importlib import metadata

from vit_jax.config import load as config_lib
from vit_jax.profiling import preflight, topology

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / 'docs' / 'tpu.md'
BEGIN, END = '<!-- made by tests/bench/tpu.py -->\n', '<!-- end -->\n'
RECIPES = (
    ('vit/imagenet2012.py', 'v5e:2x4'),
    ('vit/imagenet2012.py:B/16,300ep', 'v5e:4x4'),
    ('vit/imagenet2012_paper.py', 'v4:2x2x2'),
    ('vit/imagenet21k.py', 'v4:2x2x4'),
    ('vit/augreg.py', 'v5e:4x4'),
    ('mae/imagenet.py:B/16,1600ep', 'v5e:8x8'),
    ('swin/imagenet.py:T', 'v5e:4x4'),
    ('bit/imagenet2012.py', 'v5e:4x4'),
    ('detr/coco.py', 'v5e:4x4'),
)
HEADINGS = (
    *('recipe', 'slice', 'batch', 'fits', 'GiB a chip', 'ms at least', 'MFU at most'),
    *('exchanges ms', 'steps', 'chip-hours at least'),
)


def row(recipe: str, slice_: str) -> list[str]:
    config = config_lib.load(str(ROOT / 'experiments' / recipe))
    (report, *_), run = preflight.preflight(config, topology.parse(slice_))
    cells = [f'`{recipe}`', slice_, f'{report.rows:,}', 'yes' if report.fits else '**no**']
    cells += [f'{report.needed / 2**30:.1f} of {report.usable / 2**30:.1f}']
    if not report.fits:
        return [*cells, '', '', '', f'{run.steps:,}', '']
    times = f'{1e3 * report.bound:,.1f}', f'{report.mfu(report.bound):.0%}'
    return [*cells, *times, f'{1e3 * report.link:.1f}', f'{run.steps:,}', f'{run.chip_hours:,.0f}']


def line(cells: list[str] | tuple[str, ...]) -> str:
    return f'| {" | ".join(cells)} |\n'


def main() -> None:
    rows = []
    for recipe, slice_ in RECIPES:
        rows.append(row(recipe, slice_))
        print(line(rows[-1]), end='', flush=True)
    versions = ', '.join(f'{n} {metadata.version(n)}' for n in ('jax', 'libtpu'))
    made = f'Made by `make preflight` on {platform.machine()}, {os.cpu_count()} cores: {versions}.'
    table = line(HEADINGS) + line(['---'] * len(HEADINGS)) + ''.join(map(line, rows))
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f'{before}{BEGIN}{table}\n{made}\n{END}{after}')


if __name__ == '__main__':
    main()
