"""Repositories of the Hugging Face Hub from trained models: weights, and a model card.

The card has the metadata that the Hub reads: library, task, data, and measured metrics as its
model-index.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax import __version__, extras
from vit_jax.errors import Unavailable, UserError
from vit_jax.interop import checkpoint
from vit_jax.interop.trained import TrainedModel
from vit_jax.storage import paths, run_folder, servers

CARD = 'README.md'
OWN, TRANSFORMERS, TIMM, OPEN_CLIP = 'vit_jax', 'transformers', 'timm', 'open_clip'
TASKS = {  # pipeline tags of the Hub
    'caption': 'image-to-text',
    'classify': 'image-classification',
    'classify_text': 'text-classification',
    'colorize': 'image-to-image',
    'coltran': 'image-to-image',
    'coltran_upsampler': 'image-to-image',
    'depth': 'depth-estimation',
    'detect': 'object-detection',
    'distill': 'image-classification',
    'generate': 'unconditional-image-generation',
    'image_to_image': 'image-to-image',
    'meanflow': 'unconditional-image-generation',
    'meanflow_image_to_image': 'image-to-image',
    'segment': 'image-segmentation',
    'segment_panoptic': 'image-segmentation',
    'siglip': 'zero-shot-image-classification',
    'translate': 'translation',
}
FEATURES = 'image-feature-extraction'  # of other tasks
DATASETS = {  # names on the Hub of data of TFDS
    'cifar10': 'uoft-cs/cifar10',
    'cifar100': 'uoft-cs/cifar100',
    'imagenet2012': 'ILSVRC/imagenet-1k',
    'mnist': 'ylecun/mnist',
    'oxford_iiit_pet': 'timm/oxford-iiit-pet',
}
USE = {
    OWN: """import vit_jax
from huggingface_hub import snapshot_download

model, variables = vit_jax.load(snapshot_download('{repo}'))""",
    TRANSFORMERS: """import transformers

model = transformers.AutoModel.from_pretrained('{repo}')""",
    TIMM: """import timm

model = timm.create_model('hf_hub:{repo}', pretrained=True)""",
    OPEN_CLIP: """import open_clip

model, preprocess = open_clip.create_model_from_pretrained('hf-hub:{repo}')""",
}
LOAD = """import vit_jax

model, variables = vit_jax.load('hf://{repo}')"""


def check_repository(name: str) -> None:
    """Raise UserError unless a repository is named ORG/NAME, as the Hub allows."""
    with extras.needed_by(f'push {name}', 'hub'):
        from huggingface_hub import errors, utils
    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise UserError(f'{name!r}: {paths.first_line(error)}') from None
    if name.count('/') != 1:
        raise UserError(f'{name!r}: name the repository as ORG/NAME')


def write_repository(
    trained: TrainedModel, folder: pathlib.Path, name: str, *, measured: bool = True
) -> tuple[str, ...]:
    """Write the files of a repository.

    Weights are written for transformers, timm, OpenCLIP or the authors' code, whichever has such a
    model; other runs keep their own form, with the checkpoint of this step.

    Args:
      trained: Model.
      folder: Folder to write, which must not exist.
      name: ORG/NAME of the repository.
      measured: Whether the run's evaluations apply to this model, as to no other average.

    Returns:
      Notes on what the files cannot represent.

    Raises:
      UserError: if the model has no such form and is not a run, or files cannot be written.
    """
    try:
        notes = checkpoint.write(trained, os.fspath(folder))
    except UserError as error:
        if trained.step is None:
            raise
        shutil.rmtree(folder, ignore_errors=True)
        _copy_run(trained, folder)
        notes = (f'written as a run of vit_jax: {error}',)
    results = read_results(trained) if measured else {}
    card = make_card(trained, name, _library(folder), results)
    paths.write_text_atomic(folder / CARD, card)
    return notes


def _copy_run(trained: TrainedModel, folder: pathlib.Path) -> None:
    """Copy a run with one checkpoint; its config is read without secrets."""
    run = paths.path(trained.path)
    step = f'{run_folder.CHECKPOINTS}/{trained.step}'
    for file in paths.files(run / step):
        target = folder / step / file
        target.parent.mkdir(parents=True, exist_ok=True)
        with (run / step / file).open('rb') as stored, target.open('wb') as copy:
            shutil.copyfileobj(stored, copy)
    config = run_folder.read_config(run)
    paths.write_text_atomic(folder / run_folder.CONFIG, json.dumps(config, indent=2))
    for path in run.iterdir():
        if path.name == run_folder.VOCAB or run_folder.KEPT_FILE.fullmatch(path.name):
            (folder / path.name).write_bytes(paths.read_bytes(path))


def _library(folder: pathlib.Path) -> str:
    """Return the library that reads the files."""
    if (folder / run_folder.CHECKPOINTS).is_dir():
        return OWN
    if (folder / 'open_clip_config.json').is_file():
        return OPEN_CLIP
    config = paths.parse_json((paths.read_text(folder / 'config.json')) or '{}')
    return TRANSFORMERS if 'model_type' in config else TIMM if 'architecture' in config else OWN


def read_results(trained: TrainedModel) -> dict[str, float]:
    """Return the run's evaluations at the step of the model, {'EVALUATION/METRIC': value}."""
    if trained.step is None:
        return {}
    results: dict[str, float] = {}
    for row in run_folder.read_metrics(paths.path(trained.path)):
        if row.get('step') == trained.step:
            results |= {
                key: value
                for key, value in row.items()
                if key.partition('/')[0] in trained.settings.evals and isinstance(value, float)
            }
    return results


