"""The names and shapes of published checkpoints, as their safetensors headers list them."""

Keys = dict[str, tuple[int, ...]]


def _of_layers(outer: Keys, layers: int, prefix: str, inner: Keys) -> Keys:
    return outer | {f"{prefix}.{i}.{name}": inner[name] for i in range(layers) for name in inner}


LLAMA_3_8B = _of_layers(
    {
        "model.embed_tokens.weight": (128256, 4096),
        "model.norm.weight": (4096,),
        "lm_head.weight": (128256, 4096),
    },
    32,
    "model.layers",
    {
        "input_layernorm.weight": (4096,),
        "mlp.down_proj.weight": (4096, 14336),
        "mlp.gate_proj.weight": (14336, 4096),
        "mlp.up_proj.weight": (14336, 4096),
        "post_attention_layernorm.weight": (4096,),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
    },
)
# The head is the embedding: the file has one tensor for both.
GEMMA_2_2B = _of_layers(
    {"model.embed_tokens.weight": (256000, 2304), "model.norm.weight": (2304,)},
    26,
    "model.layers",
    {
        "input_layernorm.weight": (2304,),
        "mlp.down_proj.weight": (2304, 9216),
        "mlp.gate_proj.weight": (9216, 2304),
        "mlp.up_proj.weight": (9216, 2304),
        "post_attention_layernorm.weight": (2304,),
        "post_feedforward_layernorm.weight": (2304,),
        "pre_feedforward_layernorm.weight": (2304,),
        "self_attn.k_proj.weight": (1024, 2304),
        "self_attn.o_proj.weight": (2304, 2048),
        "self_attn.q_proj.weight": (2048, 2304),
        "self_attn.v_proj.weight": (1024, 2304),
    },
)
_DENSE = {
    "attention.attention.key": (768, 768),
    "attention.attention.query": (768, 768),
    "attention.attention.value": (768, 768),
    "attention.output.dense": (768, 768),
    "intermediate.dense": (3072, 768),
    "output.dense": (768, 3072),
    "layernorm_after": (768,),
    "layernorm_before": (768,),
}
VIT_BASE_16 = _of_layers(
    {
        "vit.embeddings.cls_token": (1, 1, 768),
        "vit.embeddings.patch_embeddings.projection.bias": (768,),
        "vit.embeddings.patch_embeddings.projection.weight": (768, 3, 16, 16),
        "vit.embeddings.position_embeddings": (1, 197, 768),
        "vit.layernorm.bias": (768,),
        "vit.layernorm.weight": (768,),
        "classifier.bias": (1000,),
        "classifier.weight": (1000, 768),
    },
    12,
    "vit.encoder.layer",
    {f"{name}.weight": shape for name, shape in _DENSE.items()}
    | {f"{name}.bias": shape[:1] for name, shape in _DENSE.items()},
)
