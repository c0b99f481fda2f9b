"""The best-matching captions of an image."""

import collections
import dataclasses
import itertools

from vit_jax.data.vocabulary import EOS
from vit_jax.viz import base, classify


class Viz(classify.Viz):
    """Bars of the most probable captions, drawn like those of classes."""

    caption = base.Viz.caption

    def add_flags(self, parser):
        super().add_flags(parser)
        parser.add_argument('--captions', metavar='A;B', help='to choose from; else one a class')

    def adapt_task(self, task, context):
        said = context.flags.captions
        texts = said.split(';') if said else [f'a {name}' for name in context.class_names]
        ids = [[*context.vocab.encode(text.strip()).tolist(), EOS] for text in texts]
        padded = zip(*itertools.zip_longest(*ids, fillvalue=0), strict=True)
        return dataclasses.replace(task, prompts=tuple(padded))

    def rows(self, prediction, photo, context):
        if 'choices' not in prediction:  # the task has no prompts
            return []
        probs = collections.Counter()  # captions may repeat in a batch
        for ids, prob in zip(prediction['choices'], prediction['probs'], strict=True):
            probs[context.vocab.decode(ids)] += float(prob)
        best = probs.most_common(context.flags.top)
        return [{'class': text, 'probability': prob} for text, prob in best]
