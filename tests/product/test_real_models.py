"""Real models: plans of six trees of the field's libraries, checked by hand leaf by leaf; and a
transformer that trains with leaves that are tied, uneven, adapters, offloaded, on other devices."""

import importlib
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import OFFLOADS
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.mesh import abstract_mesh
from treeshard._planning.plan import Plan

MESH = abstract_mesh("data=2,fsdp=4,tensor=2")
WIDTH, HEADS, HIDDEN, VOCAB = 32, 4, 64, 96


def check(tree: Any, rules: Any, expected: str, *, min_size: int = 64) -> Plan:
    """Compares a plan with lines of path, shape and spec, `{0..1}` standing for two layers."""
    decided = ts.plan(tree, rules, MESH, min_size=min_size)
    decided.check()
    lines = [line.split(maxsplit=2) for line in expected.strip().splitlines()]
    wanted: dict[str, tuple[str, str]] = {}
    for path, shape, spec in lines:
        layers = re.search(r"\{(\d)\.\.(\d)\}", path)
        for layer in range(int(layers[1]), int(layers[2]) + 1) if layers else [None]:
            wanted[re.sub(r"\{\d\.\.\d\}", str(layer), path)] = (shape, spec)
    found = {
        leaf.path: ("x".join(map(str, leaf.shape)) or "()", str(leaf.given))
        for leaf in decided.leaves
    }
    assert found == wanted
    assert jax.tree.structure(decided.structs) == jax.tree.structure(tree)
    assert Plan.from_json(decided.to_json(), like=tree) == decided
    return decided


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    attn: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: Any):
        one, two = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.attn = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=two)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attn(y, y, y, mask)
        return x + jax.vmap(self.mlp)(x)


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: Any, vocab: int = VOCAB, layers: int = 2):
        one, two, *keys = jax.random.split(key, 2 + layers)
        self.embed = eqx.nn.Embedding(vocab, WIDTH, key=one)
        self.blocks = [Block(key) for key in keys]
        self.head = eqx.nn.Linear(WIDTH, vocab, use_bias=False, key=two)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def test_an_equinox_transformer() -> None:
    rules = [
        ("norm|bias", None),
        (r"(query|key|value)_proj|mlp/layers/0", P("tensor", "fsdp")),
        (r"output_proj|mlp/layers/1", P("fsdp", "tensor")),
        ("embed|head", P(("tensor", "fsdp"))),
    ]
    decided = check(
        eqx.filter_eval_shape(Decoder, jax.random.key(0)),
        rules,
        """
        embed/weight                          96x32  P(('tensor', 'fsdp'),)
        blocks/{0..1}/norm/weight             32     P()
        blocks/{0..1}/norm/bias               32     P()
        blocks/{0..1}/attn/query_proj/weight  32x32  P('tensor', 'fsdp')
        blocks/{0..1}/attn/key_proj/weight    32x32  P('tensor', 'fsdp')
        blocks/{0..1}/attn/value_proj/weight  32x32  P('tensor', 'fsdp')
        blocks/{0..1}/attn/output_proj/weight 32x32  P('fsdp', 'tensor')
        blocks/{0..1}/mlp/layers/0/weight     64x32  P('tensor', 'fsdp')
        blocks/{0..1}/mlp/layers/0/bias       64     P()
        blocks/{0..1}/mlp/layers/1/weight     32x64  P('fsdp', 'tensor')
        blocks/{0..1}/mlp/layers/1/bias       32     P()
        head/weight                           96x32  P(('tensor', 'fsdp'),)
        """,
    )
    # By hand: two tables of 96 x 32 and two blocks of 4 x 32 x 32 + 2 x 64 x 32 over 8 devices,
    # and 2 x (2 x 32 + 64 + 32) elements whole.
    assert decided.bytes_per_device() == 4 * ((2 * 3072 + 2 * (4096 + 4096)) // 8 + 2 * 160)
    # MLP's biases of 64 are as large as the floor, and 1% of such a small model.
    assert {finding.code for finding in decided.findings} <= {"left-whole"}


def test_a_published_vision_transformer() -> None:
    try:
        models = importlib.import_module("equimo.vision.models")
    except ModuleNotFoundError:  # Equimo 1, the newest for Python 3.11
        models = importlib.import_module("equimo.models")
    model = eqx.filter_eval_shape(
        lambda key: models.VisionTransformer(
            img_size=32,
            in_channels=3,
            dim=48,
            patch_size=8,
            num_heads=3,
            depths=[2],
            num_classes=10,
            reg_tokens=0,
            key=key,
        ),
        jax.random.key(0),
    )
    rules = [
        ("norm|bias|token|pos_embed", None),
        ("patch_embed", P("fsdp")),
        ("qkv|fc1", P(("fsdp", "tensor"))),
        ("attn/proj|fc2", P(None, ("fsdp", "tensor"))),
        ("head", ts.fsdp("fsdp")),
    ]
    check(
        model,
        rules,
        """
        patch_embed/proj/weight                48x3x8x8  P('fsdp',)
        patch_embed/proj/bias                  48x1x1    P()
        global_pos_embed/weight                17x48     P()
        cls_token                              1x48      P()
        blocks/0/blocks/{0..1}/prenorm/weight  48        P()
        blocks/0/blocks/{0..1}/prenorm/bias    48        P()
        blocks/0/blocks/{0..1}/norm/weight     48        P()
        blocks/0/blocks/{0..1}/norm/bias       48        P()
        blocks/0/blocks/{0..1}/attn/qkv/weight 144x48    P(('fsdp', 'tensor'),)
        blocks/0/blocks/{0..1}/attn/qkv/bias   144       P()
        blocks/0/blocks/{0..1}/attn/proj/weight 48x48    P(None, ('fsdp', 'tensor'))
        blocks/0/blocks/{0..1}/attn/proj/bias  48        P()
        blocks/0/blocks/{0..1}/mlp/fc1/weight  192x48    P(('fsdp', 'tensor'),)
        blocks/0/blocks/{0..1}/mlp/fc1/bias    192       P()
        blocks/0/blocks/{0..1}/mlp/fc2/weight  48x192    P(None, ('fsdp', 'tensor'))
        blocks/0/blocks/{0..1}/mlp/fc2/bias    48        P()
        norm/weight                            48        P()
        norm/bias                              48        P()
        head/weight                            10x48     P(None, 'fsdp')
        head/bias                              10        P()
        """,
    )


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attn")(y)
        hidden = nn.gelu(nn.Dense(HIDDEN, name="up")(x))
        return x + nn.Dense(WIDTH, name="down")(hidden)


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        for _ in range(2):
            x = LinenBlock()(x)
        return embed.attend(x)


def linen_params() -> Any:
    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    return jax.eval_shape(LinenTransformer().init, jax.random.key(0), tokens)["params"]


LINEN_RULES = [
    ("norm|bias", None),
    ("(query|key|value)/kernel", P("fsdp", "tensor")),
    ("out/kernel", P("tensor", None, "fsdp")),
    ("up", P("fsdp", "tensor")),
    ("down", P("tensor", "fsdp")),
    ("Embed", P(None, ("fsdp", "tensor"))),
]
LINEN = """
    Embed_0/embedding                            96x32   P(None, ('fsdp', 'tensor'))
    LinenBlock_{0..1}/norm/bias                  32      P()
    LinenBlock_{0..1}/norm/scale                 32      P()
    LinenBlock_{0..1}/attn/query/kernel          32x4x8  P('fsdp', 'tensor')
    LinenBlock_{0..1}/attn/query/bias            4x8     P()
    LinenBlock_{0..1}/attn/key/kernel            32x4x8  P('fsdp', 'tensor')
    LinenBlock_{0..1}/attn/key/bias              4x8     P()
    LinenBlock_{0..1}/attn/value/kernel          32x4x8  P('fsdp', 'tensor')
    LinenBlock_{0..1}/attn/value/bias            4x8     P()
    LinenBlock_{0..1}/attn/out/kernel            4x8x32  P('tensor', None, 'fsdp')
    LinenBlock_{0..1}/attn/out/bias              32      P()
    LinenBlock_{0..1}/up/kernel                  32x64   P('fsdp', 'tensor')
    LinenBlock_{0..1}/up/bias                    64      P()
    LinenBlock_{0..1}/down/kernel                64x32   P('tensor', 'fsdp')
    LinenBlock_{0..1}/down/bias                  32      P()
"""


def test_a_flax_linen_transformer() -> None:
    check(linen_params(), LINEN_RULES, LINEN)


def test_an_optax_state() -> None:
    """Clipped, masked, accumulated AdamW: by the parameters' rules, and by following."""
    params = linen_params()
    optimizer = optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        ),
        every_k_schedule=4,
    )
    state = jax.eval_shape(optimizer.init, params)
    copies = ["inner_opt_state/1/0/mu", "inner_opt_state/1/0/nu", "acc_grads"]
    lines = [line.strip() for line in LINEN.strip().splitlines()]
    expected = [f"{copy}/{line}" for copy in copies for line in lines]
    counts = ["mini_step", "gradient_step", "inner_opt_state/1/0/count"]
    scalars = [f"{name} () P()" for name in counts]
    decided = check(state, LINEN_RULES, "\n".join([*expected, *scalars]))
    followed = ts.plan(params, LINEN_RULES, MESH, min_size=64).follow(state)
    assert followed == decided


