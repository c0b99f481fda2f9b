"""Compile ViTs for images of several sizes, and write the table of them into docs/kernels.md.

    python tests/bench/tpu_pixels.py 'L/16, 512'    # rows whose names contain a word; else all

Takes one to three minutes of CPU a row; nothing is trained, and no TPU or data are needed.
"""

from __future__ import annotations

import sys

import pages
import tpu_recipes

from vit_jax.config import load
from vit_jax.profiling import preflight, topology
from vit_jax.rehearsal import ahead_of_time

TABLE = pages.ROOT / 'docs' / 'kernels.md', 'tests/bench/tpu_pixels.py', 'pixels'
RECIPE, SLICE = 'experiments/vit/imagenet2012.py', 'v5e:4x4'
# Sizes with their layouts; pixels with the images of a batch, which shrinks as sequences grow.
SIZES = {'B/16': 'parallel.fsdp=1', 'L/16': 'parallel.fsdp=16'}
PIXELS = {384: 512, 512: 256, 896: 64}
ROWS = {f'{size}, {pixels}': (size, pixels) for size in SIZES for pixels in PIXELS}
HEADINGS = (
    *('model, pixels', 'tokens', 'batch', '`--config.`', 'fits', 'GiB per chip', 'ms at least'),
    *('MFU at most', 'exchanges ms'),
)


def row(name: str) -> list[str]:
    """The cells of a size of model and images."""
    size, pixels = ROWS[name]
    words = [f'batch_size={PIXELS[pixels]}', SIZES[size]]
    config = load.load(f'{pages.ROOT / RECIPE}:{size},300ep,fast', words)
    (report, *_), run = preflight.preflight(
        config, topology.parse_topology(SLICE), ahead_of_time.PROGRAM, image_size=pixels
    )
    cells = [name, f'{(pixels // 16) ** 2:,}', str(PIXELS[pixels]), f'`{SIZES[size]}`']
    return [*cells, *tpu_recipes.needs(report, run)]


def main(words: list[str]) -> None:
    for name in ROWS:
        if words and not any(word in name for word in words):
            continue
        made = row(name)
        print(' | '.join(made), flush=True)
        rows = {cells[0]: cells for cells in pages.read(*TABLE)} | {name: made}
        pages.write(*TABLE, HEADINGS, [rows[key] for key in ROWS if key in rows])


if __name__ == '__main__':
    main(sys.argv[1:])
