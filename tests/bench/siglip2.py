"""SigLIP, SigLIP 2 and TIPSv2 at equal counted FLOPs: retrieval, and a linear probe of patches.

    python tests/bench/siglip2.py runs/siglip2_bench --seeds 3 --epochs 20

SigLIP trains for `--epochs` epochs of `scenes_captions`, the others for as many as cost the same,
with every seed. Prints a row for each run, and the means with their standard errors. Runs that are
in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import jax
import numpy as np
import pages

from vit_jax.commands import vocab
from vit_jax.config import load
from vit_jax.profiling import task_flops
from vit_jax.trainer import build
from vit_jax.trainer.train import train

METRICS = ('retrieval/text_recall_1', 'retrieval/image_recall_1', 'patches/mIoU')
LATE = 0.2  # share of SigLIP 2's run with self-distillation
PATCHES = {
    **{'source': 'scenes_panoptic:1000', 'split': 'test', 'fit': 'train', 'every': '100%'},
    **{'transforms': "resize(48)|keep('image')", 'evaluator': 'patch_probe'},
}


def config_of(name: str, vocab_file: str, seed: int, epochs: float):
    """The config of a run, with the probe of patches."""
    changes = [f'seed={seed}', f'total={epochs:.4f} epochs', 'every.eval=100%']
    config = load.load(f'{pages.ROOT}/experiments/{name}/scenes.py', changes)
    with config.unlocked():
        config.evals = {key: config.evals[key] for key in ('test', 'retrieval')}
        config.evals.patches = PATCHES
    for entry in (config.data, config.evals.test, config.evals.retrieval):
        entry.vocab = vocab_file
    return config


def flops(name: str, vocab_file: str) -> float:
    """FLOPs of a training example, averaged over the run."""
    training = build.build(config_of(name, vocab_file, 0, 1), jax.devices()[:1])
    model, task = load.model_and_task(training.config)
    spec = training.data.shapes[-1].spec
    late = task_flops.training_flops(model, task, spec).total
    if name != 'siglip2':
        return late
    changes = {'dino': 0.0, 'ibot': 0.0}
    with training.config.unlocked():
        training.config.task.update(changes)
    early = task_flops.training_flops(*load.model_and_task(training.config), spec).total
    return (1 - LATE) * early + LATE * late


def main() -> None:
    """Train what is missing, and print all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--epochs', type=float, default=20)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    vocab_file = args.folder / 'scenes_captions.model'
    if not vocab_file.is_file():
        words = f'scenes_captions --field caption --size 100 --kind bpe --out {vocab_file}'
        vocab.main(words.split())
    costs = {name: flops(name, str(vocab_file)) for name in ('siglip', 'siglip2', 'tips')}
    results = {}
    for name, cost in costs.items():
        epochs = args.epochs * costs['siglip'] / cost
        print(f'{name}: {cost / 1e6:.2f} MFLOPs an example, {epochs:.2f} epochs')
        for seed in range(args.seeds):
            folder, start = args.folder / f'{name}_{seed}', time.process_time()
            result = folder / 'result.json'
            if not result.is_file():
                train(config_of(name, str(vocab_file), seed, epochs), folder)
            scores = json.loads(result.read_text())
            results.setdefault(name, []).append([scores[metric] for metric in METRICS])
            values = ', '.join(f'{key} {scores[key]:.3f}' for key in METRICS)
            print(f'{name}, seed {seed}: {values}; {time.process_time() - start:.0f} s of CPU')
    means = {name: np.mean(rows, 0) for name, rows in results.items()}
    errors = {
        name: np.std(rows, 0, ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else np.zeros(3)
        for name, rows in results.items()
    }
    for i, metric in enumerate(METRICS):
        print(f'{metric}: siglip {means["siglip"][i]:.3f} +- {errors["siglip"][i]:.3f}')
        for name in ('siglip2', 'tips'):
            spread = float(np.hypot(errors['siglip'][i], errors[name][i]))
            gain = means[name][i] - means['siglip'][i]
            value = f'{means[name][i]:.3f} +- {errors[name][i]:.3f}'
            print(f'  {name} {value}, difference {gain:+.3f} +- {spread:.3f}')


if __name__ == '__main__':
    main()
