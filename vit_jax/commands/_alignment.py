"""`attention` of a run that translates: a map between the words of two sentences."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vit_jax.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that sentences have and images have not."""
    parser.add_argument('--head', type=int, help='one head of the layer; their mean by default')
    parser.add_argument(
        '--self',
        action='store_true',
        dest='of_source',
        help="the encoder's attention of the source to itself",
    )


def draw(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """The picture, and a line about it.

    Args:
      run: a trained encoder-decoder.
      args: `inputs`: a source, and a target unless it is to be the model's own translation.

    Raises:
      UserError: if the run does not translate text, or the sentences do not fit it.
    """
    from vit_jax.inference import text as text_lib
    from vit_jax.viz import alignment

    reader = text_lib.reader(run)
    source = read(reader, args.inputs[0], 'source')
    if len(args.inputs) > 1:
        target = read(reader, args.inputs[1], 'target')
    else:
        target = own_translation(run, reader, source)
    weights = look(run, source, target, args.of_source)
    chosen, words = alignment.choose(weights, args.layer, args.head)
    name, kind, rows = ('target', 'attention', target)
    if args.of_source:
        name, kind, rows = ('source', 'self-attention', source)
    figure = alignment.draw(
        chosen,
        reader.vocab.pieces(rows),
        reader.vocab.pieces(source),
        names=(name, 'source'),
        title=f'{run.config.model.name}: {kind}, {words}',
    )
    depth, heads = weights.shape[:2]
    line = f'{depth} layers x {heads} heads, {len(chosen)} x {len(source)} tokens'
    return figure, line if args.of_source else f'{line}; {reader.vocab.decode(target)}'


def read(reader: Any, sentence: str, side: str) -> np.ndarray:
    """The ids [n] of one sentence."""
    ids, cut = reader.read(sentence, side)
    if not len(ids):
        raise UserError(f'the {side} sentence is empty')
    if cut:
        raise UserError(
            f'the {side} sentence is longer than the {len(ids) - 1} tokens that the model has '
            f'seen: leave out {cut!r}'
        )
    return ids


def own_translation(run: Any, reader: Any, source: np.ndarray) -> np.ndarray:
    """What the run itself writes, by the search of its task."""
    import numpy as np

    from vit_jax.inference import text as text_lib
    from vit_jax.ops.search import Search

    search = getattr(run.task, 'decoding', Search())
    translate = text_lib.Translator(run, reader, search)
    (found,) = translate([text_lib.Sentence(source, '')])
    return np.array(found[0].tokens, np.int32)


def look(run: Any, source: np.ndarray, target: np.ndarray, of_source: bool) -> np.ndarray:
    """The weights [L H N M]: those of target to source, or of source to source.

    Raises:
      UserError: if the model has no such attention.
    """
    import jax
    import numpy as np

    from vit_jax.ops.decoding import BOS
    from vit_jax.viz import attention

    target_in = np.append(np.int32(BOS), target[:-1])

    @jax.jit
    def apply(variables: Any, source: Any, target_in: Any) -> Any:
        return run.model.apply(variables, source, target_in, mutable=['intermediates'])

    _, sown = apply(run.variables, source[None], target_in[None])
    place = ('encoder', 'attention') if of_source else ('decoder', 'cross')
    return attention.stack_weights(sown['intermediates'], *place)[:, 0]
