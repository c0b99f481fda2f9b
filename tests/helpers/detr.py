"""Small DETRs of transformers to compare with, their parameters as ours, and a padded batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.models import detr_panoptic
from vit_jax.models.detr import Model

CLASSES, QUERIES, WIDTH, HEADS = 5, 7, 32, 4
SIZE: dict[str, Any] = {
    'num_classes': CLASSES,
    'layers': (1, 2, 1, 1),
    'backbone_width': 4,
    'num_queries': QUERIES,
    'width': WIDTH,
    'depth': 1,
    'decoder_depth': 2,
    'mlp_dim': 24,
    'dropout': 0.0,
}
MODEL = Model(num_heads=HEADS, **SIZE)
# Transformers wants the width and the heads together to be a multiple of 8.
PANOPTIC_HEADS = 8
PANOPTIC = detr_panoptic.Model(num_heads=PANOPTIC_HEADS, **SIZE)
SIZES = ((96, 128), (75, 131))  # of the images, neither square nor multiples of the stride
PADDED = (100, 140)


@functools.cache
def batch(seed: int = 0) -> dict[str, jax.Array]:
    """Two normalized images padded to one size, the second with two objects, the first with one."""
    rng = np.random.default_rng(seed)
    images = np.zeros((2, *PADDED, 3), np.float32)
    mask = np.zeros((2, *PADDED), bool)
    for i, (height, width) in enumerate(SIZES):
        images[i, :height, :width] = rng.normal(size=(height, width, 3))
        mask[i, :height, :width] = True
    corners = np.sort(rng.uniform(0, 75, (2, 3, 2, 2)), axis=2).reshape(2, 3, 4)
    real = np.arange(3) < np.array([[1], [2]])
    return {
        'image': jnp.asarray(images),
        'pixel_mask': jnp.asarray(mask),
        'boxes': jnp.asarray(corners * real[..., None], jnp.float32),
        'labels': jnp.asarray(rng.integers(CLASSES, size=(2, 3)) * real, jnp.int32),
        'object_mask': jnp.asarray(real),
    }


def sizes(model: Any) -> dict[str, int]:
    """Parameters of a model, by name."""
    images = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    return {path: p.size for path, p in flatten_dict(params, sep='/').items()}


def tensors(batch: dict[str, jax.Array]) -> dict[str, Any]:
    """The inputs of transformers for a batch."""
    import torch

    return {
        'pixel_values': torch.from_numpy(np.array(batch['image'].transpose(0, 3, 1, 2))),
        'pixel_mask': torch.from_numpy(np.array(batch['pixel_mask'])).long(),
    }


def reference() -> Any:
    """A detector of transformers, with parameters and statistics none of which is zero or one."""
    import torch
    import transformers

    torch.manual_seed(0)
    return perturbed(transformers.DetrForObjectDetection(config(HEADS, ['stage4'])))


def panoptic_reference() -> Any:
    """The same with masks, which depend on the query and not on the image alone."""
    import torch
    import transformers

    torch.manual_seed(0)
    stages = [f'stage{i + 1}' for i in range(4)]
    model = perturbed(transformers.DetrForSegmentation(config(PANOPTIC_HEADS, stages)))
    with torch.no_grad():
        model.bbox_attention.q_proj.weight *= 4
        model.mask_head.conv1.conv.weight[:, WIDTH:] *= 100
    return model


def config(heads: int, stages: list[str]) -> Any:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 2, 1, 1],
        layer_type='bottleneck',
        out_features=stages,
    )
    return transformers.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        num_queries=QUERIES,
        num_labels=CLASSES,
        d_model=WIDTH,
        encoder_layers=MODEL.depth,
        decoder_layers=MODEL.decoder_depth,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        dropout=0.0,
        attn_implementation='eager',
    )


def perturbed(model: Any) -> Any:
    """The model with noise on all of its parameters and statistics, for evaluation."""
    import torch

    model = model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Weights large enough for queries to differ; they start at 0.02.
            spread = {1: 0.1, 2: 0.2, 4: 0.02}[p.ndim]
            spread = 2.0 if 'query_position' in name else spread
            p += spread * torch.randn(p.shape, generator=generator)
        for name, buffer in model.named_buffers():
            noise = torch.randn(buffer.shape, generator=generator)
            if name.endswith('running_var'):
                buffer.copy_(0.5 + noise**2)
            elif 'normalization' in name or name.endswith('running_mean'):
                buffer += 0.1 * noise
    return model


def forward(model: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
    """The output of transformers; logits and boxes [L B Q ...] of all layers of its decoder.

    The layer norm of the decoder is applied to what the layers hand on, as in the authors' code:
    with `auxiliary_loss` transformers hands on what it has normalized, which is another model.
    """
    import torch

    hidden: list[Any] = []
    hooks = [
        layer.register_forward_hook(lambda *call: hidden.append(call[-1]))
        for layer in model.model.decoder.layers
    ]
    output = model(**tensors(batch), output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    normed = model.model.decoder.layernorm(torch.stack(hidden))
    logits = model.class_labels_classifier(normed)
    return output, logits, model.bbox_predictor(normed).sigmoid()


def our_params(model: Any) -> dict[str, Any]:
    """Parameters of the model of transformers in our names and layouts."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def dense(name: str) -> dict[str, Any]:
        weight = state[f'{name}.weight'].squeeze()  # of a 1 x 1 convolution, too
        return {'kernel': weight.T, 'bias': state[f'{name}.bias']}

    def norm(name: str) -> dict[str, Any]:
        return {'scale': state[f'{name}.weight'], 'bias': state[f'{name}.bias']}

    def conv(name: str) -> dict[str, Any]:
        return {'kernel': state[f'{name}.convolution.weight'].transpose(2, 3, 1, 0)}

    def frozen(name: str) -> dict[str, Any]:
        weight, bias, mean, var = (
            state[f'{name}.normalization.{part}']
            for part in ('weight', 'bias', 'running_mean', 'running_var')
        )
        scale = weight / np.sqrt(var + 1e-5)
        return {'scale': scale, 'bias': bias - mean * scale}

    count = model.config.encoder_attention_heads

    def heads(name: str, letters: str) -> dict[str, Any]:
        parts = [dense(f'{name}.{letter}_proj') for letter in letters]
        kernels = [part['kernel'].reshape(WIDTH, count, -1) for part in parts]
        biases = [part['bias'].reshape(count, -1) for part in parts]
        return {'kernel': np.stack(kernels, 1), 'bias': np.stack(biases)}

    def attention(name: str, *kernels: str) -> dict[str, Any]:
        out = dense(f'{name}.o_proj')
        out['kernel'] = out['kernel'].reshape(count, -1, WIDTH)
        return {**{letters: heads(name, letters) for letters in kernels}, 'out': out}

    def block(name: str) -> dict[str, Any]:
        found = {
            'attention': attention(f'{name}.self_attn', 'qkv'),
            'attention_norm': norm(f'{name}.self_attn_layer_norm'),
            'mlp': {part: dense(f'{name}.mlp.{part}') for part in ('fc1', 'fc2')},
            'mlp_norm': norm(f'{name}.final_layer_norm'),
        }
        if 'decoder' in name:
            found['cross'] = attention(f'{name}.encoder_attn', 'q', 'kv')
            found['cross_norm'] = norm(f'{name}.encoder_attn_layer_norm')
        return found

    def bottleneck(name: str) -> dict[str, Any]:
        found = {}
        for i in range(3):
            found[f'conv{i + 1}'] = conv(f'{name}.layer.{i}')
            found[f'norm{i + 1}'] = frozen(f'{name}.layer.{i}')
        if f'{name}.shortcut.convolution.weight' in state:
            found |= {'proj': conv(f'{name}.shortcut'), 'proj_norm': frozen(f'{name}.shortcut')}
        return found

    resnet = 'model.backbone.model'
    root = f'{resnet}.embedder.embedder'
    stages = {
        f'stage_{i}': {
            f'block_{j}': bottleneck(f'{resnet}.encoder.stages.{i}.layers.{j}')
            for j in range(depth)
        }
        for i, depth in enumerate(MODEL.resnet.layers)
    }
    encoder, decoder = (
        {f'block_{i}': block(f'model.{part}.layers.{i}') for i in range(depth)}
        for part, depth in (('encoder', MODEL.depth), ('decoder', MODEL.decoder_depth))
    )
    params = {
        'backbone': {'root': {'conv': conv(root), 'norm': frozen(root)}, **stages},
        'input_proj': dense('model.input_projection'),
        'encoder': encoder,
        'decoder': {**decoder, 'norm': norm('model.decoder.layernorm')},
        'query_embed': state['model.query_position_embeddings.weight'],
        'class_embed': dense('class_labels_classifier'),
        'bbox_embed': {f'layer_{i}': dense(f'bbox_predictor.layers.{i}') for i in range(3)},
    }
    return jax.tree.map(jnp.asarray, params)