def test_a_flax_nnx_transformer() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    class Transformer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    model = nnx.eval_shape(lambda: Transformer(nnx.Rngs(0)))
    rules = [
        ("norm|bias|scale", None),
        ("attn/(query|key|value)|up", P("fsdp", "tensor")),
        ("attn/out", P("tensor", None, "fsdp")),
        ("down", P("tensor", "fsdp")),
        ("embed", P("tensor", "fsdp")),
    ]
    check(
        nnx.state(model, nnx.Param),
        rules,
        """
        blocks/{0..1}/attn/key/bias      4x8     P()
        blocks/{0..1}/attn/key/kernel    32x4x8  P('fsdp', 'tensor')
        blocks/{0..1}/attn/out/bias      32      P()
        blocks/{0..1}/attn/out/kernel    4x8x32  P('tensor', None, 'fsdp')
        blocks/{0..1}/attn/query/bias    4x8     P()
        blocks/{0..1}/attn/query/kernel  32x4x8  P('fsdp', 'tensor')
        blocks/{0..1}/attn/value/bias    4x8     P()
        blocks/{0..1}/attn/value/kernel  32x4x8  P('fsdp', 'tensor')
        blocks/{0..1}/down/kernel        64x32   P('tensor', 'fsdp')
        blocks/{0..1}/norm/scale         32      P()
        blocks/{0..1}/up/kernel          32x64   P('fsdp', 'tensor')
        embed/embedding                  96x32   P('tensor', 'fsdp')
        """,
    )


