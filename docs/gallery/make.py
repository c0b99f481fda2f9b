"""Redraw the pictures of docs/gallery.md with the page's own commands: `make gallery`.

Runs the `sh` blocks under the first heading in order, in the root of the repository, with bash, and
stops at the first failure. Runs are in runs/gallery; complete ones are not trained again. A picture
that looks unchanged keeps its bytes, which depend on library versions. The pictures under other
headings come from long trainings and are not redrawn.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / 'docs' / 'gallery.md'
MOST = 1600  # width in pixels
# Pictures look alike if at most this share of pixels differs by more than this.
SHARE, DIFFERENCE = 0.001, 32


def blocks(text: str) -> list[str]:
    """The command blocks under the first heading."""
    return re.findall(r'```sh\n(.*?)```', text.split('\n## ')[1], re.DOTALL)


def pictures(text: str) -> list[pathlib.Path]:
    """The pictures in docs/ that the commands of `blocks` draw."""
    return [ROOT / name for block in blocks(text) for name in re.findall(r'docs/\S+\.png', block)]


def shrink(path: pathlib.Path) -> None:
    """Rewrite a picture with a palette of 256 colors, enough for plots and heat maps."""
    image = Image.open(path).convert('RGB')
    if image.width > MOST:
        size = MOST, round(image.height * MOST / image.width)
        image = image.resize(size, Image.Resampling.LANCZOS)
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def alike(first: bytes, second: bytes) -> bool:
    """Whether two files hold visually identical pictures."""
    pixels = [np.asarray(Image.open(io.BytesIO(b)).convert('RGB'), int) for b in (first, second)]
    if pixels[0].shape != pixels[1].shape:
        return False
    return bool((abs(pixels[0] - pixels[1]).max(axis=-1) > DIFFERENCE).mean() <= SHARE)


def keep(path: pathlib.Path, before: bytes | None) -> None:
    """Restore a picture's previous bytes if it looks unchanged."""
    if before is not None and alike(before, path.read_bytes()):
        path.write_bytes(before)


def main() -> None:
    """Run the page."""
    text = PAGE.read_text()
    before = {p: p.read_bytes() if p.exists() else None for p in pictures(text)}
    binaries = pathlib.Path(sys.executable).parent
    path = f'{binaries}{os.pathsep}{os.environ["PATH"]}'
    for block in blocks(text):
        print(block, flush=True)
        command = ['bash', '-euo', 'pipefail', '-c', block]
        subprocess.run(command, cwd=ROOT, env=os.environ | {'PATH': path}, check=True)
    for picture in pictures(text):
        shrink(picture)
        keep(picture, before[picture])


if __name__ == '__main__':
    main()
