"""Runs on text, with a model and a task of one's own: buckets, vocabulary, rates, resuming."""

import contextlib
import io
import json
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from helpers.messages import mentions
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load
from vit_jax.config.run import Data
from vit_jax.data import vocabulary
from vit_jax.data.dataset import open_dataset
from vit_jax.data.plans.buckets import BucketBatches
from vit_jax.errors import UserError
from vit_jax.inference.load import open_run, read_config
from vit_jax.profiling.cost import train_flops
from vit_jax.storage.run_folder import read_metrics
from vit_jax.trainer import build, evaluate, start, train
from vit_jax.trainer.start import describe_run

# Says the target word by word from the word before and the mean of the source.
SYSTEM = """
import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import optax

from vit_jax.models import base as models
from vit_jax.ops.terms import Term
from vit_jax.tasks import base


class Model(models.Model):
    vocab_size: int
    width: int = 8

    @nn.compact
    def __call__(self, source, target, train=False):
        embed = nn.Embed(self.vocab_size, self.width)
        before = jnp.pad(target, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        real = (source > 0)[..., None]
        mean = (embed(source) * real).sum(1) / jnp.maximum(real.sum(1), 1)
        return {'logits': nn.Dense(self.vocab_size)(embed(before) + mean[:, None])}


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    def inputs(self, batch):
        return batch['source'], batch['target']

    def sums(self, outputs, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs['logits'], batch['target'])
        return (losses * (batch['target'] > 0)).sum(), (batch['target'] > 0).sum()

    def loss(self, outputs, batch):
        return {'loss': Term(*self.sums(outputs, batch))}

    def evaluate(self, apply, batch):
        return {'loss': self.sums(apply(*self.inputs(batch)), batch)}
"""
TOKENS = 512  # a batch


@pytest.fixture(scope='module', autouse=True)
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp('lab')
    (folder / 'my_text').mkdir()
    (folder / 'my_text' / 'word_by_word.py').write_text(SYSTEM)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def get_config(**data: object) -> ConfigDict:
    data = {'source': 'synthetic:reverse', 'split': 'train[:500]', 'buckets': (8, 16)} | data
    config = ConfigDict(
        dict(
            seed=0,
            total='1 epoch',
            batch_size=TOKENS,
            model=dict(name='my_text.word_by_word', vocab_size=placeholder(int)),
            task=dict(name='my_text.word_by_word'),
            data=data,
            evals=dict(val=data | {'split': 'train[500:603]'}),
            optim=dict(name='adamw', lr=1e-2),
            step={},
            every=dict(log='4', eval='1 epoch', checkpoint='5'),
            checkpoint=dict(keep_last=2),
            parallel=dict(strategy='jit'),
        )
    )
    return load.override(config, [])


def plan_of(config: ConfigDict) -> BucketBatches:
    return open_dataset(load.section(config, Data), TOKENS).plan.epoch


def one_run(config: ConfigDict, folder: pathlib.Path, **options: object) -> dict[str, float]:
    return train.train(config, folder, devices=jax.devices()[:1], **options)


def result_of(folder: pathlib.Path) -> dict[str, float]:
    return json.loads((folder / 'result.json').read_text())


def variables_of(folder: pathlib.Path) -> dict:
    return checkpointer.load_variables(folder / 'checkpoints', None)[1]


