"""What the tests of commands share: runs that translate."""

from __future__ import annotations

import pathlib

import jax
import pytest
from helpers.finished import made_once
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config import load
from vit_jax.data import vocabulary
from vit_jax.trainer import train

PAIRS = [
    ('A dog runs.', 'Ein Hund läuft.'),
    ('Two dogs play in the snow.', 'Zwei Hunde spielen im Schnee.'),
    ('A girl with a football.', 'Ein Mädchen mit einem Fußball.'),
    ('Men sit on a green bench.', 'Männer sitzen auf einer grünen Bank.'),
    ('A woman plays the guitar.', 'Eine Frau spielt Gitarre.'),
    ('The boy swims.', 'Der Junge schwimmt.'),
    ('Three girls are swimming.', 'Drei Mädchen schwimmen.'),
    ('A man with a hat.', 'Ein Mann mit einem Hut.'),
]


@pytest.fixture(scope='session')
def translating_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a small Transformer after two steps, with its vocabulary; do not write to it.

    Sentences of more than 16 tokens are cut.
    """
    return made_once(tmp_path_factory, 'translating', _translate)


def _translate(folder: pathlib.Path) -> None:
    (folder / 'pairs.tsv').write_text('\n'.join(map('\t'.join, PAIRS)))
    vocab = vocabulary.train([side.lower() for pair in PAIRS for side in pair], 110, 'bpe')
    (folder / 'vocab.model').write_bytes(vocab.model)
    data = dict(
        source=f'text:{folder}/pairs.tsv',
        split='train',
        vocab=str(folder / 'vocab.model'),
        transforms='lower|tokenize(16)',
    )
    model = dict(name='seq2seq', width=16, depth=1, num_heads=2, mlp_dim=16, dropout=0.0)
    config = ConfigDict(
        dict(
            seed=0,
            total='2 steps',
            batch_size=128,
            model=model | dict(vocab_size=placeholder(int)),
            task=dict(name='translate', beams=2, extra_len=4),
            # One shape to train, and one to evaluate, take the least to compile.
            data=dict(data, buckets=(16,)),
            evals=dict(val=data | dict(split='train[:1]', buckets=(16,))),
            optim=dict(name='adamw', lr=0.3),
            step={},
            every=dict(log='1 step', eval='2 steps', checkpoint='2 steps'),
            checkpoint=dict(keep_last=1),
            parallel=dict(strategy='jit'),
        )
    )
    train.train(load.override(config, []), folder / 'run', devices=jax.devices()[:1])
    for path in ('pairs.tsv', 'vocab.model'):  # the run folder is enough
        (folder / path).unlink()


@pytest.fixture(scope='session')
def reversing_run(repo: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a small Transformer after a few steps on digits; do not write to it."""
    changes = ['total=2 steps', 'model.vocab_size=16', 'model.depth=1', 'data.buckets=(13,)']
    config = load.load(
        f'{repo}/experiments/translate/synthetic.py:smoke', [*changes, 'evals.test.split=test[:1]']
    )

    def reverse(folder: pathlib.Path) -> None:
        train.train(config, folder / 'run', devices=jax.devices()[:1])

    return made_once(tmp_path_factory, 'reversing', reverse)
