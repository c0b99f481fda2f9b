"""How the time of a command grows with what it is given: each should be at most linear.

    python tests/bench/growth.py
    python tests/bench/growth.py files trials --largest 2

Files of a folder of images, lines of metrics, runs of a table, trials of a study, examples of an
evaluation, and the patches of an image, of 224, 448 and 1,024 pixels, in a ViT. Numbers are CPU
seconds of all threads, the lowest of three; the exponent is that of the last two: 1 is linear.
Attention compares all patches with each other: the exponent of its share is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from bench.checkpoints import environment

ROUNDS = 3
ROOT = pathlib.Path(__file__).resolve().parents[2]
Act = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('what', nargs='*', default=list(KINDS), help=', '.join(KINDS))
    parser.add_argument('--largest', type=int, default=3, help='how many of the sizes')
    args = parser.parse_args()
    print(environment())
    print('| | sizes | CPU seconds | exponent |\n|---|---|---|---|')
    for what in args.what:
        setup, sizes = KINDS[what]
        sizes = sizes[: args.largest]
        spent = [lowest(setup, size) for size in sizes]
        exponent = math.log(spent[-1] / spent[-2]) / math.log(sizes[-1] / sizes[-2])
        cells = ' / '.join(f'{size:,}' for size in sizes), ' / '.join(f'{s:.3f}' for s in spent)
        print(f'| {what} | {cells[0]} | {cells[1]} | {exponent:.2f} |', flush=True)


def lowest(setup: Callable[[pathlib.Path, int], Iterator[Act]], size: int) -> float:
    """CPU seconds, the lowest of `ROUNDS` after one that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        act, spent = setup(pathlib.Path(folder), size), []
        for _ in range(ROUNDS + 1):
            with contextlib.redirect_stdout(io.StringIO()):
                begun = time.process_time()
                act()
                spent.append(time.process_time() - begun)
    return min(spent[1:])


def files(folder: pathlib.Path, count: int) -> Act:
    """Open a folder of classes of images, and count them."""
    from vit_jax.data.sources import open_source

    for number in range(count):
        if number % 1000 == 0:
            of_class = folder / 'train' / f'class_{number // 1000:04d}'
            of_class.mkdir(parents=True)
        (of_class / f'{number:07d}.jpg').touch()
    return lambda: open_source(f'folder:{folder}', 'train').class_counts()


def metrics(folder: pathlib.Path, count: int) -> Act:
    """Read the metrics of a run, as a resumed one does."""
    from vit_jax.storage import run_folder

    line = {'train/loss': 1.0, 'train/accuracy': 0.5, 'train/images_per_sec': 1e3}
    lines = (json.dumps({'step': step, **line}) for step in range(count))
    (folder / run_folder.METRICS).write_text(''.join(f'{text}\n' for text in lines))
    return lambda: run_folder.read_series(folder)


def runs(folder: pathlib.Path, count: int) -> Act:
    """Collect a table of finished runs."""
    from vit_jax.__main__ import main as vit_jax

    first = trained(folder / 'first')
    for number in range(count):
        to = folder / 'runs' / f'{number:04d}'
        to.mkdir(parents=True)
        for name in ('config.json', 'metrics.jsonl', 'result.json'):
            shutil.copy(first / name, to / name)
        shutil.copytree(first / 'checkpoints', to / 'checkpoints')
    table = str(folder / 'table.csv')
    return lambda: require(vit_jax(['scaling', 'collect', str(folder / 'runs'), '--output', table]))


def trials(folder: pathlib.Path, count: int) -> Act:
    """List the trials of a study, all complete, with the best of them."""
    from helpers import studies
    from optuna.trial import TrialState

    from vit_jax.sweeps import picture

    rates = [{'optim.lr': 1e-3 + 1e-6 * number} for number in range(count)]
    study = studies.make(folder, points=rates)
    begun = study.load(0)
    for number in range(count):
        begun.tell(begun.ask(), number / count, TrialState.COMPLETE)
    return lambda: (picture.rows(study), picture.best(study), picture.counts(study))


def evaluation(folder: pathlib.Path, count: int) -> Act:
    """Evaluate a tiny ViT on digits, `count` of them."""
    from vit_jax.__main__ import main as vit_jax

    run, split = trained(folder / 'run'), f'train[:{count}]'
    words = ['evaluate', '--workdir', str(run), '--source', 'digits', '--split', split]
    return lambda: require(vit_jax(words))


def tokens(folder: pathlib.Path, count: int) -> Act:
    """Apply a ViT-Ti/16 to an image of `count` patches."""
    import jax

    from vit_jax.models import vit

    del folder
    side = math.isqrt(count)
    model = vit.Model(num_classes=10, **vit.variant('Ti/16'))
    image = jax.numpy.zeros((1, 16 * side, 16 * side, 3))
    variables = jax.jit(model.init)(jax.random.key(0), image)
    apply = jax.jit(model.apply)
    return lambda: jax.block_until_ready(apply(variables, image))


def trained(folder: pathlib.Path) -> pathlib.Path:
    """A finished run of a tiny ViT."""
    from vit_jax.__main__ import main as vit_jax

    config = str(ROOT / 'experiments' / 'vit' / 'digits.py:smoke')
    with contextlib.redirect_stdout(io.StringIO()):
        require(vit_jax(['train', '--config', config, '--workdir', str(folder)]))
    return folder


def require(code: int) -> None:
    if code:
        raise SystemExit(code)


KINDS = {
    'files': (files, (10_000, 100_000, 1_000_000)),
    'metrics': (metrics, (1_000, 10_000, 100_000)),
    'runs': (runs, (10, 100, 1_000)),
    'trials': (trials, (10, 100, 1_000)),
    'evaluation': (evaluation, (100, 400, 1_400)),
    'tokens': (tokens, (196, 784, 4_096)),
}

if __name__ == '__main__':
    main()
