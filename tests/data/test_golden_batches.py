"""The first batches of every experiment, as they were when they were first written down.

Order, sizes, transforms and padding are functions of (seed, k) that no later version may change: a
run that is resumed with it would see other examples. After an intended change of an experiment,
`python tests/data/test_golden_batches.py` writes `tests/golden/batches.json` anew.
"""

import hashlib
import itertools
import json
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # where this file is run as a script
from helpers import experiments
from helpers.sections import section

from vit_jax.config import load
from vit_jax.config.run import Data
from vit_jax.data import vocabulary
from vit_jax.data.batches import Process
from vit_jax.data.dataset import open_dataset

GOLDEN = experiments.ROOT / 'tests' / 'golden' / 'batches.json'
WHOLE, SECOND = Process(), Process((1,), 2)
SIZES = ((48, 64), (64, 48), (80, 80))
SENTENCES = (
    'A man rides a bike.\tEin Mann fährt Rad.',
    'Two dogs.\tZwei Hunde.',
    'A woman reads a book in the garden.\tEine Frau liest im Garten ein Buch.',
    'Children play.\tKinder spielen.',
    'The house is old and the roof is red.\tDas Haus ist alt und das Dach ist rot.',
)


def digest(batches, names):
    """The sha256 of some arrays of batches: names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for batch, name in itertools.product(batches, names.split(',')):
        array = np.ascontiguousarray(batch[name])
        total.update(f'{name} {array.dtype} {array.shape}\n'.encode())
        total.update(array.tobytes())
    return total.hexdigest()[:32]


def batches(keywords, process, training):
    """The first three batches."""
    keywords = dict(keywords)
    options = {key: keywords.pop(key) for key in ('batch_size', 'seed') if key in keywords}
    data = open_dataset(
        section(Data, threads=0, **keywords), **options, process=process, multiple=4
    )
    made = data.train_batches() if training else data.eval_batches()
    taken = list(itertools.islice(made, 3))
    made.close()
    return taken


def of_experiment(path):
    """Keywords of `open_dataset` for training and each evaluation of the smoke size."""
    config = load.load(f'{experiments.ROOT / path}:smoke')
    size = {'batch_size': config.batch_size, 'workers': 0}
    yield 'train', {**size, **config.data, 'workers': 0, 'seed': config.seed}
    for name, entry in config.evals.items():
        yield name, {**size, **entry, 'workers': 0}


def sentences(folder):
    """Keywords for pairs of sentences, which a vocabulary of their own makes ids of."""
    lines = [line for line in SENTENCES for _ in range(20)]
    (folder / 'pairs.tsv').write_text('\n'.join(lines) + '\n')
    sides = [side for line in lines for side in line.split('\t')]
    (folder / 'vocab.model').write_bytes(vocabulary.train(sides, 60, 'bpe').model)
    text = {'source': f'text:{folder}/pairs.tsv', 'vocab': str(folder / 'vocab.model')}
    return {**text, 'split': 'train', 'transforms': 'swap|lower|tokenize', 'buckets': (16, 40)}


def others(folder):
    """Keywords for data that no smoke size has."""
    text = sentences(folder)
    framed = {'source': 'scenes:90', 'split': 'train[:60]', 'sizes': SIZES, 'batch_size': 8}
    moved = "random_resize((40, 56, 90), 100)|flip|keep('image', 'boxes', 'labels')|pad_objects(6)"
    return {
        'several sizes': framed | {'transforms': moved, 'seed': 5},
        'text': {**text, 'batch_size': 400, 'seed': 2},
        'text by its targets': {**text, 'batch_size': 400, 'count': 'target'},
        'classes': {
            'source': 'digits',
            'split': 'train[:200]+test[:50]',
            'classes': (3, 1, 7),
            'transforms': 'inception_crop(12)|flip|randaugment(2, 9)|random_erasing',
            'batch_size': 32,
            'seed': 7,
        },
    }


def written(parts):
    """Digests of parts of data, by the names of the arrays in a batch."""
    found = {}
    for part, keywords in parts:
        for process in (WHOLE, SECOND):
            taken = batches(keywords, process, training=part == 'train')
            names = ','.join(sorted(taken[0]))
            found[f'{part} {process.parts[0] + 1}/{process.count}'] = (
                f'{names} {digest(taken, names)}'
            )
    return found


def check(expected, parts):
    for part, keywords in parts:
        for process in (WHOLE, SECOND):
            names, sha = expected[f'{part} {process.parts[0] + 1}/{process.count}'].split()
            taken = batches(keywords, process, training=part == 'train')
            assert digest(taken, names) == sha, (part, process)


@pytest.mark.slow
@pytest.mark.parametrize('path', experiments.PATHS)
def test_experiments(path):
    check(json.loads(GOLDEN.read_text())[path], of_experiment(path))


@pytest.mark.parametrize('name', ['several sizes', 'text', 'text by its targets', 'classes'])
def test_other_data(name, tmp_path):
    keywords = others(tmp_path)[name]
    check(json.loads(GOLDEN.read_text())[name], [('train', keywords), ('eval', keywords)])


if __name__ == '__main__':
    import tempfile

    found = {path: written(of_experiment(path)) for path in experiments.PATHS}
    with tempfile.TemporaryDirectory() as folder:
        for name, keywords in others(pathlib.Path(folder)).items():
            found[name] = written([('train', keywords), ('eval', keywords)])
    GOLDEN.write_text(json.dumps(found, indent=1) + '\n')