def haiku_params() -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """As Haiku names them: module names with slashes and `~`, over `w` and `b`."""

    def linear(rows: int, columns: int) -> dict[str, jax.ShapeDtypeStruct]:
        w, b = ((rows, columns), (columns,))
        return {"b": jax.ShapeDtypeStruct(b, "float32"), "w": jax.ShapeDtypeStruct(w, "float32")}

    params = {"transformer/~/embed": linear(VOCAB, WIDTH)}
    for layer in ("layer_0", "layer_1"):
        for name in ("query", "key", "value", "linear"):
            params[f"transformer/{layer}/~/attention/{name}"] = linear(WIDTH, WIDTH)
        params[f"transformer/{layer}/~/mlp/linear"] = linear(WIDTH, HIDDEN)
        params[f"transformer/{layer}/~/mlp/linear_1"] = linear(HIDDEN, WIDTH)
    return params


def test_a_haiku_style_dict() -> None:
    rules = [
        ("/b$", None),
        ("(query|key|value|mlp/linear)/w$", P("fsdp", "tensor")),
        ("(attention/linear|linear_1)/w$", P("tensor", "fsdp")),
        ("embed/w", P("fsdp", "tensor")),
    ]
    decided = check(
        haiku_params(),
        rules,
        """
        transformer/layer_{0..1}/~/attention/key/b     32    P()
        transformer/layer_{0..1}/~/attention/key/w     32x32 P('fsdp', 'tensor')
        transformer/layer_{0..1}/~/attention/linear/b  32    P()
        transformer/layer_{0..1}/~/attention/linear/w  32x32 P('tensor', 'fsdp')
        transformer/layer_{0..1}/~/attention/query/b   32    P()
        transformer/layer_{0..1}/~/attention/query/w   32x32 P('fsdp', 'tensor')
        transformer/layer_{0..1}/~/attention/value/b   32    P()
        transformer/layer_{0..1}/~/attention/value/w   32x32 P('fsdp', 'tensor')
        transformer/layer_{0..1}/~/mlp/linear/b        64    P()
        transformer/layer_{0..1}/~/mlp/linear/w        32x64 P('fsdp', 'tensor')
        transformer/layer_{0..1}/~/mlp/linear_1/b      32    P()
        transformer/layer_{0..1}/~/mlp/linear_1/w      64x32 P('tensor', 'fsdp')
        transformer/~/embed/b                          32    P()
        transformer/~/embed/w                          96x32 P('fsdp', 'tensor')
        """,
    )
    assert "transformer/layer_{0..1}/~/mlp/linear/w " in str(decided)


