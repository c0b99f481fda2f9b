"""The names of a DETR's parameters: of its authors, of transformers 4 and 5, of torchvision."""

from __future__ import annotations

from collections.abc import Iterable

from vit_jax.interop import names

_PARTS = ('query', 'key', 'value')


def _below(theirs: str, ours: str, rows: Iterable[tuple[str, str]]) -> names.Table:
    return tuple((f'{theirs}.{a}', f'{ours}/{b}') for a, b in rows)


def _resnet(prefix: str) -> names.Table:
    """Torchvision's names."""
    block = f'{prefix}layer{{1}}.{{0}}'
    return (
        (f'{prefix}conv1', 'backbone/root/conv'),
        (f'{prefix}bn1', 'backbone/root/norm'),
        *_below(
            block,
            'backbone/stage_{0}/block_{0}',
            (
                ('conv{1}', 'conv{1}'),
                ('bn{1}', 'norm{1}'),
                ('downsample.0', 'proj'),
                ('downsample.1', 'proj_norm'),
            ),
        ),
    )


def _transformers_resnet(prefix: str) -> names.Table:
    """Names of transformers' own ResNet."""
    return (
        (f'{prefix}embedder.embedder.convolution', 'backbone/root/conv'),
        (f'{prefix}embedder.embedder.normalization', 'backbone/root/norm'),
        *_below(
            f'{prefix}encoder.stages.{{0}}.layers.{{0}}',
            'backbone/stage_{0}/block_{0}',
            (
                ('layer.{0}.convolution', 'conv{1}'),
                ('layer.{0}.normalization', 'norm{1}'),
                ('shortcut.convolution', 'proj'),
                ('shortcut.normalization', 'proj_norm'),
            ),
        ),
    )


def _attention(theirs: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Names of transformers, and of the parts of PyTorch's layer, whose projections are fused."""
    return (
        *((f'{theirs}.{part[0]}_proj', f'{ours}/{part}') for part in _PARTS),
        *((f'{theirs}.{part[0]}', f'{ours}/{part}') for part in _PARTS),
        (f'{theirs}.out_proj', f'{ours}/out'),
        (f'{theirs}.o_proj', f'{ours}/out'),
    )


_TRANSFORMERS_BLOCK = (
    *_attention('self_attn', 'attention'),
    *_attention('encoder_attn', 'cross'),
    ('self_attn_layer_norm', 'attention_norm'),
    ('encoder_attn_layer_norm', 'cross_norm'),
    ('final_layer_norm', 'mlp_norm'),
    *((f'{prefix}fc{i}', f'mlp/fc{i}') for prefix in ('', 'mlp.') for i in (1, 2)),
)
_AUTHORS_BLOCK = (*_attention('self_attn', 'attention'), ('norm1', 'attention_norm'))
_AUTHORS_MLP = (('linear1', 'mlp/fc1'), ('linear2', 'mlp/fc2'))

# Of the authors and the hub, then of transformers 5.
_MASK_HEAD: names.Table = (
    *(
        (f'bbox_attention.{part[0]}_{end}', f'bbox_attention/{part}')
        for part in _PARTS[:2]
        for end in ('linear', 'proj')
    ),
    ('mask_head.lay{1}', 'mask_head/conv_{0}'),
    ('mask_head.gn{1}', 'mask_head/norm_{0}'),
    ('mask_head.adapter{1}', 'mask_head/adapter_{0}'),
    ('mask_head.out_lay', 'mask_head/out'),
    ('mask_head.conv{1}.conv', 'mask_head/conv_{0}'),
    ('mask_head.conv{1}.norm', 'mask_head/norm_{0}'),
    ('mask_head.fpn_stages.{0}.fpn_adapter', 'mask_head/adapter_{0}'),
    *(
        (f'mask_head.fpn_stages.{i}.refine.{kind}', f'mask_head/{kind}_{i + 2}')
        for i in range(3)
        for kind in ('conv', 'norm')
    ),
    ('mask_head.output_conv', 'mask_head/out'),
)

# Of several rows with the same right side the first is written: names of transformers 4.
TABLE: names.Table = (
    *_MASK_HEAD,
    *(
        row
        for prefix in ('model.backbone.conv_encoder.model.', 'model.backbone.model.')
        for row in (*_transformers_resnet(prefix), *_resnet(prefix))
    ),
    *_resnet('backbone.0.body.'),
    *_resnet(''),
    *(
        row
        for stack in ('encoder', 'decoder')
        for row in _below(
            f'model.{stack}.layers.{{0}}', f'{stack}/block_{{0}}', _TRANSFORMERS_BLOCK
        )
    ),
    ('model.encoder.layernorm', 'encoder/norm'),  # of a Table Transformer
    ('model.decoder.layernorm', 'decoder/norm'),
    ('model.input_projection', 'input_proj'),
    ('model.query_position_embeddings.weight', 'query_embed'),
    ('class_labels_classifier', 'class_embed'),
    ('bbox_predictor.layers.{0}', 'bbox_embed/layer_{0}'),
    *_below(
        'transformer.encoder.layers.{0}',
        'encoder/block_{0}',
        (*_AUTHORS_BLOCK, *_AUTHORS_MLP, ('norm2', 'mlp_norm')),
    ),
    *_below(
        'transformer.decoder.layers.{0}',
        'decoder/block_{0}',
        (
            *_AUTHORS_BLOCK,
            *_attention('multihead_attn', 'cross'),
            ('norm2', 'cross_norm'),
            *_AUTHORS_MLP,
            ('norm3', 'mlp_norm'),
        ),
    ),
    ('transformer.encoder.norm', 'encoder/norm'),
    ('transformer.decoder.norm', 'decoder/norm'),
    ('input_proj', 'input_proj'),
    ('query_embed.weight', 'query_embed'),
    ('class_embed', 'class_embed'),
    ('bbox_embed.layers.{0}', 'bbox_embed/layer_{0}'),
)
