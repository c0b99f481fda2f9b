"""Accuracy of ImageNet classifiers on ImageNet's robustness sets, and the mean corruption error.

The sets are found in a folder, under the names of their authors' archives, or among the prepared
data sets of TFDS.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax.config import schema
from vit_jax.config.run import Evaluation
from vit_jax.config.schema import to_group
from vit_jax.data import numbering
from vit_jax.data.sources import tfds
from vit_jax.errors import UserError
from vit_jax.interop import preprocessing
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.runtime import mesh, sharding
from vit_jax.trainer import evaluate
from vit_jax.trainer.evaluations import open_evals
from vit_jax.trainer.program import compile_steps

TFDS = 'tfds'
IMAGENET, REAL, CORRUPTED = 'ImageNet', 'ImageNet-ReaL', 'ImageNet-C'
LABELS = 'real.json'  # of ReaL
VALIDATION = ('val', 'validation', 'imagenet-val')
FOLDERS = {
    IMAGENET: VALIDATION,
    'ImageNet-V2 matched-frequency': ('imagenetv2-matched-frequency-format-val',),
    'ImageNet-V2 threshold-0.7': ('imagenetv2-threshold0.7-format-val',),
    'ImageNet-V2 top-images': ('imagenetv2-top-images-format-val',),
    'ImageNet-A': ('imagenet-a',),
    'ImageNet-R': ('imagenet-r',),
    'ImageNet-Sketch': ('imagenet-sketch', 'sketch'),
}
PREPARED = {  # names and splits of TFDS
    IMAGENET: ('imagenet2012', 'validation'),
    REAL: ('imagenet2012_real', 'validation'),
    'ImageNet-V2 matched-frequency': ('imagenet_v2/matched-frequency', 'test'),
    'ImageNet-V2 threshold-0.7': ('imagenet_v2/threshold-0.7', 'test'),
    'ImageNet-V2 top-images': ('imagenet_v2/topimages', 'test'),
    'ImageNet-A': ('imagenet_a', 'test'),
    'ImageNet-R': ('imagenet_r', 'test'),
    'ImageNet-Sketch': ('imagenet_sketch', 'test'),
}
# Top-1 errors of AlexNet, averaged over the severities (github.com/hendrycks/robustness).
ALEXNET_ERRORS = {
    'gaussian_noise': 0.886428,
    'shot_noise': 0.894468,
    'impulse_noise': 0.922640,
    'defocus_blur': 0.819880,
    'glass_blur': 0.826268,
    'motion_blur': 0.785948,
    'zoom_blur': 0.798360,
    'snow': 0.866816,
    'frost': 0.826572,
    'fog': 0.819324,
    'brightness': 0.564592,
    'contrast': 0.853204,
    'elastic_transform': 0.646056,
    'pixelate': 0.717840,
    'jpeg_compression': 0.606500,
}
SEVERITIES = range(1, 6)
CORRUPTED_SIDE = 224  # pixels of ImageNet-C, which is resized and cropped already
CLASSES = 1000
FIRST_CLASS = 'tench'


@dataclasses.dataclass(frozen=True)
class TestSet:
    """Images to evaluate on.

    Attributes:
      name: Name of the set, such as 'ImageNet-A'.
      source, split: Where its images are, see `config.data`.
      corruption: Of ImageNet-C, such as 'fog'; else empty.
      severity: Of ImageNet-C, from 1; else 0.
      labels: File of ReaL's labels; empty for the classes of the source.
    """

    name: str
    source: str
    split: str
    corruption: str = ''
    severity: int = 0
    labels: str = ''

    @property
    def is_numbered(self) -> bool:
        """Whether its classes have numbers in ImageNet's order instead of WordNet ids."""
        return self.name == REAL or 'V2' in self.name


