"""Visualization of translation: pairs of sentences, and the attention between their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.nn.maps import AttentionMap
from vit_jax.viz import attention_pictures, base
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Viz(base.Viz):
    """Show pairs of sentences; predictions come from the command `translate`, not `predict`."""

    def texts(self, prediction: Fields, fields: Fields, context: Context) -> dict[str, str]:
        """Return both sentences of the data, and the model's translation of the source."""
        assert context.vocab is not None
        return {**context.texts(fields), 'prediction': context.vocab.decode(prediction['tokens'])}

    def draw_attention(
        self,
        example: Photo | Fields,
        outputs: Mapping[str, Any],
        maps: Sequence[AttentionMap],
        context: Context,
    ) -> Figure:
        """Draw the attention between the words of two sentences."""
        assert context.vocab is not None and not isinstance(example, Photo)
        source, target = example['source'], example['target']
        figure, _ = attention_pictures.draw_between_sentences(
            source, target, maps, context.vocab, context.model
        )
        return figure
