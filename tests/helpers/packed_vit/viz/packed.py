"""Classes of image files, each a row of its own."""

from vit_jax.viz import classify


class Viz(classify.Viz):
    """Show the first image of a row as for any classifier."""

    def rows(self, prediction, photo, context):
        return super().rows({'probs': prediction['probs'][0]}, photo, context)

    def caption(self, fields, context):
        return super().caption({'label': fields['label'][0, ...]}, context)
