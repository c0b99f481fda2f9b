"""Compile recipes for several TPU slices; write what crosses between them into docs/tpu_recipes.md.

    python tests/bench/tpu_slices.py
    python tests/bench/tpu_slices.py B/16    # rows whose names contain a word

Takes a minute or two of CPU a recipe; nothing is trained, and no TPU or data are needed.
"""

from __future__ import annotations

import sys

import pages

from vit_jax.config import load
from vit_jax.profiling import preflight, topology
from vit_jax.rehearsal import ahead_of_time

TABLE = pages.ROOT / 'docs' / 'tpu_recipes.md', 'tests/bench/tpu_slices.py', 'slices'
RECIPES = (
    ('vit/imagenet2012.py:fast', '2xv5e:2x2'),
    ('vit/imagenet2012.py:B/16,300ep,fast', '2xv5e:4x4'),
    ('vit/imagenet2012.py:L/16,300ep,fast --config.parallel.fsdp=16', '2xv5e:4x4'),
)
HEADINGS = (
    *('recipe', 'slices', 'batch', 'MB per host', 'Gb/s', 'ms', 'hidden ms'),
    *('step ms at least', 'times one slice', 'pays from batch'),
)


def rows(recipe: str, slices: str) -> list[list[str]]:
    """A row for each speed of the network."""
    name, *overrides = recipe.split(' --config.')
    config = load.load(str(pages.ROOT / 'experiments' / name), overrides)
    (report,), _ = preflight.preflight(
        config, topology.parse_topology(slices), ahead_of_time.PROGRAM
    )
    crossing = report.crossing
    assert crossing is not None
    first = [f'`{recipe}`', slices, f'{config.batch_size:,}', f'{crossing.host_bytes / 1e6:.1f}']
    found = []
    for speed in crossing.speeds:
        now, best = speed.scheduled, speed.best
        cells = [f'{speed.gbits}', f'{1e3 * speed.seconds:.1f}']
        cells += [f'{1e3 * now.hidden:.1f}, {1e3 * best.hidden:.1f}']
        cells += [f'{1e3 * now.step:.1f}, {1e3 * best.step:.1f}']
        cells += [f'{now.speedup:.2f}, {best.speedup:.2f}']
        found.append([*first, *cells, f'{now.pays_from:,}, {best.pays_from:,}'])
    return found


def main(words: list[str]) -> None:
    for recipe, slices in RECIPES:
        if words and not any(word in recipe for word in words):
            continue
        made = rows(recipe, slices)
        print('\n'.join(' | '.join(cells) for cells in made), flush=True)
        there = [cells for cells in pages.read(*TABLE) if cells[:2] != made[0][:2]]
        order = [(f'`{recipe}`', slices) for recipe, slices in RECIPES]
        kept = sorted(there + made, key=lambda cells: order.index((cells[0], cells[1])))
        pages.write(*TABLE, HEADINGS, kept)


if __name__ == '__main__':
    main(sys.argv[1:])
