"""Names of published checkpoints, mapped one to one to the arrays of a tree."""

import random

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import treeshard as ts
from treeshard.interchange import map_tensors, save_safetensors, tensor_shapes

# Of Llama 3 8B, as the headers of its files list them.
OF_A_LAYER = ["input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj"]
OF_A_LAYER += ["mlp.up_proj", *(f"self_attn.{x}_proj" for x in "koqv")]
NAMES = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
NAMES += [f"model.layers.{i}.{name}.weight" for i in range(32) for name in OF_A_LAYER]
PAIRS = [
    (r"model\.embed_tokens\.weight", "embed"),
    (r"model\.layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.weight", r"layers/\2"),
    (r"model\.layers\.(?P<layer>\d+)\.(\w+)_layernorm\.weight", r"layers/norm_\2"),
    (r"model\.norm\.weight", "norm"),
    (r"lm_head\..*", None),  # another head is trained
]


def test_every_tensor_has_one_place() -> None:
    found = map_tensors(random.Random(0).sample(NAMES, len(NAMES)), PAIRS)
    assert len(found) == 2 + len(OF_A_LAYER)
    assert sorted([*jax.tree.leaves(found), "lm_head.weight"]) == sorted(NAMES)
    assert found["embed"] == "model.embed_tokens.weight"
    in_order = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(32)]
    assert list(found["layers/q"]) == in_order


@pytest.mark.parametrize(
    ("names", "pairs", "message"),
    [
        (
            ["h.0.q", "q"],
            [(r"h\.(?P<layer>\d+)\.q", "q"), ("q", "q")],
            r"map_tensors: q: h.0.q and q all get this name. Write the groups that differ into"
            r" the name (`\1`), or call the number of a layer `(?P<layer>\d+)`.",
        ),
        (
            ["h.0.q", "h.3.q"],
            [(r"h\.(?P<layer>\d+)\.q", "q")],
            "map_tensors: q: layers are missing: 1, 2 of 4.",
        ),
        (
            ["x", "y"],
            [("z", "z")],
            "map_tensors: 3 names do not fit:\n"
            "  x: no pattern matches it. `(pattern, None)` leaves it out.\n"
            "  y: no pattern matches it. `(pattern, None)` leaves it out.\n"
            "  pattern 0 'z': it matches no tensor that earlier patterns leave over.",
        ),
    ],
)
def test_what_does_not_fit_is_listed(names, pairs, message) -> None:
    with pytest.raises(ts.errors.MismatchError) as raised:
        map_tensors(names, pairs)
    assert str(raised.value) == message


def test_shapes_are_those_of_the_headers(file, tmp_path) -> None:
    arrays = {"a.b": np.ones((3, 2), np.float16), "c": np.zeros((), np.int32)}
    save_file(arrays, file)
    assert tensor_shapes(file) == {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()
    }
    save_safetensors(tmp_path / "parts.safetensors", arrays, max_file_size=12)
    assert sorted(tensor_shapes(tmp_path / "parts.safetensors")) == ["a.b", "c"]
    with pytest.raises(ts.errors.CheckpointError, match=r"none.safetensors"):
        tensor_shapes(tmp_path / "none.safetensors")
