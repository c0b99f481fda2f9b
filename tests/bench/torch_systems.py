"""Training steps of PyTorch that `gpu.py` times: a module and its loss on a random batch.

Every function takes the number of images and a device, and returns the implementation's name, the
module, and a function without arguments that computes the loss. Images are uint8 on the device, as
those of this package are.
"""

from __future__ import annotations

import contextlib

import numpy as np

CLASSES, LABEL_SMOOTHING = 1000, 0.1
BOXES, FRAME = 8, 1344  # DETR: objects of an image, and its sides in pixels
TOKENS, VOCABULARY = 64, 32000  # SigLIP's texts


def vit(name, images, size, device):
    """timm's ViT without dropout, or that of transformers where there is no timm."""
    from vit_jax.models import vit

    v = vit.variant(name)
    with contextlib.suppress(ImportError):
        import timm
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(
            img_size=size,
            patch_size=v['patch_size'],
            num_classes=CLASSES,
            embed_dim=v['width'],
            depth=v['depth'],
            num_heads=v['num_heads'],
            mlp_ratio=v['mlp_dim'] / v['width'],
        )
        return f'timm {timm.__version__}', model, classification(model, images, size, device)
    import transformers

    config = transformers.ViTConfig(
        hidden_size=v['width'],
        num_hidden_layers=v['depth'],
        num_attention_heads=v['num_heads'],
        intermediate_size=v['mlp_dim'],
        image_size=size,
        patch_size=v['patch_size'],
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation='sdpa',
    )
    model = logits_of(transformers.ViTForImageClassification(config))
    name = f'transformers {transformers.__version__}'
    return name, model, classification(model, images, size, device)


def swin(images, device, size=224):
    """Swin-T with drop path, timm's or that of transformers."""
    with contextlib.suppress(ImportError):
        import timm

        model = timm.create_model('swin_tiny_patch4_window7_224', drop_path_rate=0.2)
        return f'timm {timm.__version__}', model, classification(model, images, size, device)
    import transformers

    config = transformers.SwinConfig(drop_path_rate=0.2, num_labels=CLASSES, image_size=size)
    model = logits_of(transformers.SwinForImageClassification(config))
    name = f'transformers {transformers.__version__}'
    return name, model, classification(model, images, size, device)


def detr(images, device, size=FRAME):
    """DETR-R50 of transformers in float32; root and first stage are frozen, matching is scipy's."""
    import torch
    import transformers

    backbone = transformers.ResNetConfig(out_features=['stage4'])
    model = transformers.DetrForObjectDetection(
        transformers.DetrConfig(backbone_config=backbone, num_labels=91)
    )
    for name, parameter in model.named_parameters():
        frozen = 'embedder' in name or 'stages.0.' in name
        parameter.requires_grad_(not frozen)  # transformers freezes all stages of its own ResNet
    rng = np.random.default_rng(0)
    pixels = random_images(images, size, device)
    mask = torch.ones((images, size, size), dtype=torch.long, device=device)
    labels = []
    for _ in range(images):
        boxes = rng.uniform(0.2, 0.6, (BOXES, 4)).astype(np.float32)
        kinds = torch.from_numpy(rng.integers(0, 91, BOXES)).to(device)
        labels.append({'class_labels': kinds, 'boxes': torch.from_numpy(boxes).to(device)})

    def loss():
        return model(pixel_values=normalized(pixels), pixel_mask=mask, labels=labels).loss

    return f'transformers {transformers.__version__}', model, loss


def siglip(images, device, size=224):
    """SigLIP with both towers as ViT-B/16, of transformers."""
    import torch
    import transformers

    text = {'vocab_size': VOCABULARY, 'max_position_embeddings': TOKENS}
    config = transformers.SiglipConfig(text_config=text, vision_config={'image_size': size})
    model = transformers.SiglipModel(config)
    pixels = random_images(images, size, device)
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(1, VOCABULARY, (images, TOKENS))).to(device)

    def loss():
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=ids, pixel_values=normalized(pixels), return_loss=True).loss

    return f'transformers {transformers.__version__}', model, loss


SYSTEMS = {
    'B/16': lambda images, device: vit('B/16', images, 224, device),
    'Swin-T': swin,
    'DETR-R50': detr,
    'SigLIP': siglip,
}


def classification(model, images, size, device):
    """Smoothed cross-entropy of a module from images to logits."""
    import torch

    pixels = random_images(images, size, device)
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, CLASSES, images)).to(device)

    def loss():
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(normalized(pixels))
        smoothing = LABEL_SMOOTHING if model.training else 0.0
        return torch.nn.functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing)

    return loss


def logits_of(classifier):
    """A classifier of transformers as a module from images to logits."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = classifier

        def forward(self, pixels):
            return self.classifier(pixels).logits

    return Logits()


def random_images(images, size, device):
    import torch

    shape = images, 3, size, size
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8)).to(device)


def normalized(pixels):
    return pixels.float() / 127.5 - 1
