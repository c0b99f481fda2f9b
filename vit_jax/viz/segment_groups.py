"""Visualization of instance segmentation with a sigmoid for each class."""

from vit_jax.viz import detect_groups, segment


class Viz(segment.Viz):
    """Show instances in colors."""

    threshold = detect_groups.Viz.threshold
    weighted = False
    noun = 'object'
    adapt_task = detect_groups.Viz.adapt_task
    class_probs = detect_groups.Viz.class_probs