def find_sets(place: str) -> list[TestSet]:
    """Find the sets in a folder, or in TFDS if `place` is 'tfds'.

    Raises:
      UserError: if the folder does not exist, or there is none.
    """
    sets = _find_prepared() if place == TFDS else _find_folders(pathlib.Path(place).expanduser())
    if not sets:
        names = ', '.join([*(names[0] for names in FOLDERS.values()), 'imagenet-c/fog/1'])
        looked = f'in {tfds.data_dir()}' if place == TFDS else f'{place}: expected folders {names}'
        raise UserError(f"none of ImageNet's robustness sets is {looked}")
    return sets


def _find_folders(root: pathlib.Path) -> list[TestSet]:
    if not root.is_dir():
        raise UserError(f'{root}: this folder does not exist')
    folders = {_simplify(child.name): child for child in sorted(root.iterdir()) if child.is_dir()}
    sets = []
    for name, choices in FOLDERS.items():
        if folder := next((folders[text] for text in choices if text in folders), None):
            sets.append(TestSet(name, f'folder:{folder}', 'train'))
            if name == IMAGENET and (root / LABELS).is_file():
                labels = str((root / LABELS).absolute())
                sets.append(TestSet(REAL, f'folder:{folder}', 'train', labels=labels))
    corrupted = folders.get('imagenet-c', root)
    for corruption in ALEXNET_ERRORS:  # some archives have groups, such as noise/gaussian_noise
        paths = (corrupted / corruption, *sorted(corrupted.glob(f'*/{corruption}')))
        if folder := next((path for path in paths if path.is_dir()), None):
            sets += [
                TestSet(
                    CORRUPTED, f'folder:{folder / str(severity)}', 'train', corruption, severity
                )
                for severity in SEVERITIES
                if (folder / str(severity)).is_dir()
            ]
    return sets


def _simplify(name: str) -> str:
    return name.lower().replace('_', '-')


def _find_prepared() -> list[TestSet]:
    sets = [TestSet(name, f'tfds:{path}', split) for name, (path, split) in PREPARED.items()]
    sets += [
        TestSet(
            CORRUPTED,
            f'tfds:imagenet2012_corrupted/{corruption}_{severity}',
            'validation',
            corruption,
            severity,
        )
        for corruption in ALEXNET_ERRORS
        for severity in SEVERITIES
    ]
    return [test_set for test_set in sets if _is_prepared(test_set.source.partition(':')[2])]


def _is_prepared(name: str) -> bool:
    try:
        tfds.find_prepared(name)
    except UserError:
        return False
    return True


def with_wordnet_ids(trained: TrainedModel) -> TrainedModel:
    """Return a classifier whose classes are named by WordNet ids.

    Args:
      trained: Classifier with WordNet ids, or with 1,000 classes in ImageNet's order.

    Raises:
      UserError: if its classes are not ImageNet's.
    """
    count = trained.settings.model.options.get('num_classes') or 0
    names = trained.class_names
    if not count:
        raise UserError(
            f'{trained.path} has no classes; for images with texts give evaluate '
            "--source folder:PATH --split train --evaluator 'zero_shot(names=FILE)'"
        )
    if names and all(map(numbering.WORDNET_ID.fullmatch, names)):
        return trained
    if count != CLASSES:
        raise UserError(f"{trained.path} has {count:,} classes, which are not ImageNet's 1,000")
    is_named = names and names != tuple(map(str, range(count)))
    if is_named and FIRST_CLASS not in names[0].lower() and not names[0].startswith('LABEL_'):
        raise UserError(
            f"{trained.path}: class 0 is {names[0]!r}, but {FIRST_CLASS!r} in ImageNet's order"
        )
    return dataclasses.replace(trained, num_classes=count, class_names=imagenet_ids(), class_ids=())


def imagenet_ids() -> tuple[str, ...]:
    """Return ImageNet's WordNet ids in order, from a list in TFDS."""
    import tensorflow_datasets

    path = tensorflow_datasets.core.tfds_path('image_classification/imagenet_resized_labels.txt')
    return tuple(sorted(path.read_text().split()))