@pytest.fixture(scope='module')
def whole(system: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of one epoch; what it printed is in `printed`."""
    folder = tmp_path_factory.mktemp('whole')
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        one_run(get_config(), folder)
    (folder / 'printed').write_text(printed.getvalue())
    return folder


@pytest.mark.slow
def test_epochs_rates_and_the_size_of_the_vocabulary(whole: pathlib.Path) -> None:
    config = read_config(whole, ['my_text'])
    assert config.model.vocab_size == 14
    steps = plan_of(config).steps
    lines = [m for m in read_metrics(whole) if 'train/loss' in m]
    assert lines[-1]['step'] == steps
    for line in lines:
        assert 'train/images_per_sec' not in line
        ratio = line['train/tokens_per_sec'] / line['train/sentences_per_sec']
        assert 5 <= ratio <= 13, 'digits of a sequence, and its end'
    printed = (whole / 'printed').read_text()
    assert f'500 examples, {steps} steps of {TOKENS} tokens on' in printed
    assert 'tokens/s' in printed


def test_examples_that_are_left_out_are_counted(tmp_path: pathlib.Path) -> None:
    training = build.build(get_config(buckets=(8,)), jax.devices()[:1])
    long = int((training.data.plan.longest > 8).sum())
    assert 0 < long < 500
    fresh = start.ResumePoint(training.program.abstract_state, 0, training.program.hardware)
    described = describe_run(training, tmp_path, fresh)
    assert f'{500 - long} examples, ' in described
    assert mentions(described, long, 'examples', 'ignored')


@pytest.mark.slow
@pytest.mark.long
def test_stopped_and_resumed_is_uninterrupted(tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
    with pytest.raises(train.Preempted):
        one_run(get_config(), tmp_path, stop_at=3)
    assert one_run(get_config(), tmp_path) == result_of(whole)
    jax.tree.map(np.testing.assert_array_equal, variables_of(tmp_path), variables_of(whole))


@pytest.mark.slow
@pytest.mark.long
def test_devices_do_not_show(tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
    eight = train.train(get_config(), tmp_path)
    assert eight == pytest.approx(result_of(whole), rel=1e-5)


def test_rows_that_devices_cannot_share() -> None:
    config = get_config()
    config.step = dict(accum_steps=3)
    message = r'batch_size=512: .*64 .*multiple of 24 \(8 devices x 3'
    with pytest.raises(UserError, match=message):
        build.build(config)


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_buckets(whole: pathlib.Path) -> None:
    losses = []
    for bounds, batch_size in (((5, 6, 7), 40), ((64,), 64)):
        config = get_config()
        config.model.vocab_size = 14
        with config.unlocked():
            config.evals.val.update(buckets=bounds, batch_size=batch_size)
        training = build.build(config)
        found = evaluate.run(training.program.eval_steps, training.evaluations, variables_of(whole))
        losses.append(found['val/loss'])
    assert losses == pytest.approx([result_of(whole)['val/loss']] * 2, rel=1e-5)


# -- a vocabulary ------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: pathlib.Path) -> dict[str, object]:
    return write_text(tmp_path)


def write_text(folder: pathlib.Path) -> dict[str, object]:
    """Pairs of sentences and their vocabulary; the section of a config that reads them."""
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('abcdefgh'), 4)) for _ in range(30)]
    sides = [[' '.join(rng.choice(words, 6)) for _ in range(120)] for _ in range(2)]
    (folder / 'pairs.tsv').write_text('\n'.join(map('\t'.join, zip(*sides, strict=True))))
    vocab = vocabulary.train([*sides[0], *sides[1]], 50, 'bpe')
    (folder / 'v.model').write_bytes(vocab.model)
    return {
        'source': f'text:{folder}/pairs.tsv',
        'split': 'train[:100]',
        'vocab': str(folder / 'v.model'),
        'transforms': 'tokenize(32)',
        'buckets': (16, 32),
        'cache': True,
    }


def text_config(text: dict[str, object]) -> ConfigDict:
    config = get_config(**text)
    with config.unlocked():
        del config.evals.val.vocab  # that of config.data
        config.evals.val.split = 'train[100:]'
    return load.override(config, [])


@pytest.mark.slow
def test_later_commands_need_no_other_vocabulary(tmp_path, text, capsys) -> None:
    result = one_run(text_config(text), tmp_path / 'run')
    vocab = vocabulary.load_vocabulary(text['vocab'])
    pathlib.Path(text['vocab']).unlink()
    run = open_run(tmp_path / 'run', allowed=['my_text'])
    assert run.config.model.vocab_size == len(vocab)
    assert vocabulary.load_vocabulary(run.config.data.vocab) == vocab
    _, _, meta = checkpointer.load_variables(tmp_path / 'run' / 'checkpoints', None)
    assert meta['vocab'] == vocab.digest
    assert train_flops(meta, ['my_text']) > 0
    capsys.readouterr()
    words = ['--workdir', str(tmp_path / 'run'), '--allow', 'my_text', '--json']
    assert main(['evaluate', *words]) == 0
    assert json.loads(capsys.readouterr().out)['val/loss'] == pytest.approx(result['val/loss'])


def translation_config(text: dict[str, object]) -> ConfigDict:
    config = text_config(text)
    model = dict(width=16, depth=1, num_heads=2, mlp_dim=16, vocab_size=placeholder(int))
    entry = dict(config.evals.val, evaluator='bleu', every='3 steps', edges=(5,))
    with config.unlocked():
        config.model = dict(name='seq2seq', **model)
        config.task = dict(name='translate', beams=2, extra_len=2)
        config.evals.bleu = entry
        config.evals.last = dict(config.evals.val, every='')
        config.checkpoint.keep_last = 3
        config.update(total='5 steps', every=dict(log='5', eval='2', checkpoint='1'))
    return load.override(config, [])


@pytest.fixture(scope='module')
def translated(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('translated')
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        text = write_text(folder) | {'buckets': (32,)}
        one_run(translation_config(text), folder / 'run')
    (folder / 'printed').write_text(printed.getvalue())
    return folder / 'run'


@pytest.mark.slow
def test_an_evaluation_may_be_due_at_steps_of_its_own(translated, capsys) -> None:
    lines = read_metrics(translated)
    steps = {
        name: [line['step'] for line in lines if f'{name}/{metric}' in line]
        for name, metric in (('val', 'loss'), ('bleu', 'bleu'), ('last', 'loss'))
    }
    assert steps == {'val': [2, 4, 5], 'bleu': [3, 5], 'last': [5]}
    result = result_of(translated)
    assert result['val/perplexity'] == pytest.approx(np.exp(result['val/loss']))
    assert 0 <= result['bleu/bleu'] == result['bleu/bleu_6_up'] < 100
    signature = 'bleu: nrefs:1|case:lc|eff:no|tok:13a|'
    assert signature in (translated.parent / 'printed').read_text()
    signed = [(m['step'], m['bleu/signature']) for m in lines if 'bleu/signature' in m]
    assert [step for step, _ in signed] == [3, 5]
    assert all(text.startswith(signature.removeprefix('bleu: ')) for _, text in signed)
    capsys.readouterr()
    assert main(['evaluate', '--workdir', str(translated)]) == 0
    printed = capsys.readouterr().out
    assert signature in printed and f'bleu/bleu {result["bleu/bleu"]:.4f}' in printed


@pytest.mark.slow
def test_the_mean_of_the_last_checkpoints(translated) -> None:
    run = open_run(translated, average=2)
    kept = [checkpointer.load_variables(translated / 'checkpoints', step)[1] for step in (4, 5)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *kept)
    jax.tree.map(np.testing.assert_array_equal, run.variables, mean)
    assert run.step == 5
    assert open_run(translated, step=4, average=2).step == 4
    with pytest.raises(UserError, match=r'average of 4 checkpoints: .* has 3 .* 5'):
        open_run(translated, average=4)


def test_text_is_needed_for_bleu() -> None:
    config = get_config()
    with config.unlocked():
        config.task = dict(name='translate')
        config.evals.val.evaluator = 'bleu'
    with pytest.raises(UserError, match=r'config\.evals\.val.*synthetic:reverse.*text'):
        build.build(config)


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_vocabulary(tmp_path, text) -> None:
    with pytest.raises(train.Preempted):
        one_run(text_config(text), tmp_path / 'run', stop_at=1)
    other = vocabulary.train(['another text of other words'] * 9, 20, 'bpe')
    pathlib.Path(text['vocab']).write_bytes(other.model)
    config = text_config(text)
    config.model.vocab_size = 50
    with pytest.raises(UserError, match=r'vocab\.model .*config'):
        one_run(config, tmp_path / 'run')


@pytest.mark.fault(29)
def test_a_model_with_too_few_ids_is_refused(text) -> None:
    config = text_config(text)
    config.model.vocab_size = 49
    with pytest.raises(UserError, match=r'vocab_size=49: .* has 50 ids'):
        build.build(config)


SHORTER = ['total=400 steps', 'data.split=train[:30000]']


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ('changes', 'right'),
    [(['model.depth=1', 'data.buckets=(13,)', 'optim.lr=5e-3', *SHORTER], 0.95), ([], 1.0)],
)
def test_digits_are_learned(tmp_path, repo, changes: list[str], right: float) -> None:
    rarely = ['every.eval=1000', 'every.checkpoint=1000', 'evals.test.buckets=(13,)']
    path = str(repo / 'experiments/translate/synthetic.py:reverse')
    result = one_run(load.load(path, [*rarely, *changes]), tmp_path)
    assert result['test/sequence_accuracy'] >= right
