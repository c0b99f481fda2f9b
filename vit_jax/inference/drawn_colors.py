"""Evaluation of the colors that a run of `coltran` samples, optionally with upsamplers.

Colors are measured on the luminance of the images with the metrics of `colorize`, so that one table
can compare both. It is an evaluator of `coltran`:

    evaluate --workdir CORE --evaluator "vit_jax.inference.drawn_colors(upsamplers=('RUN', 'RUN'))"
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax import step
from vit_jax.array_types import Float, UInt8
from vit_jax.data.records import example_rng
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset, OtherModel
from vit_jax.inference import kept_accuracy
from vit_jax.inference.colorize import check_size, check_task
from vit_jax.inference.images import photo_reader
from vit_jax.inference.load import open_run
from vit_jax.interop.trained import TrainedModel
from vit_jax.ops import colors, fidelity
from vit_jax.runtime import mesh

Images = UInt8[np.ndarray, 'B H W 3']


class Evaluator(base.Evaluator):
    """`psnr` (dB) and `colorfulness` of the first sample, `psnr_of_grey` and `true_colorfulness`,
    and the accuracy of a classifier, see `kept_accuracy`.

    Args:
      upsamplers: Run folders of the task `coltran_upsampler`, in the order of the chain.
      classifier: See `kept_accuracy`; '' for none.
    """

    def __init__(self, upsamplers: Sequence[str] = (), classifier: str = ''):
        runs = [open_run(folder) for folder in upsamplers]
        for run in runs:
            check_task(run, 'coltran_upsampler', 'upsamplers')
        self._chain = [upsampler(run) for run in runs]
        self._kept = kept_accuracy.Evaluator(classifier) if classifier else None
        self.start()

    def read_models(self, read: Callable[[str], OtherModel]) -> None:
        """Read the classifier; raise UserError if it does not predict classes."""
        if self._kept is not None:
            self._kept.read_models(read)

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the classifier has different classes than the data."""
        self._source = dataset.source
        if self._kept is not None:
            self._kept.open(dataset)

    def start(self) -> None:
        self._sums = collections.defaultdict[str, float](float)
        self._seen = 0
        if self._kept is not None:
            self._kept.start()

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Raise UserError if the task has no samples, or the images differ in size."""
        if 'samples' not in predictions:
            raise UserError('drawn_colors measures the samples of the task coltran')
        sampled = predictions['samples'][:, 0]
        truth = kept_accuracy.stack_images(self._source, batch['index'])
        for upsample in self._chain:
            sampled = upsample(truth, sampled)
        image, numbers = _measure(truth, sampled)
        for name, values in numbers.items():
            self._sums[name] += float(values.sum())
        self._seen += len(truth)
        if self._kept is not None:
            self._kept.update({'image': np.asarray(image)}, batch)

    def result(self) -> dict[str, float]:
        accuracies = {} if self._kept is None else self._kept.result()
        return {name: total / max(self._seen, 1) for name, total in self._sums.items()} | accuracies


def upsampler(run: TrainedModel) -> Callable[[Images, Images], Images]:
    """Return a function (images, their coarse colors) -> finer colors.

    It raises UserError if the coarse colors do not have the size that the run takes.
    """
    reader = photo_reader(run)
    predict = mesh.compile_on_default_device(step.make_predict_step(run.model, run.task))

    def upsample(images: Images, coarse: Images) -> Images:
        check_size(run, coarse.shape[1:3], 'the model before it')
        records = [reader.transforms({'image': image}, example_rng(0, 0)) for image in images]
        batch = {
            'image': np.stack([record['image'] for record in records]),
            'coarse': coarse,
            'index': np.arange(len(images), dtype=np.int32),
            'mask': np.ones(len(images), np.float32),
        }
        predictions, _ = predict(run.variables, batch)
        return np.asarray(predictions['image'])

    return upsample


@jax.jit
def _measure(
    truth: UInt8[Array, 'B H W 3'], sampled: UInt8[Array, 'B h w 3']
) -> tuple[UInt8[Array, 'B H W 3'], dict[str, Float[Array, ' B']]]:
    """Combine colors with the images' luminance; return the images and metrics."""
    rgb = truth / jnp.float32(255)
    gray = colors.to_bytes(colors.to_gray(rgb)) / jnp.float32(255)
    ab = colors.rgb_to_lab(sampled / jnp.float32(255))[..., 1:]
    image = colors.colorize(gray, jax.image.resize(ab, (*gray.shape[:3], 2), 'bilinear'))
    return colors.to_bytes(image), {
        'psnr': fidelity.psnr(image, rgb),
        'psnr_of_grey': fidelity.psnr(jnp.broadcast_to(gray, rgb.shape), rgb),
        'colorfulness': fidelity.colorfulness(image),
        'true_colorfulness': fidelity.colorfulness(rgb),
    }
