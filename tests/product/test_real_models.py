"""Plans of a Linen transformer and of its optimizer's state, checked by hand leaf by leaf."""

import jax
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.mesh import abstract_mesh

MESH = abstract_mesh("data=2,fsdp=4,tensor=2")
WIDTH, HEADS, HIDDEN, VOCAB = 32, 4, 64, 96


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attn")(y)
        hidden = nn.gelu(nn.Dense(HIDDEN, name="up")(x))
        return x + nn.Dense(WIDTH, name="down")(hidden)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        for _ in range(2):
            x = Block()(x)
        return embed.attend(x)


RULES = [
    ("norm|bias", None),
    ("(query|key|value)/kernel", P("fsdp", "tensor")),
    ("out/kernel", P("tensor", None, "fsdp")),
    ("up", P("fsdp", "tensor")),
    ("down", P("tensor", "fsdp")),
    ("Embed", P(None, ("fsdp", "tensor"))),
]
PLANNED = """
    Embed_0/embedding               96x32   P(None, ('fsdp', 'tensor'))
    Block_{0..1}/norm/bias          32      P()
    Block_{0..1}/norm/scale         32      P()
    Block_{0..1}/attn/query/kernel  32x4x8  P('fsdp', 'tensor')
    Block_{0..1}/attn/query/bias    4x8     P()
    Block_{0..1}/attn/key/kernel    32x4x8  P('fsdp', 'tensor')
    Block_{0..1}/attn/key/bias      4x8     P()
    Block_{0..1}/attn/value/kernel  32x4x8  P('fsdp', 'tensor')
    Block_{0..1}/attn/value/bias    4x8     P()
    Block_{0..1}/attn/out/kernel    4x8x32  P('tensor', None, 'fsdp')
    Block_{0..1}/attn/out/bias      32      P()
    Block_{0..1}/up/kernel          32x64   P('fsdp', 'tensor')
    Block_{0..1}/up/bias            64      P()
    Block_{0..1}/down/kernel        64x32   P('tensor', 'fsdp')
    Block_{0..1}/down/bias          32      P()
"""


def planned_by_hand() -> dict[str, tuple[str, str]]:
    """The shape and the spec of each leaf, by path."""
    lines = [line.split(maxsplit=2) for line in PLANNED.strip().splitlines()]
    return {
        path.replace("{0..1}", layer): (shape, spec)
        for path, shape, spec in lines
        for layer in ("0", "1")
    }


def found_in(plan: ts.Plan) -> dict[str, tuple[str, str]]:
    return {
        leaf.path: ("x".join(map(str, leaf.shape)) or "()", str(leaf.given)) for leaf in plan.leaves
    }


def test_clipped_masked_and_accumulated_adamw_of_a_transformer() -> None:
    """By the parameters' rules, and by following the parameters."""
    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    params = jax.eval_shape(Transformer().init, jax.random.key(0), tokens)["params"]
    plan = ts.plan(params, RULES, MESH, min_size=64)
    by_hand = planned_by_hand()
    assert found_in(plan) == by_hand
    # By hand: the table, and in each layer four matrices of attention and two of the MLP, over 8
    # devices; and 32 x 2 of the norm, 4 x 32 of attention and 64 + 32 of the MLP, whole.
    split, whole = 96 * 32 + 2 * (4 * 32 * 32 + 2 * 32 * 64), 2 * (2 * 32 + 4 * 32 + 64 + 32)
    assert plan.bytes_per_device() == 4 * (split // 8 + whole)

    optimizer = optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        ),
        every_k_schedule=4,
    )
    state = jax.eval_shape(optimizer.init, params)
    copies = ["inner_opt_state/1/0/mu", "inner_opt_state/1/0/nu", "acc_grads"]
    counts = ["mini_step", "gradient_step", "inner_opt_state/1/0/count"]
    expected = {f"{copy}/{path}": x for copy in copies for path, x in by_hand.items()}
    expected |= {count: ("()", "P()") for count in counts}
    by_rules = ts.plan(state, RULES, MESH, min_size=64)
    by_rules.check()
    assert found_in(by_rules) == expected
    assert plan.follow(state) == by_rules
