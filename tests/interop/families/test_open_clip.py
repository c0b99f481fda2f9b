"""OpenCLIP: its names on top of transformers' computation."""

import json
import re

import numpy as np
import pytest
from helpers.transformers_clip import (
    MEAN,
    OLD_END,
    SIZE,
    STD,
    VOCAB,
    batch,
    ours,
    reference,
    theirs,
)

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')
pytest.importorskip('safetensors')

# transformers' names, and those of open_clip.
NAMES = {
    r'(text|vision)_model\.encoder\.layers': r'\1_model.transformer.resblocks',
    r'(.*)\.self_attn\.out_proj': r'\1.attn.out_proj',
    r'(.*)\.self_attn\.(q|k|v)_proj': r'\1.attn.\2',
    r'(.*)\.layer_norm(\d)': r'\1.ln_\2',
    r'(.*)\.mlp\.fc1': r'\1.mlp.c_fc',
    r'(.*)\.mlp\.fc2': r'\1.mlp.c_proj',
    r'vision_model\.embeddings\.class_embedding': 'visual.class_embedding',
    r'vision_model\.embeddings\.patch_embedding': 'visual.conv1',
    r'vision_model\.embeddings\.position_embedding\.weight': 'visual.positional_embedding',
    r'vision_model\.pre_layrnorm': 'visual.ln_pre',
    r'vision_model\.post_layernorm': 'visual.ln_post',
    r'vision_model\.': 'visual.',
    r'visual_projection\.weight': 'visual.proj',
    r'text_model\.embeddings\.token_embedding': 'token_embedding',
    r'text_model\.embeddings\.position_embedding\.weight': 'positional_embedding',
    r'text_model\.final_layer_norm': 'ln_final',
    r'text_model\.': '',
    r'text_projection\.weight': 'text_projection',
}
CONFIG = {
    'model_cfg': {
        'embed_dim': 5,
        'quick_gelu': True,
        'vision_cfg': {
            **{'image_size': SIZE, 'layers': 2, 'width': 16, 'head_width': 8, 'patch_size': 4},
        },
        'text_cfg': {'context_length': 6, 'vocab_size': VOCAB, 'width': 8, 'heads': 4, 'layers': 2},
    },
    'preprocess_cfg': {
        **{'mean': list(MEAN), 'std': list(STD)},
        **{'interpolation': 'bicubic', 'resize_mode': 'squash'},
    },
}


def open_clip(model, text=''):
    """The arrays by open_clip's names; those of texts below `text`, as with `custom_text`."""
    flat, parts = {}, {}
    for name, tensor in model.state_dict().items():
        if name.endswith('position_ids'):
            continue
        for old, new in NAMES.items():
            name = re.sub(f'^{old}', new, name)
        if not name.startswith(('visual.', 'logit_scale')):
            name = text + name
        if match := re.fullmatch(r'(.*\.attn)\.([qkv])\.(weight|bias)', name):
            parts.setdefault(f'{match[1]}.in_proj_{match[3]}', {})[match[2]] = tensor.numpy()
        else:
            is_projection = name.endswith(('visual.proj', 'text_projection'))
            flat[name] = (tensor.T if is_projection else tensor).numpy()
    return flat | {n: np.concatenate([part[x] for x in 'qkv']) for n, part in parts.items()}


def save(folder, flat, config=CONFIG):
    files.write_safetensors(folder / 'open_clip_model.safetensors', flat)
    (folder / 'open_clip_config.json').write_text(json.dumps(config))
    return folder


@pytest.mark.parity
@pytest.mark.parametrize('text', ['', 'text.'])
def test_logits(text, tmp_path):
    model, data = reference(eos=OLD_END), batch(VOCAB - 1)
    flat = open_clip(model, text)
    assert {'visual.proj', f'{text}text_projection', f'{text}ln_final.weight'} <= flat.keys()
    trained = interop.read(save(tmp_path, flat))
    assert trained.notes == () and trained.config.model.name == 'clip'
    assert f"resize(({SIZE}, {SIZE}), 'bicubic')" in trained.transforms
    logits, loss = ours(trained, data)
    expected = theirs(model, data)
    scale = float(expected.logits_per_image.abs().max())
    np.testing.assert_allclose(logits, expected.logits_per_image, atol=1e-5 * scale)
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)


def test_towers(tmp_path):
    model = reference(eos=OLD_END)
    save(tmp_path, open_clip(model))
    whole = interop.read(tmp_path)
    vision, text = interop.read(f'{tmp_path}:vision'), interop.read(f'{tmp_path}:text')
    kernel = whole.params['image']['patch_embed']['kernel']
    np.testing.assert_array_equal(vision.params['patch_embed']['kernel'], kernel)
    projection = model.visual_projection.weight.detach().numpy().T
    np.testing.assert_array_equal(vision.params['head']['kernel'], projection)
    assert text.config.model.name == 'text_encoder' and text.model_config['num_classes'] == 5


def test_what_is_refused_is_named(tmp_path):
    flat = open_clip(reference())

    def changed(tower, **keys):
        model = CONFIG['model_cfg']
        return CONFIG | {'model_cfg': model | {tower: model[tower] | keys}}

    for config, message in [
        (changed('vision_cfg', attentional_pool=True), 'vision_cfg.attentional_pool True'),
        (changed('vision_cfg', timm_model_name='vit_x'), "vision_cfg.timm_model_name 'vit_x'"),
        (changed('text_cfg', hf_model_name='roberta'), "text_cfg.hf_model_name 'roberta'"),
        (changed('vision_cfg', layers=[3, 4, 6, 3]), 'the ResNet of vision_cfg.layers'),
    ]:
        with pytest.raises(UserError, match=f'OpenCLIP: no model here has {re.escape(message)}'):
            interop.read(save(tmp_path, flat, config))
    more = {'visual.transformer.resblocks.0.ls_1.gamma': np.ones(16, np.float32)}
    save(tmp_path, flat | more)
    with pytest.raises(UserError, match=r'no part called visual.transformer.resblocks.0.ls_1'):
        interop.read(tmp_path)
    save(tmp_path, flat)
    (tmp_path / 'open_clip_config.json').unlink()
    with pytest.raises(UserError, match=r'unknown without open_clip_config.json: put it beside'):
        interop.read(tmp_path)