def measure(
    trained: TrainedModel,
    sets: Sequence[TestSet],
    *,
    batch_size: int | None = None,
    image_size: Size | None = None,
) -> Iterator[dict[str, Any]]:
    """Evaluate a classifier on each set.

    Args:
      trained: Model, ready for images of `image_size`.
      sets: See `find_sets`.
      batch_size: Examples per batch, over all devices; the model's by default.
      image_size: Images of this height and width, see `interop.preprocessing.change_size`.

    Yields:
      A row for each set: `set`, `corruption`, `severity`, `classes`, `images` and `accuracy`.

    Raises:
      UserError: if the model or a set is not suitable.
    """
    trained = with_wordnet_ids(trained)
    if trained.channels != 3:
        raise UserError(f'{trained.path} takes images of {trained.channels} channels, not 3')
    numbered = next((test_set.name for test_set in sets if test_set.is_numbered), None)
    if numbered and list(trained.class_names) != sorted(trained.class_names):
        raise UserError(
            f"{trained.path}: its classes are not in ImageNet's order, by which {numbered} numbers "
            'them; leave this set out'
        )
    layout = sharding.make_layout(mesh.usable_devices())
    steps = compile_steps(trained.model, trained.task, layout, trained.settings.seed)
    variables = layout.create(lambda loaded: loaded, trained.variables)
    for test_set in sets:
        entry = _entry(trained, test_set, batch_size, image_size)
        named = trained.with_groups(evals={'set': to_group(entry)})
        [evaluation] = open_evals(named.settings, layout, steps, trained).values()
        results = evaluate.run(steps, {test_set.name: evaluation}, variables)
        labels = getattr(evaluation.evaluator, 'classes', None)
        yield {
            'set': test_set.name,
            'corruption': test_set.corruption,
            'severity': test_set.severity or None,
            'classes': CLASSES if labels is None else len(labels),
            'images': len(evaluation.data.source),
            'accuracy': next(iter(results.values()), math.nan),
        }


def _entry(
    trained: TrainedModel, test_set: TestSet, batch_size: int | None, image_size: Size | None
) -> Evaluation:
    """Return the evaluation of a set, on images prepared as the model's."""
    shared = {field: to_group(trained.data)[field] for field in ('transforms', 'workers')}
    if image_size is not None:
        shared['transforms'] = preprocessing.change_size(shared['transforms'], image_size)
    if test_set.corruption:
        shared['transforms'] = without_crop(shared['transforms'])
    evaluator = {'evaluator': 'real' if test_set.name == REAL else 'subset_accuracy'}
    labels = {'labels': test_set.labels} if test_set.labels else {}
    data = {'source': test_set.source, 'split': test_set.split, 'batch_size': batch_size}
    keys = {**shared, **data, **evaluator, **labels}
    return schema.make_section(Evaluation, keys, f'config.evals.{test_set.name}', True)


def without_crop(transforms: str) -> str:
    """Adapt transforms to ImageNet-C, whose images of 224 x 224 pixels are cropped already.

    Images of another size are resized as a whole.
    """
    recipe = preprocessing.parse_recipe(transforms)
    size = recipe.output_size if recipe else None
    if recipe is None or size is None:
        return transforms
    if size == (CORRUPTED_SIDE, CORRUPTED_SIDE):
        return recipe._replace(size=None, crop=size).text
    return recipe._replace(size=size, crop=None, fit='').text


def corruption_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the corruption errors: the sum of a model's errors over the five severities, divided
    by AlexNet's (Hendrycks and Dietterich, 2019, arXiv:1903.12261, section 4).

    Returns:
      The error of each corruption with all severities, and `mCE`, their mean, if none is missing.
    """
    errors: dict[str, dict[int, float]] = {}
    for row in rows:
        if row['corruption']:
            errors.setdefault(row['corruption'], {})[row['severity']] = 1 - row['accuracy']
    complete = {
        name: sum(by_severity.values()) / (len(SEVERITIES) * ALEXNET_ERRORS[name])
        for name, by_severity in errors.items()
        if len(by_severity) == len(SEVERITIES)
    }
    if complete.keys() != ALEXNET_ERRORS.keys():
        return complete
    return complete | {'mCE': sum(complete.values()) / len(complete)}
