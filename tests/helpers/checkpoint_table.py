"""The table of families of docs/checkpoint_families.md, made from the lists that the tests read.

    make checkpoints

reads every small model of `timm_forms` and `transformers_forms` and measures how far its outputs
are from those of the other code. `tests/interop/test_checkpoint_table.py` compares the names.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helpers import (
    timm_forms,
    transformers_clip,
    transformers_forms,
    transformers_naflex,
    transformers_texts,
)
from helpers.transformers_vit import apply, normalized
from vit_jax import interop
from vit_jax.interop import files
from vit_jax.models.vit import Model

# What is resized, unless it is the positions.
RESIZED = {
    **{'DINOv3': 'as it is', 'BEiT': 'biases', 'Data2Vec': 'positions, biases'},
    'SigLIP 2 NaFlex': 'in the model',
    **dict.fromkeys((family for family, *_ in transformers_texts.FORMS), 'no images'),
}
_NAFLEX = ('transformers', 'SigLIP 2 NaFlex')
# Of both towers, by the beginning of the class's name.
_WHOLE = {'CLIP': 'CLIP, both towers', 'MetaClip2': 'MetaCLIP 2, both towers'}
_BEGIN, _END = '<!-- families -->', '<!-- end of families -->'


def rows() -> dict[tuple[str, str], list[str]]:
    """Names of architectures or classes by code base and family, as in the tests' lists."""
    found: dict[tuple[str, str], list[str]] = {}
    for family, name, _ in timm_forms.FORMS:
        found.setdefault(('timm', family), []).append(name)
    for form in transformers_forms.FORMS:
        label = form.model + (f' (`:{form.tower}`)' if form.tower else '')
        names = found.setdefault(('transformers', form.family), [])
        names += [] if label in names else [label]
    for family, name, _ in transformers_texts.FORMS:
        names = found.setdefault(('transformers', family), [])
        names += [] if name in names else [name]
    found |= {('transformers', family): [f'{name}Model'] for name, family in _WHOLE.items()}
    return found | {_NAFLEX: ['Siglip2Model']}


def text() -> str:
    """The table."""
    worst: dict[tuple[str, str], float] = {}
    for key, error in errors():
        worst[key] = max(error, worst.get(key, 0.0))
    head = '| code base | family | tested as | written | resized | largest error |'
    lines = [head, '|' + '---|' * 6]
    for (base, family), names in rows().items():
        resized = RESIZED.get(family, 'positions')
        error = f'{worst[base, family]:.0e}'
        cells = (base, family, ', '.join(names), written(base, family), resized, error)
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def written(base: str, family: str) -> str:
    """Whether the tests write the family for its code base, and if not as itself, as which one."""
    if base == 'timm':
        return 'yes' if family in timm_forms.WRITTEN else 'no'
    if family == 'SigLIP 2, texts':
        return 'as SigLIP, texts'
    if family not in {form.family for form in transformers_forms.FORMS}:
        return 'yes'
    families = {form.model: form.family for form in transformers_forms.FORMS}
    forms = [form for form in transformers_forms.FORMS if form.family == family]
    classes = [form.written or form.model for form in forms if form.written is not None]
    found = {families[model] for model in classes}
    return 'yes' if family in found else f'as {" and ".join(sorted(found))}' if found else 'no'


def errors() -> Iterator[tuple[tuple[str, str], float]]:
    """Code base and family of each model, and its largest error by the largest output."""
    golden = json.loads(timm_forms.GOLDEN.read_text())
    for family, name, _ in timm_forms.FORMS:
        row = golden[name]
        with tempfile.TemporaryDirectory() as folder:
            arrays = timm_forms.parameters(row['shapes'])
            files.write_safetensors(folder, arrays, row['config'])
            batch = timm_forms.images(row['config']['pretrained_cfg']['input_size'][1])
            yield ('timm', family), _error(folder, batch, 'logits', np.array([row['logits']]))
    batch = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    for form in transformers_forms.FORMS:
        made = transformers_forms.model(form)
        with tempfile.TemporaryDirectory() as folder:
            made.save_pretrained(folder)
            expected = transformers_forms.outputs(form, made, batch)
            place = f'{folder}:{form.tower}' if form.tower else folder
            yield ('transformers', form.family), _error(place, batch, form.ours, expected)
    yield from _with_texts()
    made = transformers_naflex.reference()
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        expected, found = transformers_naflex.both_logits(made, folder)
    yield _NAFLEX, _largest(found, expected)


def _with_texts() -> Iterator[tuple[tuple[str, str], float]]:
    """The same of towers for texts, alone or beside one for images."""
    for family, name, fields in transformers_texts.FORMS:
        model = transformers_texts.reference(name, fields)
        texts = transformers_texts.ids(model)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            found = transformers_texts.ours(interop.read(folder), texts)[0]
        yield ('transformers', family), _largest(found, transformers_texts.theirs(model, texts)[0])
    for name, family in _WHOLE.items():
        model, data = transformers_clip.reference(name), transformers_clip.batch()
        with tempfile.TemporaryDirectory() as folder:
            found = transformers_clip.ours(
                interop.read(transformers_clip.save(model, folder)), data
            )[0]
        expected = transformers_clip.theirs(model, data).logits_per_image.numpy()
        yield ('transformers', family), _largest(found, expected)


def _error(place: str, batch: np.ndarray, output: str, expected: np.ndarray) -> float:
    imported = interop.read(place)
    assert isinstance(imported.model, Model)
    found = apply(imported.model, imported.params, normalized(imported, batch))[output]
    return _largest(found, expected)


def _largest(found: Any, expected: np.ndarray) -> float:
    """The largest difference by the largest output."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def replace(document: str) -> str:
    """The document with a new table between its two comments."""
    before, rest = document.split(_BEGIN)
    return f'{before}{_BEGIN}\n{text()}\n{_END}{rest.split(_END)[1]}'


if __name__ == '__main__':
    path = Path(__file__).parents[2] / 'docs' / 'checkpoint_families.md'
    path.write_text(replace(path.read_text()))