def make_card(trained: TrainedModel, name: str, library: str, results: Mapping[str, float]) -> str:
    """Return the model card of a repository.

    Args:
      trained: Model.
      name: ORG/NAME of the repository.
      library: Library that reads its files.
      results: Measured metrics, see `read_results`.
    """
    from huggingface_hub import ModelCardData

    task = TASKS.get(str(trained.settings.task.name), FEATURES)
    sources = _sources(trained)
    data = ModelCardData(
        library_name=library,
        pipeline_tag=task,
        tags=['vit_jax', 'jax', str(trained.settings.model.name)],
        datasets=sorted({hub for source in sources if (hub := _dataset(source))}) or None,
        metrics=sorted({key.rpartition('/')[2] for key in results}) or None,
        model_name=name.partition('/')[2],
        eval_results=_eval_results(trained, task, results) or None,
    )
    return f'---\n{data.to_yaml()}\n---\n\n{_text(trained, name, library, results)}'


def _sources(trained: TrainedModel) -> list[str]:
    entries = [trained.settings.data, *trained.settings.evals.values()]
    return list(dict.fromkeys(str(entry.source) for entry in entries if entry.source))


def _dataset(source: str) -> str:
    """Return the name on the Hub of a source's data; empty if it is not known to be there."""
    kind, _, place = source.partition(':')
    if kind == 'hf' and place.count('/') >= 1 and not place.startswith(('/', '.', '~')):
        return '/'.join(place.split('/')[:2])
    return DATASETS.get(place.partition('/')[0].partition(':')[0], '') if kind == 'tfds' else ''


def _eval_results(trained: TrainedModel, task: str, results: Mapping[str, float]) -> list[Any]:
    from huggingface_hub import EvalResult

    rows = []
    for key, value in results.items():
        evaluation, _, metric = key.partition('/')
        entry = trained.settings.evals[evaluation]
        rows.append(
            EvalResult(
                task_type=task,
                dataset_type=_dataset(str(entry.source)) or str(entry.source),
                dataset_name=str(entry.source),
                dataset_split=str(entry.split),
                metric_type=metric,
                metric_name=key,
                metric_value=value,
            )
        )
    return rows


def _text(trained: TrainedModel, name: str, library: str, results: Mapping[str, float]) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
    size = ''
    if trained.image_size:
        size = ' for images of {1} x {0} pixels'.format(*trained.image_size)
    steps = '' if trained.step is None else f', {trained.step:,} steps'
    uses = [USE[library]] if library == OWN else [USE[library], LOAD]
    blocks = [f'```python\n{text.format(repo=name)}\n```' for text in uses]
    parts = [
        f'# {name.partition("/")[2]}',
        f'A `{trained.settings.model.name}` with {count:,} parameters{size}, from vit_jax '
        f'{__version__} (task `{trained.settings.task.name}`{steps}).',
        '## Use',
        *blocks,
    ]
    if sources := _sources(trained):
        parts += ['## Data', '\n'.join(f'- `{source}`' for source in sources)]
    if results:
        rows = [f'| {key} | {value:.4f} |' for key, value in results.items()]
        parts += ['## Evaluation', '\n'.join(['| metric | value |', '|---|---|', *rows])]
    return '\n\n'.join(parts) + '\n'


def upload(folder: pathlib.Path, name: str, *, private: bool = False) -> str:
    """Create the repository unless it exists, and commit the files of a folder.

    Returns:
      Address of the commit.

    Raises:
      UserError: without a valid login, or the right to write.
    """
    import huggingface_hub as hub
    from huggingface_hub import utils

    utils.disable_progress_bars()
    api = hub.HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=f'Upload by vit_jax {__version__}'
        )
    except Exception as error:
        raise _explain(name, error) from error
    return str(commit.commit_url)


def _explain(name: str, error: Exception) -> UserError:
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    reason = paths.first_line(error)
    if status == 401:
        return UserError(
            f'{name}: the Hub does not accept the login: use hf auth login, or set HF_TOKEN to a '
            'token with the right to write'
        )
    if status in (403, 404):
        return UserError(f'{name}: the token has no right to write there ({reason})')
    if servers.is_network_error(error):
        return Unavailable(f'{name}: cannot be uploaded ({reason}); run the command again')
    return UserError(f'{name}: the Hub rejects the upload ({reason})')
