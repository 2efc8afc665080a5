"""Names of published checkpoints, mapped one to one to the arrays of a tree."""

import math
import random

import jax
import numpy as np
import pytest
from key_lists import GEMMA_2_2B, LLAMA_3_8B, VIT_BASE_16
from safetensors.numpy import save_file

import treeshard as ts
from treeshard.interchange import map_tensors, save_safetensors, tensor_shapes

DECODER = [
    (r"model\.embed_tokens\.weight", "embed"),
    (r"model\.layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.weight", r"layers/\2"),
    (r"model\.layers\.(?P<layer>\d+)\.(\w+)_layernorm\.weight", r"layers/norm_\2"),
    (r"model\.norm\.weight", "norm"),
]
VIT = [
    (r"vit\.embeddings\.(cls_token|position_embeddings)", r"\1"),
    (r"vit\.embeddings\.patch_embeddings\.projection\.(weight|bias)", r"patch/\1"),
    (r"vit\.encoder\.layer\.(?P<layer>\d+)\.attention\.attention\.(\w+)\.(\w+)", r"layers/\2/\3"),
    (r"vit\.encoder\.layer\.(?P<layer>\d+)\.attention\.output\.dense\.(\w+)", r"layers/out/\2"),
    (r"vit\.encoder\.layer\.(?P<layer>\d+)\.intermediate\.dense\.(\w+)", r"layers/up/\2"),
    (r"vit\.encoder\.layer\.(?P<layer>\d+)\.output\.dense\.(\w+)", r"layers/down/\2"),
    (r"vit\.encoder\.layer\.(?P<layer>\d+)\.layernorm_(\w+)\.(\w+)", r"layers/norm_\2/\3"),
    (r"vit\.layernorm\.(\w+)", r"norm/\1"),
    (r"classifier\..*", None),  # another head is trained
]


@pytest.mark.parametrize(
    ("keys", "count", "elements"),
    [
        (LLAMA_3_8B, 291, 8_030_261_248),
        (GEMMA_2_2B, 288, 2_614_341_888),
        (VIT_BASE_16, 200, 86_567_656),
    ],
    ids=["llama", "gemma", "vit"],
)
def test_the_lists_have_the_published_sizes(keys, count, elements) -> None:
    assert len(keys) == count
    assert sum(map(math.prod, keys.values())) == elements


@pytest.mark.parametrize(
    ("keys", "pairs", "arrays", "layers"),
    [
        (LLAMA_3_8B, [*DECODER, (r"lm_head\.weight", "head")], 12, 32),
        (GEMMA_2_2B, DECODER, 13, 26),
        (VIT_BASE_16, VIT, 22, 12),
    ],
    ids=["llama", "gemma", "vit"],
)
def test_every_tensor_has_one_place(keys, pairs, arrays, layers) -> None:
    shuffled = list(keys)
    random.Random(0).shuffle(shuffled)
    found = map_tensors(shuffled, pairs)
    assert len(found) == arrays
    places = jax.tree.leaves(found)
    assert len({*places}) == len(places)
    assert {*places} | {key for key in keys if key.startswith("classifier")} == {*keys}
    stacked = [names for name, names in found.items() if name.startswith("layers/")]
    assert {len(names) for names in stacked} == {layers}
    for names in stacked:  # in the order of their numbers, not of their letters
        assert [next(filter(str.isdigit, name.split("."))) for name in names] == [
            str(i) for i in range(layers)
        ]
        assert len({keys[name] for name in names}) == 1


@pytest.mark.parametrize(
    ("names", "pairs", "message"),
    [
        (
            ["a", "rotary"],
            [("a", "a")],
            "map_tensors: rotary: no pattern matches it. `(pattern, None)` leaves it out.",
        ),
        (
            ["a"],
            [("a", "a"), ("b", "b")],
            "map_tensors: pattern 1 'b': no tensor matches it first.",
        ),
        (
            ["h.0.q", "h.1.q"],
            [(r"h\.(\d+)\.q", "q")],
            r"map_tensors: q: the name of h.0.q and h.1.q. Write the groups that tell them apart"
            r" into the name (`\1`), or call the number of a layer `(?P<layer>\d+)`.",
        ),
        (
            ["h.0.q", "h.3.q"],
            [(r"h\.(?P<layer>\d+)\.q", "q")],
            "map_tensors: q: of 4 layers, there is none with number 1, 2.",
        ),
        (
            ["x", "y"],
            [("z", "z")],
            "map_tensors: 3 names do not fit:\n"
            "  x: no pattern matches it. `(pattern, None)` leaves it out.\n"
            "  y: no pattern matches it. `(pattern, None)` leaves it out.\n"
            "  pattern 0 'z': no tensor matches it first.",
        ),
    ],
)
def test_what_does_not_fit_is_listed(names, pairs, message) -> None:
    with pytest.raises(ts.errors.MismatchError) as raised:
        map_tensors(names, pairs)
    assert str(raised.value) == message


def test_a_stacked_tensor_beside_a_single_one_of_its_name() -> None:
    pairs = [(r"h\.(?P<layer>\d+)\.q", "q"), ("q", "q")]
    with pytest.raises(ts.errors.MismatchError, match="q: the name of h.0.q and q"):
        map_tensors(["h.0.q", "q"], pairs)


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
