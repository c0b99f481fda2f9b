"""Options of models in groups, as configs nest them, and the flat names of earlier versions.

A group is a frozen dataclass that is the default of a model's field. Models accept it as a record
or as a mapping with some of its keys, and also accept these keys under their flat names in `MOVED`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vit_jax import signatures
from vit_jax.errors import UserError, check_choice, nearest
from vit_jax.nn.blocks import GELUS, MLPS
from vit_jax.nn.norms import NORMS
from vit_jax.nn.rotary import Rope, RopeDinov3

POOLS = ('cls', 'gap', 'patches', 'cls_patches', 'map', 'cls_map', 'none', 'distilled')
WITH_CLASS_TOKEN = ('cls', 'patches', 'cls_patches', 'cls_map', 'distilled')
MEANS = ('gap', 'patches')
KINDS = ('none', 'rope', 'rope_dinov3', 'relative')

# Earlier top-level fields of models, and their places in groups.
MOVED = {
    **{'pool': 'pool.kind', 'pool_heads': 'pool.num_heads', 'pool_mlp_dim': 'pool.mlp_dim'},
    **{'fc_norm': 'pool.norm', 'posemb': 'positions.embed', 'posemb_prefix': 'positions.prefix'},
    **{'posemb_std': 'positions.std', 'representation_size': 'head.representation_size'},
    **{'head_norm': 'head.norm', 'head_bias': 'head.bias', 'positions': 'positions.kind'},
    **{'gelu': 'block.gelu', 'norm': 'block.norm', 'norm_eps': 'block.norm_eps'},
    **{'norm_place': 'block.norm_place', 'norm_pre': 'block.norm_pre', 'mlp': 'block.mlp'},
    **{'final_norm': 'block.final_norm', 'layer_scale': 'block.layer_scale'},
    **{'qk_norm': 'block.qk_norm', 'inner_norm': 'block.inner_norm'},
    **{'attention_dropout': 'block.attention_dropout', 'drop_path': 'block.drop_path'},
    **{'residual_dtype': 'block.residual_dtype'},
    **{'init_scale': 'logits.scale', 'init_bias': 'logits.bias'},
    **{'text_width': 'texts.width', 'text_depth': 'texts.depth', 'text_mlp_dim': 'texts.mlp_dim'},
    **{'text_norm_eps': 'texts.norm_eps', 'text_scaled': 'texts.scaled'},
    **{'text_num_heads': 'texts.num_heads', 'causal': 'texts.causal', 'eos': 'texts.eos'},
    **{'layers': 'resnet.layers', 'backbone_width': 'resnet.width', 'dilate': 'resnet.dilate'},
    **{'backbone_norm': 'resnet.norm', 'frozen_stages': 'resnet.frozen_stages'},
    **{'cross_heads': 'cross.heads', 'points': 'cross.points', 'sampling': 'cross.sampling'},
    **{'projector_blocks': 'neck.blocks', 'projector_eps': 'neck.eps'},
    **{'projector_norm': 'neck.norm', 'projector_scales': 'neck.scales'},
    **{'mask_stride': 'masks.stride', 'mask_mlp_dim': 'masks.mlp_dim'},
}


_ROPE, _ROPE_DINOV3 = Rope(), RopeDinov3()


@dataclasses.dataclass(frozen=True)
class NormFields:
    """Norms of blocks.

    Attributes:
      norm_eps: Value added to the variance in norms.
    """

    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class PlainBlockFields(NormFields):
    """Blocks with a layer norm and a GELU.

    Attributes:
      gelu: 'tanh' (approximate), 'erf' (exact) or 'quick' (x sigmoid(1.702 x), CLIP's).
    """

    gelu: str = 'tanh'


@dataclasses.dataclass(frozen=True)
class DropPathFields(PlainBlockFields):
    """Stochastic depth: blocks that training drops at random.

    Attributes:
      drop_path: Stochastic depth of the last block, rising linearly from 0 at the first.
    """

    drop_path: float = 0.0


@dataclasses.dataclass(frozen=True)
class BlockFields(DropPathFields):
    """Blocks, and the norms before and after them.

    Attributes:
      norm: 'layer' or 'rms' (without means and biases, arXiv:1910.07467).
      norm_place: 'pre', the paper's; 'post', after the sums, without a final norm; 'res_post', on
        the branches before the sums (Swin v2); or 'parallel', one before attention and MLP, which
        both read it (ViT-22B).
      norm_pre: Whether the tokens are also normalized before the first block (CLIP).
      final_norm: Whether the tokens are normalized after the last block (not in RADIO).
      qk_norm: Norm of the heads of queries and keys: 'none', 'layer' or 'rms'.
      inner_norm: Whether the joined heads are normalized (EVA-02 of CLIP, BEiT-3; sub-LN).
      mlp: 'mlp' (the paper's) or 'swiglu' (DINOv2, EVA-02, DINOv3); `mlp_dim` is the width between
        its layers.
      mlp_norm: Whether the hidden layer of the MLP is normalized (EVA-02).
      layer_scale: Initial value of a learned factor for each channel of every branch
        (arXiv:2103.17239); None omits the factors.
      attention_dropout: Dropout rate of the attention weights.
      residual_dtype: Dtype of the residual stream; None for the computation dtype. big_vision uses
        'float32' with bfloat16 computation.
    """

    norm: str = 'layer'
    norm_place: str = 'pre'
    norm_pre: bool = False
    final_norm: bool = True
    qk_norm: str = 'none'
    inner_norm: bool = False
    mlp: str = 'mlp'
    mlp_norm: bool = False
    layer_scale: float | None = None
    attention_dropout: float = 0.0
    residual_dtype: str | None = None

    @property
    def without_training(self) -> BlockFields:
        """Copy whose options of training and precision have their defaults."""
        return dataclasses.replace(self, attention_dropout=0.0, drop_path=0.0, residual_dtype=None)


@dataclasses.dataclass(frozen=True)
class RelativeFields:
    """Learned biases of relative positions (BEiT, arXiv:2106.08254, section 2.5).

    Attributes:
      shared: Whether all blocks share the biases, as in BEiT's pre-training.
    """

    shared: bool = False


@dataclasses.dataclass(frozen=True)
class PositionFields:
    """Positions of tokens, added to them and within attention.

    Attributes:
      embed: Positions added to the tokens: 'learn', 'sincos2d' (fixed) or 'none'.
      prefix: Tokens before the patches that have positions: 'class', class and distillation tokens
        (the paper); 'none' (big_vision, DeiT III); 'all', also registers (YOLOS).
      std: Initial standard deviation of learned positions; 0.02 in the authors' code, width^-1/2 in
        big_vision.
      kind: Positions within attention: 'none'; 'rope', rotations counted in patches (EVA-02);
        'rope_dinov3', rotations of positions from -1 to 1; or 'relative', a learned bias for each
        relative position (BEiT).
      rope: Options of the kind 'rope'.
      rope_dinov3: Options of the kind 'rope_dinov3'.
      relative: Options of the kind 'relative'.
    """

    embed: str = 'learn'
    prefix: str = 'class'
    std: float = 0.02
    kind: str = 'none'
    rope: Rope = _ROPE
    rope_dinov3: RopeDinov3 = _ROPE_DINOV3
    relative: RelativeFields = RelativeFields()


@dataclasses.dataclass(frozen=True)
class PoolKind:
    """The input of the head.

    Attributes:
      kind: 'cls': an extra class token, as in the paper. 'gap': mean of the tokens. 'patches': mean
        of the patches, in a model that also has a class token. 'cls_patches': the class token
        and that mean, [B 2 D], as for DINOv2's classifiers. 'map': attention pooling; 'cls_map':
        of all tokens, also a class token (PE core). 'none': no pooling. 'distilled': a class token
        and a distillation token, each with a head (DeiT, arXiv:2012.12877, section 4).
    """

    kind: str = 'cls'


@dataclasses.dataclass(frozen=True)
class PoolFields(PoolKind):
    """The input of the head.

    Attributes:
      num_heads: Heads of attention pooling; None for the blocks' number.
      mlp_dim: Hidden width of attention pooling; None for the blocks' width.
      norm: Whether the final norm is applied to the mean of the tokens instead of to the tokens, as
        in fine-tuning of MAE (arXiv:2111.06377).
    """

    num_heads: int | None = None
    mlp_dim: int | None = None
    norm: bool = False


@dataclasses.dataclass(frozen=True)
class HeadFields:
    """Layers between the representation and the scores.

    Attributes:
      representation_size: Width of a tanh layer before the head; None omits the layer.
      norm: 'none', or 'batch': batch normalization without parameters before the head, for a linear
        probe of features of any scale (MAE, arXiv:2111.06377, appendix A.1).
      bias: Initial value of the head's biases.
    """

    representation_size: int | None = None
    norm: str = 'none'
    bias: float = 0.0


CHOICES: Mapping[str, Iterable[str]] = {
    **{'block.gelu': GELUS, 'block.norm': NORMS, 'block.qk_norm': ('none', *NORMS)},
    **{'block.norm_place': ('pre', 'post', 'res_post', 'parallel'), 'block.mlp': MLPS},
    **{'positions.embed': ('learn', 'sincos2d', 'none'), 'positions.kind': KINDS},
    **{'positions.prefix': ('none', 'class', 'all')},
    **{'pool.kind': POOLS, 'head.norm': ('none', 'batch')},
}


def check_groups(model: Any) -> None:
    """Check the groups `block`, `positions`, `pool` and `head` of a model.

    Raises:
      UserError: for a value that a field cannot have, or options of positions of a different kind.
    """
    for path, choices in CHOICES.items():
        check_choice(path, operator.attrgetter(path)(model), choices)
    positions, pool, head = model.positions, model.pool, model.head
    for kind in KINDS[1:]:
        if kind != positions.kind and getattr(positions, kind) != getattr(PositionFields, kind):
            raise UserError(
                f'positions.{kind} has no effect with positions.kind={positions.kind!r}: '
                f'set positions.kind={kind!r}, or leave its options out'
            )
    if pool.norm and pool.kind not in MEANS:
        raise UserError(
            f'pool.norm=True normalizes a mean of tokens: set pool.kind='
            f'{" or ".join(map(repr, MEANS))}, not {pool.kind!r}'
        )
    if pool.kind == 'distilled' and head != HeadFields(bias=head.bias):
        raise UserError("pool.kind='distilled' takes no head.representation_size and no head.norm")
    if head.representation_size is not None and head.representation_size < 0:
        raise UserError(
            f'head.representation_size must be at least 1, not {head.representation_size}'
        )


@functools.cache
def defaults(cls: type) -> dict[str, Any]:
    """Collect the default of each field of a model, without `parent` and `name`."""
    of_flax = ('parent', 'name')
    return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in of_flax}


def is_group(value: Any) -> bool:
    """Return whether a value is a group of options: a record of a frozen dataclass."""
    params = getattr(type(value), '__dataclass_params__', None)
    return params is not None and bool(params.frozen)


def place(cls: type, name: str, value: Any) -> list[tuple[str, Any]]:
    """Locate a model's field by its name or by its flat name of an earlier version.

    Args:
      cls: Class of the model.
      name: Field of the model, or a key of `MOVED`.
      value: Value of the field, or its text of an earlier version, such as 'rope(reference=16)'.

    Returns:
      Pairs of a dotted path, such as 'positions.rope.reference', and a value.
    """
    fields, is_text = defaults(cls), isinstance(value, str)
    if name == 'no_bias' and is_text and isinstance(fields.get(name), tuple):
        return [(name, value if value.startswith('(') else _split(value))]
    target = MOVED.get(name, '')
    is_current = name in fields and not (is_text and is_group(fields[name]))
    if is_current or not is_group(fields.get(target.partition('.')[0])):
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
    """Nest fields of a model in groups, as dicts; later mappings replace earlier ones key by key.

    Args:
      cls: Class of the model.
      *fields: Values by field, nested or under flat names. Absent keys stay absent.
    """
    merged: dict[str, Any] = {}
    for name, value in (pair for mapping in fields for pair in mapping.items()):
        for path, item in place(cls, name, value):
            group, *keys = path.split('.')
            if not is_group(defaults(cls).get(group)):
                merged[path] = item
                continue
            for key in reversed(keys):
                item = {key: item}
            if not is_group(item) and not hasattr(item, 'items'):
                raise UserError(f'config.model.{group}={item!r}: expected a group of keys')
            _update(merged.setdefault(group, {}), item)
    return merged


def _update(node: dict[str, Any], group: Any) -> None:
    """Set keys of a dict and of its nested dicts from a group, a record or a mapping."""
    for key, value in (vars(group) if is_group(group) else group).items():
        if is_group(value) or hasattr(value, 'items'):  # also of a ConfigDict
            _update(node.setdefault(key, {}), value)
        else:
            node[key] = value


def build(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Make a model's constructor arguments, with groups as records, from nested or flat fields.

    Raises:
      UserError: for an unknown key of a group, or a value of another type.
    """
    # `dataclasses.replace` appends unchanged groups to the changes, which are to win.
    fields = dict(sorted(fields.items(), key=lambda pair: not is_group(pair[1])))
    return {
        name: _record(group, value, name)
        if is_group(group := defaults(cls).get(name)) and isinstance(value, Mapping)
        else value
        for name, value in regroup(cls, fields).items()
    }


def _record(default: Any, values: Mapping[str, Any], path: str) -> Any:
    """Replace keys of a group, and of its nested groups."""
    changes, cls = {}, default.__class__
    for key, value in values.items():
        if key not in vars(default):
            raise UserError(f'{path}: ' + nearest('key', key, vars(default)))
        old = getattr(default, key)
        if is_group(old):
            value = _record(old, value, f'{path}.{key}')
        elif not _accepts(_annotations(cls)[key], value):
            raise UserError(f'{path}.{key} must be like {old!r}, not {value!r}')
        changes[key] = value
    return dataclasses.replace(default, **changes)


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _accepts(annotation: Any, value: Any) -> bool:
    """Whether a value has the type of an annotation such as `float | None`."""
    union = isinstance(annotation, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    plain = {typing.get_origin(kind) or kind for kind in kinds}
    wide = plain | {int} if float in plain else plain
    return type(value) in wide or (not isinstance(value, bool) and isinstance(value, tuple(wide)))


def flatten_fields(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the fields of a model to dotted paths such as 'block.gelu', with all defaults."""
    merged = regroup(cls, defaults(cls), fields)
    in_groups = {key: merged.pop(key) for key, value in defaults(cls).items() if is_group(value)}
    return merged | dict(leaves(in_groups))


def leaves(node: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the dotted paths and values of nested keys."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value


def nested_fields(model: Any) -> dict[str, Any]:
    """Collect the fields of a model as in `config.model`, with groups as dicts."""
    cls: Any = type(model)
    return regroup(cls, {name: getattr(model, name) for name in defaults(cls)})


def flat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give nested fields of a model the flat names of `MOVED`.

    Tables of other projects' models use these names. Options of positions and MLPs become texts
    such as 'rope(reference=16)'.
    """
    flat: dict[str, Any] = {}
    names = {path: name for name, path in MOVED.items()}
    for key, value in fields.items():
        if not (is_group(value) or isinstance(value, Mapping)):
            flat[key] = '|'.join(value) if (key, type(value)) == ('no_bias', tuple) else value
            continue
        node: dict[str, Any] = {}
        _update(node, value)
        flat |= {names[path]: item for path, item in leaves(node, f'{key}.') if path in names}
        if 'kind' in node and key == 'positions':
            flat[key] = _call(node['kind'], node.get(node['kind'], {}))
        if key == 'block' and node.get('mlp_norm'):
            flat['mlp'] = f'{node.get("mlp", "mlp")}(norm=True)'
    return flat


def _call(kind: str, options: Mapping[str, Any]) -> str:
    """Write a kind of positions with its options that are not defaults."""
    default = getattr(PositionFields, kind, None)
    changes = [f'{k}={v!r}' for k, v in options.items() if v != getattr(default, k, None)]
    return f'{kind}({", ".join(changes)})' if changes else kind