def test_a_wrong_hand_would_be_seen() -> None:
    for line in ("w 8x8 P()", "w 8x9 P('fsdp',)", "v 8x8 P('fsdp',)"):
        with pytest.raises(AssertionError):
            check({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", P("fsdp"))], line)


# ------------------------------------------------------------------ training


class Case(NamedTuple):
    """How the decoder of this file is trained.

    Attributes:
        rules: The rules, before one for all other leaves.
        vocab: The size of the vocabulary.
        tied: Whether the head uses the weight of the embedding, by `equinox.nn.Shared`.
        trained: What is trained: the model, or a LoRA adapter of its head.
    """

    rules: list[Any] = []  # noqa: RUF012
    vocab: int = VOCAB
    tied: bool = False
    trained: str = "model"


CASES = {
    "tied": Case(tied=True),
    "uneven": Case([("embed|head", P("fsdp"))], vocab=97),
    "adapters": Case([("lora", ts.follow("model/head/weight"))], trained="lora"),
    "offloaded": Case([("opt", ts.fsdp("fsdp", min_size=64, memory="pinned_host"))]),
    "disjoint": Case(),
}
OPTIMIZER = optax.adamw(1e-2)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, 6)).astype("int32")


def init(key: jax.Array, case: Case) -> Any:
    model = Decoder(key, case.vocab, layers=1)
    if case.tied:
        model = eqx.nn.Shared(model, lambda m: m.head.weight, lambda m: m.embed.weight)
    a, b = jax.random.normal(key, (4, WIDTH)), jnp.zeros((case.vocab, 4))
    state = {"model": model, "lora": {"a": a, "b": b}}
    return {**state, "opt": OPTIMIZER.init(eqx.filter(state[case.trained], eqx.is_array))}


def step_of(case: Case, plan: Plan | None) -> Any:
    """A step that leaves what is not trained as it is."""

    def loss_fn(trained: Any, state: Any, tokens: jax.Array) -> jax.Array:
        state = {"model": state["model"], "lora": state["lora"], case.trained: trained}
        if plan is not None:
            state = {key: ts.unpad_leaves(ts.unshard(tree), plan) for key, tree in state.items()}
        model, lora = state["model"], state["lora"]
        if case.tied:
            model = model()
        head = model.head.weight + lora["b"] @ lora["a"]
        logits = jax.vmap(eqx.tree_at(lambda m: m.head.weight, model, head))(tokens)
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return each.mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        trained = state[case.trained]
        loss, grads = eqx.filter_value_and_grad(loss_fn)(trained, state, tokens)
        updates, opt = OPTIMIZER.update(grads, state["opt"], eqx.filter(trained, eqx.is_array))
        new = eqx.apply_updates(trained, updates)
        return {**state, "opt": opt, case.trained: new}, loss

    return step


@pytest.mark.usefixtures("quick_compiles", "standard_promotion")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=OFFLOADS if name == "offloaded" else ()) for name in CASES]
)
def test_a_transformer_trains_as_on_one_device(name: str) -> None:
    case = CASES[name]
    devices = jax.devices()[:4] if name == "disjoint" else jax.devices()
    mesh = ts.make_mesh({"fsdp": len(devices)}, devices=devices)
    rules = [*case.rules, (".*", ts.fsdp("fsdp", min_size=64))]
    key = jax.random.key(0)
    state, plan = ts.init_sharded(init, key, case, rules=rules, mesh=mesh, min_size=64, pad=True)
    expected = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x,
        ts.gather(ts.unpad_leaves(state, plan)),
    )
    step = ts.jit_step(step_of(case, plan), plan)
    one_device = eqx.filter_jit(step_of(case, None))
    for _ in range(2):
        state, loss = step(state, TOKENS)
        expected, wanted = one_device(expected, TOKENS)
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)

    given = {leaf.path: leaf for leaf in plan.leaves}
    model = state["model"]
    match name:
        case "tied":
            weights = [path for path in given if path.startswith("model/")]
            assert "model/pytree/embed/weight" in weights
            assert "model/pytree/head/weight" not in weights
            assert model().head.weight is model().embed.weight
        case "uneven":
            assert model.head.weight.shape == (104, WIDTH)
            assert not np.any(np.asarray(model.head.weight)[97:])
            assert ts.unpad_leaves(model, plan).head.weight.shape == (97, WIDTH)
        case "adapters":
            assert given["lora/b"].given == given["model/head/weight"].given == P("fsdp")
        case "offloaded":
            moments = [leaf for leaf in plan.leaves if "/mu/" in leaf.path and leaf.size >= 64]
            assert {leaf.memory for leaf in moments} == {"pinned_host"}
            assert state["opt"][0].mu.head.weight.sharding.memory_kind == "pinned_host"
        case _:  # to a sampler on the other devices
            others = plan.on(ts.make_mesh("fsdp=4", devices=jax.devices()[4:]))
            moved = ts.reshard(state, others)
            assert moved["model"].head.weight.devices() == set(jax.devices()[4:])
            for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(state), strict=True):
                assert callable(x) or np.array_equal(x, y)
