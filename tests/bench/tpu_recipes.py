"""Compile published recipes for slices of TPUs, and write what they need into docs/tpu_recipes.md.

    make preflight
    python tests/bench/tpu_recipes.py detr vit_compute    # rows whose names contain a word

Takes a minute or more of CPU a recipe; nothing is trained, and no data are needed but those of
text, whose lengths decide the batches: Multi30k in `$MULTI30K_DIR` takes the place of WMT 2014.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import pages
from ml_collections import ConfigDict

from vit_jax.commands import vocab
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.profiling import preflight, topology
from vit_jax.rehearsal import ahead_of_time

PAGE = pages.ROOT / 'docs' / 'tpu_recipes.md'
TABLE = PAGE, 'tests/bench/tpu_recipes.py', 'recipes'
WMT14 = 'translate/wmt14.py'
OWN_PAIRS = 'siglip/own.py'  # data of one's own, so that steps and hours are not known
RECIPES = (
    ('vit/imagenet2012.py', 'v5e:2x4'),
    ('vit/imagenet2012.py:fast', 'v5e:2x4'),
    ('vit/imagenet2012.py:B/16,300ep', 'v5e:4x4'),
    ('vit/imagenet2012.py:B/16,300ep,fast', 'v5e:4x4'),
    ('vit/imagenet2012.py:naflex,B/16', 'v5e:4x4'),
    ('vit/imagenet2012_paper.py:fast', 'v4:2x2x2'),
    ('vit/imagenet21k.py:fast', 'v4:2x2x4'),
    ('vit/augreg.py:fast', 'v5e:4x4'),
    ('vit/augreg.py:i21k,Ti/16,fast', 'v5e:2x4'),
    ('scaling/vit_compute.py:R50+B/16,fast', 'v4:2x2x4'),
    ('scaling/vit_compute.py:L/16,fast', 'v4:2x4x4'),
    ('scaling/vit_compute.py:H/14,fast', 'v5p:2x4x4'),
    ('scaling/zhai.py:G/14,fast', 'v5p:4x4x4'),
    ('mae/imagenet.py:B/16,1600ep,fast', 'v5e:8x8'),
    ('dinov2/imagenet.py:L/16,fast', 'v5p:2x4x4'),
    (OWN_PAIRS, 'v5e:4x4'),
    ('swin/imagenet.py:T', 'v5e:4x4'),
    ('bit/imagenet2012.py', 'v5e:4x4'),
    ('detr/coco.py', 'v5e:4x4'),
    (WMT14, 'v5e:2x4'),
)
HEADINGS = (
    *('recipe', 'slice', 'batch', 'fits', 'GiB per chip', 'ms at least', 'MFU at most'),
    *('exchanges ms', 'steps', 'chip-hours at least'),
)


class NoData(UserError):
    """A recipe's data are not here."""


def config_of(recipe: str, folder: str) -> ConfigDict:
    """The config of a row; a vocabulary that it needs is made in `folder`.

    Raises:
      NoData: if its data are not here.
    """
    config = load.load(str(pages.ROOT / 'experiments' / recipe))
    if recipe == OWN_PAIRS:
        config.data.update(source='scenes_captions', vocab='bytes')
        config.model.vocab_size = 32_000
    return as_multi30k(config, folder) if recipe == WMT14 else config


def as_multi30k(config: ConfigDict, folder: str) -> ConfigDict:
    """A config of WMT 2014 with other sentences, and as many pieces as if they were its own."""
    there = os.environ.get('MULTI30K_DIR', str(pages.ROOT / 'data' / 'multi30k'))
    if not os.path.isdir(there):
        raise NoData(f'no folder {there}: download Multi30k there, or set MULTI30K_DIR')
    source, made = f'text:{there}/train.en,train.de', f'{folder}/wmt14.model'
    vocab.main([source, '--size', '8000', '--kind', 'bpe', '--output', made])
    config.data.update(source=source, split='train', vocab=made, transforms='tokenize')
    config.model.vocab_size = 37_000
    return config


def row(recipe: str, slice_: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(recipe, folder)
        (report, *_), run = preflight.preflight(
            config, topology.parse_topology(slice_), ahead_of_time.PROGRAM
        )
    rows = f'{config.batch_size:,}' + (' tokens' if config.data.get('buckets') else '')
    hours = f'{run.chip_hours:,.0f}' if report.fits else ''
    length = ['', ''] if recipe == OWN_PAIRS else [f'{run.steps:,}', hours]
    return [f'`{recipe}`', slice_, rows, *needs(report, run), *length]


def needs(report: Any, run: Any) -> list[str]:
    """Whether a compiled step fits; its memory, time, MFU and exchanges."""
    memory = f'{report.needed / 2**30:.1f} of {report.usable / 2**30:.1f}'
    if not report.fits:
        return ['**no**', memory, '', '', '']
    times = f'{1e3 * run.seconds:,.1f}', f'{report.mfu(report.bound):.0%}'
    return ['yes', memory, *times, f'{1e3 * report.link:.1f}']


def main(words: list[str]) -> None:
    for recipe, slice_ in RECIPES:
        if words and not any(word in recipe for word in words):
            continue
        try:
            made = row(recipe, slice_)
        except UserError as e:
            print(f'{recipe}: its row stays as it is: {e}', file=sys.stderr)
            continue
        print(' | '.join(made), flush=True)
        rows = {cells[0]: cells for cells in pages.read(*TABLE)} | {made[0]: made}
        kept = [rows[f'`{name}`'] for name, _ in RECIPES if f'`{name}`' in rows]
        pages.write(*TABLE, HEADINGS, kept)


if __name__ == '__main__':
    main(sys.argv[1:])
