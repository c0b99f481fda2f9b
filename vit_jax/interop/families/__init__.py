"""Families of checkpoints: one module each, from this folder or the user's code.

A family has two functions, and a table if it can write files for other code bases:

- `matches(flat) -> bool`: whether arrays with these names belong to the family; at most one of the
  modules here may match a file.
- `read(flat, extra) -> TrainedModel`: builds the model from arrays by name (see
  `files.read_arrays`) and the parsed config.json (empty if there is none).
- `WRITERS`: {(model name, form): function}. The function converts a `TrainedModel` to a `Written`;
  the form is 'npz', or safetensors with the names of 'transformers', 'timm' or the model's
  'authors'.
- `WEIGHTS`: name of the weights in a folder, if it is not `hub.WEIGHTS`.
- `POSITIONS`: interpolation that its code base resizes position embeddings with, if it is not
  'bilinear'; see `ops.resize.grid`.

A path may name its family: `my_lab.swin:weights.safetensors`. The user's own families must be named
in this way, by their dotted name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from vit_jax.errors import UserError, modules, resolve_module
from vit_jax.interop.names import common_prefix
from vit_jax.interop.trained import TrainedModel, Written

__all__ = ['FORMS', 'find', 'reader', 'writer']

# Families by the `model_type` in the config.json of transformers, tried first to avoid importing
# the others. Types shared by several families are omitted.
BY_TYPE = {
    **dict.fromkeys(('vit', 'deit', 'vit_msn', 'ijepa'), 'transformers_vit'),
    **dict.fromkeys(('beit', 'data2vec-vision'), 'transformers_beit'),
    **dict.fromkeys(('dinov2', 'dinov2_with_registers'), 'transformers_dinov2'),
    **dict.fromkeys(('swin', 'swinv2'), 'transformers_swin'),
    **dict.fromkeys(('detr', 'table-transformer'), 'detr'),
    **dict.fromkeys(('eomt', 'eomt_dinov3'), 'transformers_eomt'),
    **dict.fromkeys(('depth_anything', 'dpt'), 'transformers_depth'),
    **{'dinov3_vit': 'transformers_dinov3', 'yolos': 'transformers_yolos', 'bit': 'bit'},
    **{'radio': 'transformers_radio', 'rf_detr': 'rf_detr', 'lw_detr': 'transformers_lw_detr'},
    **dict.fromkeys(('tipsv2', 'tipsv2_vision_model'), 'transformers_tips'),
    'tipsv2_dpt': 'transformers_tips_dpt',
}
_READER = {'matches', 'read'}
FORMS = {
    'npz': 'an .npz file',
    'transformers': '.safetensors for transformers',
    'timm': '.safetensors for timm',
    'authors': '.safetensors for the code of its authors',
}


class UnknownNames(UserError):
    """Raised if no family reads arrays with these names."""


def find_family(name: str) -> ModuleType:
    """Return the family of this name.

    Raises:
      UserError: if there is no such family, or the module can neither read nor write.
    """
    module = resolve_module(__name__, name, 'family of checkpoints')
    if not (vars(module).keys() >= _READER or 'WRITERS' in vars(module)):
        raise UserError(
            f'family of checkpoints {name!r}: module {module.__name__!r} has neither matches and '
            'read nor WRITERS'
        )
    return module


def reader(flat: Mapping[str, Any], family: str = '', kind: str = '') -> ModuleType:
    """Find the family that reads arrays with these names.

    Args:
      flat: Arrays by name.
      family: Name of the family; if empty, the family of `kind`, then all families are tried.
      kind: Type of the model in config.json; empty if unknown.

    Raises:
      UserError: if no family matches (`UnknownNames`), or several do.
    """
    if (
        not family
        and kind in BY_TYPE
        and (typed_family := find_family(BY_TYPE[kind])).matches(flat)
    ):
        return typed_family
    if not (matches := match_families(flat, family)):
        raise UnknownNames(_unknown(flat, family, kind))
    if len(matches) > 1:
        names = ' and '.join(matches)
        raise UserError(
            f'{names} both match these parameters: choose one, such as {min(matches)}:FILE'
        )
    return next(iter(matches.values()))


def match_families(flat: Mapping[str, Any], family: str = '') -> dict[str, ModuleType]:
    """Return the families (or only the named one) that read arrays with these names."""
    named = {name: find_family(name) for name in ([family] if family else modules(__name__))}
    return {name: m for name, m in named.items() if vars(m).keys() >= _READER and m.matches(flat)}


def _unknown(flat: Mapping[str, Any], family: str, kind: str) -> str:
    """Build the message that no family reads arrays with these names."""
    names = ', '.join(sorted(flat)[:3]) or 'nothing'
    if shared := common_prefix(flat):
        names += f'; all names begin with {shared}'
    names += f'; config.json has type {kind!r}' if kind else ''
    tried = family or ', '.join(modules(__name__))
    return (
        f'no checkpoint family matches these parameters (found {names}); tried {tried}; '
        'to use your own family, write my_lab.swin:FILE'
    )


def form(flat: Mapping[str, Any], config: Mapping[str, Any], family: ModuleType) -> str:
    """Determine the form of a file, one of FORMS, from its names, config.json or family.

    Empty for names that no function of WRITERS writes, and for the user's own families.
    """
    package, _, name = family.__name__.rpartition('.')
    if package != __name__:
        return ''
    if any('/' in array for array in flat):
        return 'npz'
    written_forms = {form for _, form in getattr(family, 'WRITERS', {})}
    is_marked = {'transformers': 'model_type' in config, 'timm': 'architecture' in config}
    is_marked['authors'] = written_forms == {'authors'}
    is_form = {
        f: name.startswith(f'{f}_') or (f in written_forms and is_marked[f]) for f in is_marked
    }
    return next((form for form in is_form if is_form[form]), '')


def writers(model: str, family: str = '') -> dict[str, Callable[[TrainedModel], Written]]:
    """Return the functions that write a model, by form; see `writer`."""
    names = [family] if family else modules(__name__)
    functions: dict[str, Callable[[TrainedModel], Written]] = {}
    for name in names:
        table = getattr(find_family(name), 'WRITERS', {})
        functions = {
            form: function for (kind, form), function in table.items() if kind == model
        } | functions
    return functions


def writer(model: str, forms: Sequence[str], family: str = '') -> Callable[[TrainedModel], Written]:
    """Return the function that writes a model in another code base's form.

    Args:
      model: Name of the model in `config.model`.
      forms: Acceptable forms, see FORMS, in order of preference.
      family: Name of the family; if empty, the first in this folder that can write the model.

    Raises:
      UserError: if no family writes this model in these forms.
    """
    functions = writers(model, family)
    if form := next((form for form in forms if form in functions), ''):
        return functions[form]
    alternatives = functions or writers(model)
    forms_text = ', '.join(FORMS[form] for form in sorted(alternatives))
    scope = '' if functions or not family else ' without a family'
    hint = f' ({forms_text} is possible{scope})' if alternatives else ''
    reason = f'tried {family or ", ".join(modules(__name__))}'
    if family and not getattr(find_family(family), 'WRITERS', {}):
        reason = f'{family} only writes unchanged models that it read'
    file = FORMS['npz'] if 'npz' in forms else '.safetensors'
    raise UserError(f'a {model!r} cannot be written as {file}{hint}: {reason}')
