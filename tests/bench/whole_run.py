"""Images a second of a whole run from JPEG files, by the command that users give.

    python tests/bench/whole_run.py FOLDER --model Ti/16 --batch-size 32 --steps 40

FOLDER holds JPEG files; links make `--copies` of each, in a class of its own, for training. The
recipe is `vit/imagenet2012.py` with a ViT of the size of `--model`, without evaluations other than
at the end. The rate is that of the log lines of `metrics.jsonl` but the first, which compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from vit_jax.models import vit

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES, RATE = 5, 'train/images_per_sec'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--model', default='Ti/16')
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--copies', type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        link_images(args.folder, place / 'images', args.copies)
        (place / 'config.py').write_text(config_of(args, place / 'images'))
        words = ['train', '--config', f'{place}/config.py', '--workdir', f'{place}/run']
        subprocess.run([sys.executable, '-m', 'vit_jax', *words], cwd=ROOT, check=True)
        lines = (place / 'run' / 'metrics.jsonl').read_text().splitlines()
    rates = [row[RATE] for row in map(json.loads, lines) if RATE in row][1:]
    load = os.getloadavg()[0]
    print(f'{statistics.median(rates):.1f} images/s ({min(rates):.1f} to {max(rates):.1f})')
    print(f'{len(os.sched_getaffinity(0))} cores, load of the last minute {load:.1f}')


def link_images(source: pathlib.Path, target: pathlib.Path, copies: int) -> None:
    """Makes `train` with so many links to each file, and `val` with one."""
    for file in sorted(source.resolve().rglob('*')):
        if file.suffix.lower() not in ('.jpg', '.jpeg'):
            continue
        for split, count in (('train', copies), ('val', 1)):
            kind = target / split / file.stem
            kind.mkdir(parents=True)
            for i in range(count):
                (kind / f'{i}.jpg').symlink_to(file)


CONFIG = """
import runpy

def get_config():
    config = runpy.run_path({recipe!r})['get_config']()
    images = 'folder:{images}'
    config.model.update({shape})
    config.data.update(source=images, split='train')
    config.evals = dict(val=dict(config.evals.val, source=images, split='val'))
    config.batch_size, config.total = {args.batch_size}, '{args.steps} steps'
    config.optim.schedule.warmup = '1 step'
    config.every = dict(log='{log} steps', eval=config.total, checkpoint=config.total)
    return config
"""


def config_of(args, images: pathlib.Path) -> str:
    """A config that is the recipe with the images and the model."""
    recipe, shape = str(ROOT / 'experiments/vit/imagenet2012.py'), vit.variant(args.model)
    log = max(1, args.steps // LINES)
    return CONFIG.format(recipe=recipe, images=images, shape=shape, args=args, log=log)


if __name__ == '__main__':
    main()
