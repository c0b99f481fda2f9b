"""Beam search of the Transformer on this CPU, beside that of transformers in the same run.

    python tests/bench/decode.py --model base --beams 4 --rounds 5 --threads 2 --json decode.json

Float32, random weights, which are the same on both sides: `MarianMTModel.generate` has those of our
model. Source sentences of different lengths are encoded and decoded, both counted; eos is forbidden
to both, so that every hypothesis has the same number of tokens and no rule to stop or to normalize
scores takes part. The share of equal tokens says whether both have done the same search; where two
tokens are almost equally probable, rounding decides. The sides have a process each and take turns.

`--model tiny --vocab-size 50 --length 6 --rounds 1` checks the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cpu import PACKAGES, machine, measure, start

from vit_jax.runtime import environment

OURS, THEIRS = 'vit_jax', 'transformers'
PAD, BOS, EOS = 0, 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='base')
    parser.add_argument('--vocab-size', type=int, default=8000)
    parser.add_argument('--batch-size', type=int, default=16)
    parser.add_argument('--source', type=int, default=24, help='tokens of the longest source')
    parser.add_argument('--length', type=int, default=32, help='tokens to decode')
    parser.add_argument('--beams', type=int, default=4)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    args = parser.parse_args()
    # XLA makes as many threads as there are processors that it may use: before jax is imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    with tempfile.TemporaryDirectory() as folder:
        args.folder = pathlib.Path(folder)
        steps = {
            **start(args, torch_steps, {}),
            **start(args, jax_steps, {environment.MALLOC_VARIABLE: environment.MALLOC_TUNABLES}),
        }
        seconds = measure(steps, args.rounds)
        result = record(args, seconds)
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + '\n')


def make_model(args):
    """The model, with what Marian fixes as Marian has it, and its parameters."""
    import jax
    import jax.numpy as jnp

    from vit_jax.models import seq2seq

    jax.config.update('jax_platforms', 'cpu')
    shape = {**seq2seq.variant(args.model), 'positions': 'concatenated', 'norm_eps': 1e-5}
    model = seq2seq.Model(args.vocab_size, **shape)
    tokens = jnp.ones((1, 2), jnp.int32)
    return model, jax.jit(model.init)(jax.random.key(0), tokens, tokens)['params']


def random_source(args):
    """Token ids [B S] with eos at the end, then padding."""
    import numpy as np

    rng = np.random.default_rng(0)
    source = rng.integers(EOS + 2, args.vocab_size, (args.batch_size, args.source))
    lengths = rng.integers(args.source // 2, args.source + 1, (args.batch_size, 1))
    place = np.arange(args.source)
    source = np.where(place < lengths - 1, source, np.where(place == lengths - 1, EOS, PAD))
    return source.astype(np.int32)


def jax_steps(args) -> dict[str, Callable[[], None]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vit_jax.ops import search

    (model, params), source = make_model(args), random_source(args)

    @jax.jit
    def translate(params, source):
        def call(method, *inputs):
            return model.apply({'params': params}, *inputs, method=method)

        def step(cache, tokens, position):
            logits, cache = call('decode_step', cache, tokens, position)
            return logits.at[:, EOS].set(-jnp.inf), cache

        cache = call('init_cache', call('encode', source), args.length)
        return search.beam_search(
            step, cache, beams=args.beams, max_len=args.length, alpha=0.0, bos=BOS, eos=EOS
        )

    def run() -> None:
        np.save(args.folder / OURS, np.asarray(translate(params, source).tokens[:, 0]))

    return {OURS: run}


def torch_steps(args) -> dict[str, Callable[[], None]]:
    import numpy as np
    import torch
    import transformers
    from helpers import marian

    torch.set_num_threads(args.threads)
    (ours, params), source = make_model(args), random_source(args)
    config = transformers.MarianConfig(
        vocab_size=args.vocab_size,
        d_model=ours.width,
        encoder_layers=ours.depth,
        decoder_layers=ours.depth,
        encoder_attention_heads=ours.num_heads,
        decoder_attention_heads=ours.num_heads,
        encoder_ffn_dim=ours.mlp_dim,
        decoder_ffn_dim=ours.mlp_dim,
        max_position_embeddings=max(args.source, args.length) + 1,
        activation_function='relu',
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    model = transformers.MarianMTModel(config).eval()
    missing = model.load_state_dict(marian.state(params), strict=False)
    assert not missing.unexpected_keys, missing
    ids = torch.from_numpy(source).long()
    options = {'max_new_tokens': args.length, 'min_new_tokens': args.length, 'length_penalty': 0.0}

    def run() -> None:
        with torch.inference_mode():
            tokens = model.generate(
                ids, attention_mask=ids != PAD, num_beams=args.beams, do_sample=False, **options
            )
        np.save(args.folder / THEIRS, tokens[:, 1:].numpy())

    return {THEIRS: run}


def record(args, seconds: dict[str, list[float]]) -> dict:
    import numpy as np

    ours, theirs = (np.load(args.folder / f'{name}.npy') for name in (OURS, THEIRS))
    names = ('model', 'vocab_size', 'batch_size', 'source', 'length', 'beams', 'threads')
    return {
        **{name: getattr(args, name) for name in names},
        'seconds': seconds,
        'tokens_per_second': {
            name: args.batch_size * args.length / statistics.median(times)
            for name, times in seconds.items()
        },
        'equal_tokens': float((ours == theirs).mean()),
        **machine(PACKAGES),
    }


def print_table(result: dict) -> None:
    print(f'{"":20}{"median s":>10}{"min":>8}{"max":>8}{"tokens/s":>10}')
    for name, times in result['seconds'].items():
        row = f'{statistics.median(times):10.3f}{min(times):8.3f}{max(times):8.3f}'
        print(f'{name:20}{row}{result["tokens_per_second"][name]:10.0f}')
    speed = result['tokens_per_second']
    print(f'{speed[OURS] / speed[THEIRS]:.2f} times the tokens a second of {THEIRS}')
    print(f'{100 * result["equal_tokens"]:.1f} % of the tokens are equal')
    print(f'load of the machine in the last minute: {result["load"][0]:.1f}')


if __name__ == '__main__':
    main()