def panoptic_params(model: Any) -> dict[str, Any]:
    """`our_params` of a model with masks."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def conv(name: str) -> dict[str, Any]:
        kernel = state[f'{name}.weight'].transpose(2, 3, 1, 0)
        return {'kernel': kernel, 'bias': state[f'{name}.bias']}

    def norm(name: str) -> dict[str, Any]:
        return {'scale': state[f'{name}.weight'], 'bias': state[f'{name}.bias']}

    blocks = ['conv1', 'conv2', *(f'fpn_stages.{i}.refine' for i in range(3))]
    head = {'out': conv('mask_head.output_conv')}
    for i, name in enumerate(blocks):
        head[f'conv_{i}'] = conv(f'mask_head.{name}.conv')
        head[f'norm_{i}'] = norm(f'mask_head.{name}.norm')
    for i in range(3):
        head[f'adapter_{i}'] = conv(f'mask_head.fpn_stages.{i}.fpn_adapter')
    both = [f'bbox_attention.{letter}_proj' for letter in 'qk']
    weights = [state[f'{n}.weight'].T.reshape(WIDTH, PANOPTIC_HEADS, -1) for n in both]
    biases = [state[f'{n}.bias'].reshape(PANOPTIC_HEADS, -1) for n in both]
    qk = {'kernel': np.stack(weights, 1), 'bias': np.stack(biases)}
    own = {'mask_head': head, 'bbox_attention': {'qk': qk}}
    return {**our_params(model.detr), **jax.tree.map(jnp.asarray, own)}
