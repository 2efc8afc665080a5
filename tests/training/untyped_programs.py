"""Expressions that JAX cannot type on a mesh of Explicit axes, or only if they are told how.

`p` has the parameters, split over `fsdp`; `x` has rows of a batch, split over `data` and `fsdp`,
and `ids` an integer for each.
"""

PARAMS = {
    "w": (8, 8),
    "wc": (8, 8),
    "e": (16, 8),
    "b": (8,),
    "k": (8, 8, 3),
}
SPLIT = 'ts.with_sharding_constraint(x, P("data", "fsdp"))'

PROGRAMS = {
    "two operands split over one axis": 'x @ p["wc"]',
    "a product that contracts a split dim": f'{SPLIT} @ p["w"]',
    "a product, as a function": 'jnp.dot(x, p["wc"])',
    "einsum": f'jnp.einsum("bi,io->bo", {SPLIT}, p["w"])',
    "einsum of rows": 'jnp.einsum("bi,io->bo", x, p["wc"])',
    "tensordot": f'jnp.tensordot({SPLIT}, p["w"], 1)',
    "a lookup": 'p["e"][ids]',
    "a lookup, as a function": 'jnp.take(p["e"], ids, axis=0)',
    "a lookup in a gathered table": 'ts.with_sharding_constraint(p["e"], P())[ids]',
    "a row by its number": "x[0]",
    "a row by a traced number": "x[jnp.int32(3)]",
    "a scatter": "jnp.zeros((16, 8)).at[ids].add(x)",
    "a bias": 'x + p["b"]',
    "a reshape that splits rows": "x.reshape(4, 4, 8)",
    "a reshape into heads": 'p["wc"].reshape(8, 2, 4)',
    "a convolution": f'jax.lax.conv_general_dilated({SPLIT}[:, :, None], p["k"], (1,), "SAME")',
    "a convolution of rows": 'jax.lax.conv_general_dilated(x[:, :, None], p["k"], (1,), "SAME")',
    "concatenate": 'jnp.concatenate([p["w"], p["wc"]], 1)',
    "stack": 'jnp.stack([p["w"], p["wc"]])',
    "sort": "jnp.sort(x, 0)",
    "sort with a gradient": 'jnp.sort(x @ ts.unshard(p)["wc"], 1)',
    "the product of rows": 'jnp.prod(x @ ts.unshard(p)["wc"], 1)',
    "argsort": "jnp.argsort(x, 0)",
    "cumsum": "jnp.cumsum(x, 0)",
    "the carry of a scan": (
        "jax.lax.scan(lambda c, _: (c + x, None), jnp.zeros((16, 8)), None, 2)[0]"
    ),
    "a scan over split rows": "jax.lax.scan(lambda c, r: (c + r, None), jnp.zeros(8), x)[0]",
    "the carry of a fori_loop": "jax.lax.fori_loop(0, 2, lambda i, c: c + x, jnp.zeros((16, 8)))",
    "a cond": 'jax.lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["wc"])',
    "where": 'jnp.where(p["w"] > 0, p["w"], p["wc"])',
    "a sum of two weights": 'p["w"] + p["wc"]',
    "a product with the transpose": 'p["w"] * p["w"].T',
    "another spec in shard_map": (
        'jax.shard_map(lambda a: a, in_specs=P("data"), out_specs=P("data"))(p["w"])'
    ),
    "a closure of shard_map": (
        'jax.shard_map(lambda a: a @ p["wc"], in_specs=P(("data", "fsdp")),'
        ' out_specs=P(("data", "fsdp")))(x)'
    ),
    "a slice": "x[2:6]",
    "dynamic_update_slice": "jax.lax.dynamic_update_slice(jnp.zeros((16, 8)), x, (0, 0))",
    "roll": "jnp.roll(x, 1, 0)",
    "repeat": "jnp.repeat(x, 2, 0)",
    "tile": "jnp.tile(x, (2, 1))",
    "pad": "jnp.pad(x, ((1, 1), (0, 0)))",
    "top_k": 'jax.lax.top_k(p["wc"], 2)[0]',
    "a matrix times its transpose": 'p["wc"] @ p["wc"].T',
    "vmap over rows": 'jax.vmap(lambda a, b: a @ b, (0, None))(x, p["wc"])',
    "vmap over two axes": (
        'jax.vmap(lambda a, b: a * b)(p["w"], ts.with_sharding_constraint(p["w"], P("data")))'
    ),
    "a sum over segments": "jax.ops.segment_sum(x, ids, 16)",
    "searchsorted": "jnp.searchsorted(jnp.arange(16), ids)",
    "attention": 'jnp.einsum("thk,shk->hts", x.reshape(16, 2, 4), x.reshape(16, 2, 4))',
}
