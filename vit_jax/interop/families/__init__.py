"""Families of checkpoints: one module each, of this folder or of the user's own.

A family has two functions, and a table if it can write files for others:

- `matches(flat) -> bool`: whether arrays with these names belong to the family; at most one of the
  modules here may match a file.
- `read(flat, extra) -> TrainedModel`: makes the model from arrays by name (see
  `files.read_arrays`) and the parsed config.json (empty if there is none).
- `WRITERS`: {(name of the model, form): function}. The function makes a `Written` from a
  `TrainedModel`; the form is 'npz', or safetensors with the names of 'transformers', 'timm' or the
  model's 'authors'.
- `WEIGHTS`: the name of the weights in a folder, if it is not `hub.WEIGHTS`.
- `POSITIONS`: the interpolation with which its code base resizes position embeddings, if it is not
  'bilinear'; see `ops.resize.grid`.

A path may name its family: `my_lab.swin:weights.safetensors`. A user's own family has to be named
in this way, by its dotted name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from vit_jax.errors import UserError, modules, resolve_module
from vit_jax.interop.names import common_prefix
from vit_jax.interop.trained import TrainedModel, Written

__all__ = ['FORMS', 'find', 'reader', 'writer']

# Families by the `model_type` in the config.json of transformers. They are tried first, which saves
# importing the others. Types that several families share are left out.
BY_TYPE = {
    **dict.fromkeys(('vit', 'deit', 'vit_msn', 'ijepa'), 'transformers_vit'),
    **dict.fromkeys(('beit', 'data2vec-vision'), 'transformers_beit'),
    **dict.fromkeys(('dinov2', 'dinov2_with_registers'), 'transformers_dinov2'),
    **dict.fromkeys(('swin', 'swinv2'), 'transformers_swin'),
    **dict.fromkeys(('detr', 'table-transformer'), 'detr'),
    **dict.fromkeys(('eomt', 'eomt_dinov3'), 'transformers_eomt'),
    **{'dinov3_vit': 'transformers_dinov3', 'yolos': 'transformers_yolos', 'bit': 'bit'},
}
_READER = {'matches', 'read'}
FORMS = {
    'npz': 'an .npz file',
    'transformers': '.safetensors for transformers',
    'timm': '.safetensors for timm',
    'authors': '.safetensors for the code of its authors',
}


class UnknownNames(UserError):
    """No family reads arrays of these names."""


def find(name: str) -> ModuleType:
    """The family of this name.

    Raises:
      UserError: if there is none, or the module can neither read nor write.
    """
    module = resolve_module(__name__, name, 'family of checkpoints')
    if not (vars(module).keys() >= _READER or 'WRITERS' in vars(module)):
        raise UserError(
            f'family of checkpoints {name!r}: module {module.__name__!r} has neither matches and '
            'read nor WRITERS'
        )
    return module


def reader(flat: Mapping[str, Any], family: str = '', kind: str = '') -> ModuleType:
    """The family that reads arrays of these names.

    Args:
      flat: arrays by name.
      family: its name; if empty, that of `kind` or else all families in this folder are tried.
      kind: the type of model in config.json; empty if unknown.

    Raises:
      UserError: if no family matches (`UnknownNames`), or several do.
    """
    if not family and kind in BY_TYPE and (known := find(BY_TYPE[kind])).matches(flat):
        return known
    if not (found := matching(flat, family)):
        raise UnknownNames(_unknown(flat, family, kind))
    if len(found) > 1:
        names = ' and '.join(found)
        raise UserError(f'{names} both match these parameters: name one, as {min(found)}:FILE')
    return next(iter(found.values()))


def matching(flat: Mapping[str, Any], family: str = '') -> dict[str, ModuleType]:
    """The families, or that of this name, that read arrays of these names."""
    named = {name: find(name) for name in ([family] if family else modules(__name__))}
    return {name: m for name, m in named.items() if vars(m).keys() >= _READER and m.matches(flat)}


def _unknown(flat: Mapping[str, Any], family: str, kind: str) -> str:
    """The message that no family reads arrays of these names."""
    held = ', '.join(sorted(flat)[:3]) or 'nothing'
    if shared := common_prefix(flat):
        held += f'; all names begin with {shared}'
    held += f'; config.json says {kind!r}' if kind else ''
    tried = family or ', '.join(modules(__name__))
    return (
        f'no checkpoint family matches these parameters (found {held}); tried {tried}; '
        'prefix your own, as in my_lab.swin:FILE'
    )


def form(flat: Mapping[str, Any], config: Mapping[str, Any], family: ModuleType) -> str:
    """The form of a file, one of FORMS, by its names, its config.json or its family.

    Empty for names that no function of WRITERS makes, and for a user's own family.
    """
    package, _, name = family.__name__.rpartition('.')
    if package != __name__:
        return ''
    if any('/' in array for array in flat):
        return 'npz'
    own = {form for _, form in getattr(family, 'WRITERS', {})}
    told = {'transformers': 'model_type' in config, 'timm': 'architecture' in config}
    told['authors'] = own == {'authors'}
    is_form = {f: name.startswith(f'{f}_') or (f in own and told[f]) for f in told}
    return next((form for form in is_form if is_form[form]), '')


def writers(model: str, family: str = '') -> dict[str, Callable[[TrainedModel], Written]]:
    """The functions that make the contents of files of a model, by form; see `writer`."""
    names = [family] if family else modules(__name__)
    found: dict[str, Callable[[TrainedModel], Written]] = {}
    for name in names:
        table = getattr(find(name), 'WRITERS', {})
        found = {form: make for (kind, form), make in table.items() if kind == model} | found
    return found


def writer(model: str, forms: Sequence[str], family: str = '') -> Callable[[TrainedModel], Written]:
    """The function that makes the contents of another code base's files.

    Args:
      model: its name in `config.model`.
      forms: some of FORMS, in order of preference.
      family: its name; if empty, the first in this folder that can write the model.

    Raises:
      UserError: if no family writes this model in these forms.
    """
    found = writers(model, family)
    if form := next((form for form in forms if form in found), ''):
        return found[form]
    possible = found or writers(model)
    words = ', '.join(FORMS[form] for form in sorted(possible))
    alone = '' if found or not family else ' without a family'
    hint = f' ({words} is possible{alone})' if possible else ''
    reason = f'tried {family or ", ".join(modules(__name__))}'
    if family and not getattr(find(family), 'WRITERS', {}):
        reason = f'{family} reads such files, and writes again only those that it read, unchanged'
    file = FORMS['npz'] if 'npz' in forms else '.safetensors'
    raise UserError(f'a {model!r} cannot be written as {file}{hint}: {reason}')
