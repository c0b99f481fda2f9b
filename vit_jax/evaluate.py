"""The one evaluation loop: padded batches, masked sums, every example exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import sharding
from vit_jax.data import pipeline, sources, transforms

PyTree = Any
WHAT = ('source', 'split', 'classes', 'transforms')


def open_data(section: ConfigDict) -> tuple[Any, Any]:
    """The source and the transforms of a data section of the config."""
    parsed = transforms.parse_transforms(section.get('transforms', ''))
    source = sources.open_source(section.source, section.split)
    return source.only_classes(section.classes) if 'classes' in section else source, parsed


def image_format(source: Any) -> dict[str, Any]:
    """What raw images of a source are like: {channels, size: [H, W] or None where it varies}.

    Stored with the checkpoints, so that a trained model reads new images without its data.
    """
    records = [source[i] for i in (0, len(source) // 2, len(source) - 1)]
    if any('image' not in record for record in records):
        return {}
    shapes = {record['image'].shape for record in records}
    height, width, channels = next(iter(shapes))
    return {'channels': channels, 'size': [height, width] if len(shapes) == 1 else None}


def loading(section: ConfigDict) -> dict[str, Any]:
    """What of a data section goes to the pipeline: how to load, not what."""
    chosen = config_lib.keywords(section)
    return {k: v for k, v in chosen.items() if k not in WHAT}


def open_evals(config: ConfigDict, layout: sharding.Layout) -> dict[str, Callable[[], Iterable]]:
    """For every entry of `config.evals` a function that starts one pass over it."""
    return {name: _passes(section, config, layout) for name, section in config.evals.items()}


def _passes(section: ConfigDict, config: ConfigDict, layout: sharding.Layout) -> Callable:
    source, parsed = open_data(section)
    options = loading(section)
    unit = math.lcm(layout.num_shards, jax.process_count())
    # Padding is masked, so that any multiple of the devices gives the same result.
    wanted = options.pop('batch_size', config.batch_size)
    size = math.ceil(min(wanted, len(source)) / unit) * unit

    def one_pass() -> Iterable[dict[str, np.ndarray]]:
        return pipeline.eval_batches(
            source,
            parsed,
            batch_size=size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            **options,
        )

    return one_pass


def evaluate(
    eval_step: Callable,
    layout: sharding.Layout,
    variables: PyTree,
    batches: Iterable[dict[str, np.ndarray]],
) -> dict[str, float]:
    """Means over one pass: {name: sum / count}, accumulated in float64 on the host."""
    totals: dict[str, np.ndarray] = {}
    waiting: list[Any] = []

    def collect(keep: int) -> None:
        while len(waiting) > keep:
            for name, pair in jax.device_get(waiting.pop(0)).items():
                totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)

    for batch in batches:
        waiting.append(eval_step(variables, layout.put_batch(batch)))
        collect(keep=2)  # a bounded number of batches in flight
    collect(keep=0)
    return {name: float(total / count) for name, (total, count) in totals.items()}
