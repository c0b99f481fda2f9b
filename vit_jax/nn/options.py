"""Options of a ViT in groups, as configs nest them, and the flat names of earlier versions.

A group is a frozen dataclass that is the default of a model's field. Models accept it as a record
or as a mapping with some of its keys, and accept its keys under their flat names in `MOVED` too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from vit_jax import signatures
from vit_jax.errors import UserError, check_choice, nearest
from vit_jax.nn.blocks import GELUS, MLPS
from vit_jax.nn.norms import NORMS
from vit_jax.nn.rotary import Rope, RopeDinov3

POOLS = ('cls', 'gap', 'patches', 'cls_patches', 'map', 'cls_map', 'none', 'distilled')
WITH_CLASS_TOKEN = ('cls', 'patches', 'cls_patches', 'cls_map', 'distilled')
MEANS = ('gap', 'patches')
HEAD_NORMS = ('none', 'batch')
EMBEDS = ('learn', 'sincos2d', 'none')
PREFIXES = ('none', 'class', 'all')
KINDS = ('none', 'rope', 'rope_dinov3', 'relative')
NORM_PLACES = ('pre', 'post', 'res_post')
CHOICES: Mapping[str, Iterable[str]] = {
    **{'block.gelu': GELUS, 'block.norm': NORMS, 'block.norm_place': NORM_PLACES},
    **{'block.qk_norm': ('none', *NORMS), 'block.mlp': MLPS, 'positions.embed': EMBEDS},
    **{'positions.prefix': PREFIXES, 'positions.kind': KINDS, 'pool.kind': POOLS},
    **{'head.norm': HEAD_NORMS},
}

# The fields that were at the top of a ViT, and their place in a group.
MOVED = {
    **{'pool': 'pool.kind', 'pool_heads': 'pool.num_heads', 'pool_mlp_dim': 'pool.mlp_dim'},
    **{'fc_norm': 'pool.norm', 'posemb': 'positions.embed', 'posemb_prefix': 'positions.prefix'},
    **{'posemb_std': 'positions.std', 'representation_size': 'head.representation_size'},
    **{'head_norm': 'head.norm', 'head_bias': 'head.bias', 'positions': 'positions.kind'},
    **{'gelu': 'block.gelu', 'norm': 'block.norm', 'norm_eps': 'block.norm_eps'},
    **{'norm_place': 'block.norm_place', 'norm_pre': 'block.norm_pre', 'mlp': 'block.mlp'},
    **{'final_norm': 'block.final_norm', 'layer_scale': 'block.layer_scale'},
    **{'qk_norm': 'block.qk_norm', 'inner_norm': 'block.inner_norm'},
}


_ROPE, _ROPE_DINOV3 = Rope(), RopeDinov3()


@dataclasses.dataclass(frozen=True)
class BlockFields:
    """Blocks, and the norms before and after them.

    Attributes:
      gelu: 'tanh' (approximate), 'erf' (exact) or 'quick' (x sigmoid(1.702 x), CLIP's).
      norm: 'layer' or 'rms' (without means and biases, arXiv:1910.07467).
      norm_eps: value added to the variance in norms.
      norm_place: 'pre', the paper's; 'post', after the sums, without a final norm; or 'res_post',
        on the branches before the sums (Swin v2).
      norm_pre: whether the tokens are also normalized before the first block (CLIP).
      final_norm: whether the tokens are normalized after the last block (not in RADIO).
      qk_norm: norm of the heads of queries and keys: 'none', 'layer' or 'rms'.
      inner_norm: whether the joined heads are normalized (EVA-02 of CLIP, BEiT-3; sub-LN).
      mlp: 'mlp' (the paper's) or 'swiglu' (DINOv2, EVA-02, DINOv3); `mlp_dim` is the width between
        its layers.
      mlp_norm: whether the hidden layer of the MLP is normalized (EVA-02).
      layer_scale: initial value of a learned factor for each channel of every branch
        (arXiv:2103.17239); None for none.
    """

    gelu: str = 'tanh'
    norm: str = 'layer'
    norm_eps: float = 1e-6
    norm_place: str = 'pre'
    norm_pre: bool = False
    final_norm: bool = True
    qk_norm: str = 'none'
    inner_norm: bool = False
    mlp: str = 'mlp'
    mlp_norm: bool = False
    layer_scale: float | None = None


@dataclasses.dataclass(frozen=True)
class RelativeFields:
    """Learned biases of relative positions (BEiT, arXiv:2106.08254, section 2.5).

    Attributes:
      shared: whether all blocks share the biases, as in BEiT's pre-training.
    """

    shared: bool = False


@dataclasses.dataclass(frozen=True)
class PositionFields:
    """Positions of tokens, added to them and within attention.

    Attributes:
      embed: positions added to the tokens: 'learn', 'sincos2d' (fixed) or 'none'.
      prefix: tokens before the patches that have positions: 'class', class and distillation tokens
        (the paper); 'none' (big_vision, DeiT III); 'all', also registers (YOLOS).
      std: initial standard deviation of learned positions; 0.02 in the authors' code, width^-1/2 in
        big_vision.
      kind: positions within attention: 'none'; 'rope', rotations counted in patches (EVA-02);
        'rope_dinov3', rotations of positions from -1 to 1; or 'relative', a learned bias for each
        relative position (BEiT).
      rope: options of the kind 'rope'.
      rope_dinov3: options of the kind 'rope_dinov3'.
      relative: options of the kind 'relative'.
    """

    embed: str = 'learn'
    prefix: str = 'class'
    std: float = 0.02
    kind: str = 'none'
    rope: Rope = _ROPE
    rope_dinov3: RopeDinov3 = _ROPE_DINOV3
    relative: RelativeFields = RelativeFields()


@dataclasses.dataclass(frozen=True)
class PoolFields:
    """The input of the head.

    Attributes:
      kind: 'cls': an extra class token, as in the paper. 'gap': mean of the tokens. 'patches': mean
        of the patches, in a model that also has a class token. 'cls_patches': the class token
        beside that mean, [B 2 D], as for DINOv2's classifiers. 'map': attention pooling; 'cls_map':
        of all tokens, also a class token (PE core). 'none': every token by itself. 'distilled': a
        class token and a distillation token, with a head each (DeiT, arXiv:2012.12877, section 4).
      num_heads: heads of attention pooling; None for as many as the blocks have.
      mlp_dim: hidden width of attention pooling; None for the same as in the blocks.
      norm: whether the final norm is applied to the mean of the tokens instead of to the tokens, as
        in fine-tuning of MAE (arXiv:2111.06377).
    """

    kind: str = 'cls'
    num_heads: int | None = None
    mlp_dim: int | None = None
    norm: bool = False


@dataclasses.dataclass(frozen=True)
class HeadFields:
    """The layers between the representation and the scores.

    Attributes:
      representation_size: width of a tanh layer before the head; None for no such layer.
      norm: 'none', or 'batch': batch normalization without parameters before the head, for a linear
        probe of features of any scale (MAE, arXiv:2111.06377, appendix A.1).
      bias: initial value of the head's biases.
    """

    representation_size: int | None = None
    norm: str = 'none'
    bias: float = 0.0


def check(model: Any) -> None:
    """Raise UserError for a value that an option of a ViT cannot have, or that has no effect."""
    for path, choices in CHOICES.items():
        check_choice(path, attrgetter(path)(model), choices)
    positions, pool, head = model.positions, model.pool, model.head
    for kind in KINDS[1:]:
        if kind != positions.kind and getattr(positions, kind) != getattr(PositionFields, kind):
            raise UserError(
                f'positions.{kind} has no effect with positions.kind={positions.kind!r}: '
                f'set positions.kind={kind!r}, or leave its options out'
            )
    if pool.norm and pool.kind not in MEANS:
        raise UserError(
            f'pool.norm=True normalizes a mean of tokens: take pool.kind='
            f'{" or ".join(map(repr, MEANS))}, not {pool.kind!r}'
        )
    if head.representation_size is not None and head.representation_size < 0:
        raise UserError(
            f'head.representation_size must be at least 1, not {head.representation_size}'
        )
    if pool.kind == 'distilled' and head != HeadFields(bias=head.bias):
        raise UserError("pool.kind='distilled' takes no head.representation_size and no head.norm")


@functools.cache
def defaults(cls: type) -> dict[str, Any]:
    """Collect the default of each field of a model, without those of Flax."""
    own = ('parent', 'name')
    return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in own}


def is_group(value: Any) -> bool:
    """Whether the default of a field is a group of options: a record of a frozen dataclass."""
    frozen = getattr(type(value), '__dataclass_params__', None)
    return frozen is not None and bool(frozen.frozen)


def groups(cls: type) -> dict[str, Any]:
    """The default of each field of a model that is a group of options."""
    return {name: value for name, value in defaults(cls).items() if is_group(value)}


def place(cls: type, name: str, value: Any) -> list[tuple[str, Any]]:
    """Locate a model's field, given under its name or the flat name of an earlier version.

    Args:
      cls: class of the model.
      name: field of the model, or a key of `MOVED`.
      value: value of the field; may be the text of earlier versions, such as 'rope(reference=16)'.

    Returns:
      Pairs of a dotted path, such as 'positions.rope.reference', and a value.
    """
    fields, named = defaults(cls), groups(cls)
    target, is_text = MOVED.get(name, ''), isinstance(value, str)
    if name == 'no_bias' and is_text and isinstance(fields.get(name), tuple):
        return [(name, value if value.startswith('(') else _split(value))]
    is_current = name in fields and not (name in named and is_text)
    if is_current or target.partition('.')[0] not in named:
        return [(name, value)]
    if not is_text or name not in ('positions', 'mlp'):
        return [(target, value)]
    choice, keywords = signatures.parse_keywords(value, f'{name}={value!r}')
    prefix = 'block.mlp_' if name == 'mlp' else f'positions.{choice}.'
    if name == 'mlp':
        keywords = {'norm': False} | keywords
    return [(target, choice), *((f'{prefix}{key}', item) for key, item in keywords.items())]


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split('|'))))


def regroup(cls: type, *fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nest fields of a model, and turn groups into dicts; keys that are absent stay absent.

    Later fields replace earlier ones key by key.
    """
    nested: dict[str, Any] = {}
    named = groups(cls)
    for name, value in [item for given in fields for item in given.items()]:
        for path, item in place(cls, name, value):
            group, *keys = path.split('.')
            if group not in named:
                nested[path] = item
                continue
            for key in reversed(keys):
                item = {key: item}
            _merge(nested.setdefault(group, {}), item)
    return nested


def _merge(node: dict[str, Any], given: Any) -> None:
    """Set keys of a group, given as a record or a mapping, and of the groups within."""
    for key, value in (vars(given) if is_group(given) else given).items():
        if is_group(value) or hasattr(value, 'items'):  # also of a ConfigDict
            _merge(node.setdefault(key, {}), value)
        else:
            node[key] = value


def build(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make the constructor's arguments, with groups as records, of nested or flat fields.

    Raises:
      UserError: for an unknown key of a group.
    """
    named = groups(cls)
    return {
        name: _record(named[name], value, name)
        if name in named and isinstance(value, Mapping)
        else value
        for name, value in regroup(cls, given).items()
    }


def _record(default: Any, given: Mapping[str, Any], where: str) -> Any:
    """Replace keys of a group, and of the groups within."""
    changes = {}
    for key, value in given.items():
        if key not in vars(default):
            raise UserError(f'{where}: ' + nearest('key', key, vars(default)))
        old = getattr(default, key)
        kinds = (int, float) if isinstance(old, float) else type(old)
        is_like = isinstance(value, kinds) and isinstance(value, bool) == isinstance(old, bool)
        if is_group(old):
            value = _record(old, value, f'{where}.{key}')
        elif old is not None and not is_like:
            raise UserError(f'{where}.{key} must be like {old!r}, not {value!r}')
        changes[key] = value
    return dataclasses.replace(default, **changes)


def complete(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the fields of a model to dotted paths such as 'block.gelu', with all defaults."""
    merged, named = regroup(cls, defaults(cls), given), groups(cls)
    flat = {key: value for key, value in merged.items() if key not in named}
    return flat | dict(leaves({key: merged[key] for key in named}))


def leaves(node: Mapping[str, Any], within: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the dotted paths and values of nested keys."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f'{within}{key}.')
        else:
            yield f'{within}{key}', value


def nested_fields(model: Any) -> dict[str, Any]:
    """Collect the fields of a model, groups as dicts, as `config.model` has them."""
    cls: Any = type(model)
    return regroup(cls, {name: getattr(model, name) for name in defaults(cls)})


def flat_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Give nested fields of a model the flat names of `MOVED`.

    Tables of other projects' models use these names. Options of positions and MLPs become texts
    such as 'rope(reference=16)'.
    """
    flat: dict[str, Any] = {}
    names = {path: name for name, path in MOVED.items()}
    for key, value in given.items():
        if not (is_group(value) or isinstance(value, Mapping)):
            flat[key] = '|'.join(value) if (key, type(value)) == ('no_bias', tuple) else value
            continue
        node: dict[str, Any] = {}
        _merge(node, value)
        flat |= {names[path]: item for path, item in leaves(node, f'{key}.') if path in names}
        if 'kind' in node and key == 'positions':
            flat[key] = _call(node['kind'], node.get(node['kind'], {}))
        if key == 'block' and node.get('mlp_norm'):
            flat['mlp'] = f'{node.get("mlp", "mlp")}(norm=True)'
    return flat


def _call(kind: str, given: Mapping[str, Any]) -> str:
    """Write a kind of positions with its options that are not defaults."""
    default = getattr(PositionFields, kind, None)
    options = [f'{k}={v!r}' for k, v in given.items() if v != getattr(default, k, None)]
    return f'{kind}({", ".join(options)})' if options else kind
