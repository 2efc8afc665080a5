"""The steps of the examples, small, for `make gate`.

    treeshard gate examples.gated:llama --against examples/locks/llama.cpu.lock

Each function gets the mesh from the command. The locks say what the steps mean and cost: see the
page "Stop a pull request from moving more".
"""

import equinox as eqx
import jax
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples import compile_llama, fsdp_by_hand, train_fsdp
from treeshard.training import jit_step

LLAMA = compile_llama.Size(layers=2, width=256, hidden=512, heads=4, kv_heads=2, vocabulary=1024)


def llama(mesh):
    """`compile_llama.py`."""
    return compile_llama.make_llama(mesh, size=LLAMA, tokens=128)


def transformer(mesh):
    """`train_fsdp.py`."""
    args = train_fsdp.parse(["--layers=2"])
    optimizer = train_fsdp.make_optimizer(args)
    init = train_fsdp.make_init(args, optimizer)
    plan = ts.plan(eqx.filter_eval_shape(init, jax.random.key(0)), train_fsdp.RULES, mesh)
    step = jit_step(train_fsdp.make_train_step(optimizer), plan, batch=P(mesh.axis_names))
    return step, plan.structs, jax.ShapeDtypeStruct((args.batch, args.time + 1), "uint8")


def transformer_explicit(mesh):
    """`train_fsdp.py --explicit`."""
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    return transformer(jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types))


def by_hand(mesh):
    """`fsdp_by_hand.py`, fully sharded."""
    args = fsdp_by_hand.parse([])
    optimizer = optax.adamw(args.lr)
    init = fsdp_by_hand.make_init(args, optimizer)
    shapes = eqx.filter_eval_shape(init, jax.random.key(args.seed))
    plan = ts.plan(shapes, fsdp_by_hand.FULLY_SHARDED, mesh)
    images = jax.ShapeDtypeStruct((args.batch, args.inputs), "float32")
    labels = jax.ShapeDtypeStruct((args.batch,), "int32")
    return fsdp_by_hand.make_step(args, optimizer, plan), plan.structs, (images, labels)
