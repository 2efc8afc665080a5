"""Training steps as people write them, to be compiled for devices that are not attached."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import gather_params, value_and_grad
from treeshard.training import jit_step, shard_map_step

LAYERS, WIDTH, HIDDEN, ROWS = 4, 1024, 4096, 512


class Case(NamedTuple):
    """One step: how to compile it, and what `compare_communication` must know about it."""

    plan: ts.Plan
    step: Any
    batch: Any
    scan: bool | str = False
    remat: bool | str = False
    dtype: Any = None

    def lower(self) -> jax.stages.Lowered:
        return self.step.lower(self.plan.structs, self.batch)

    def compare(self, program: Any) -> ts.communication.Comparison:
        return ts.compare_communication(
            self.plan, program, scan=self.scan, remat=self.remat, dtype=self.dtype
        )


def _params(stacked: bool, dtype: str) -> dict[str, Any]:
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    if stacked:
        return {k: jax.ShapeDtypeStruct((LAYERS, *s), dtype) for k, s in shapes.items()}
    return {
        f"layer{i}": {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
        for i in range(LAYERS)
    }


def _layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def _loss(params: Any, batch: jax.Array, use: Callable[[Any, Any], Any]) -> jax.Array:
    x = batch
    for name, layer in params.items():
        x = _layer(x, use(layer, name))
    return jnp.mean((x - batch).astype(jnp.float32) ** 2)


def _state(params: Any, optimizer: optax.GradientTransformation) -> dict[str, Any]:
    return {"params": params, "opt": jax.eval_shape(optimizer.init, params)}


def _update(optimizer: optax.GradientTransformation, state: Any, grads: Any) -> dict[str, Any]:
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def _rules(stacked: bool, axis: str = "fsdp", **more: Any) -> list[tuple[str, Any]]:
    return [(".*", ts.fsdp(axis, skip=(0,) if stacked else (), **more))]


def by_jit(
    mesh: jax.sharding.Mesh,
    *,
    dtype: str = "float32",
    optimizer: optax.GradientTransformation | None = None,
    hints: bool = True,
) -> Case:
    """FSDP with `jit_step`, layers unrolled."""
    chosen = optax.sgd(0.1) if optimizer is None else optimizer
    state = _state(_params(False, dtype), chosen)
    plan = ts.plan(state, _rules(False), mesh)
    specs = plan.specs["params"]

    @jit_step(plan=plan)
    def step(state: Any, batch: Any) -> Any:
        def use(layer: Any, name: str) -> Any:
            return ts.unshard(layer, specs[name], "fsdp") if hints else layer

        loss, grads = jax.value_and_grad(_loss)(state["params"], batch, use)
        return _update(chosen, state, grads), loss

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))


def scanned(
    mesh: jax.sharding.Mesh,
    *,
    dtype: str = "float32",
    remat: bool = False,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """FSDP with `jit_step`, a scan over stacked layers."""
    chosen = optax.sgd(0.1) if optimizer is None else optimizer
    state = _state(_params(True, dtype), chosen)
    plan = ts.plan(state, _rules(True), mesh)
    specs = ts.layer_specs(plan.specs["params"])

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return _layer(x, ts.unshard(layer, specs, "fsdp")), None

        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, batch, params)
        return jnp.mean((x - batch).astype(jnp.float32) ** 2)

    @jit_step(plan=plan)
    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return _update(chosen, state, grads), value

    struct = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    return Case(plan, step, struct, scan="params", remat="params" if remat else False)


def by_hand(mesh: jax.sharding.Mesh, *, dtype: str = "float32", scan: bool = False) -> Case:
    """FSDP with `shard_map_step`."""
    optimizer = optax.sgd(0.1)
    state = _state(_params(scan, dtype), optimizer)
    plan = ts.plan(state, _rules(scan), mesh)
    specs = plan.specs["params"]
    axes = tuple(mesh.axis_names)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        if not scan:
            return _loss(params, batch, lambda layer, _: layer)
        layer_specs = ts.layer_specs(specs)

        @jax.checkpoint
        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return _layer(x, gather_params(layer, axes, layer_specs)), None

        x, _ = jax.lax.scan(body, batch, params)
        return jnp.mean((x - batch).astype(jnp.float32) ** 2)

    grad = value_and_grad(loss, axes, specs, gather=not scan)

    @shard_map_step(plan=plan, batch=P(axes))
    def step(state: Any, batch: Any) -> Any:
        value, grads = grad(state["params"], batch)
        return _update(optimizer, state, grads), value

    chosen = "params" if scan else False
    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype), chosen, chosen)


def zero_1(mesh: jax.sharding.Mesh) -> Case:
    """Parameters replicated, optimizer state sharded."""
    optimizer = optax.adamw(1e-3)
    params = _params(False, "float32")
    state = _state(params, optimizer)
    rules = [("params", None), ("opt", ts.fsdp("fsdp"))]
    plan = ts.plan(state, rules, mesh)

    @jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(state["params"], batch, lambda layer, _: layer)
        return _update(optimizer, state, grads), loss

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def tensor_parallel(mesh: jax.sharding.Mesh, *, dtype: str = "float32") -> Case:
    """FSDP beside tensor parallelism: `up` is split by columns, `down` by rows."""
    optimizer = optax.sgd(0.1)
    state = _state(_params(False, dtype), optimizer)
    rules = [("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp")), (".*", None)]
    plan = ts.plan(state, rules, mesh)
    specs = plan.specs["params"]

    @jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(
            state["params"], batch, lambda layer, name: ts.unshard(layer, specs[name], "fsdp")
        )
        return _update(optimizer, state, grads), loss

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))


ADAMW = optax.adamw(1e-3)
# Name -> the axes of the mesh on 8 devices, and the case.
CASES: dict[str, tuple[str, Callable[[jax.sharding.Mesh], Case]]] = {
    "mlp_bf16": ("fsdp=8", lambda mesh: by_jit(mesh, dtype="bfloat16")),
    "mlp_f32": ("fsdp=8", by_jit),
    "mlp_no_hints": ("fsdp=8", lambda mesh: by_jit(mesh, dtype="bfloat16", hints=False)),
    "adamw": ("fsdp=8", lambda mesh: by_jit(mesh, optimizer=ADAMW)),
    "hsdp": ("data=2,fsdp=4", by_jit),
    "hsdp_hand": ("data=2,fsdp=4", by_hand),
    "hand": ("fsdp=8", by_hand),
    "hand_scan": ("fsdp=8", lambda mesh: by_hand(mesh, dtype="bfloat16", scan=True)),
    "scan": ("fsdp=8", scanned),
    "scan_remat": ("fsdp=8", lambda mesh: scanned(mesh, dtype="bfloat16", remat=True)),
    "scan_adamw": ("fsdp=8", lambda mesh: scanned(mesh, remat=True, optimizer=ADAMW)),
    "zero_1": ("fsdp=8", zero_1),
    "tensor": ("fsdp=2,tensor=4", tensor_parallel),
}


def case_of(name: str, topology: str | None = None) -> Case:
    """A case on devices of a topology; by default on those of this machine.

    With several slices, `data` runs over them, and `fsdp` over the devices of each.
    """
    axes, make = CASES[name]
    if topology is not None and "*" in topology:
        return make(ts.make_mesh("data=1,fsdp=8", dcn_axes="data=2", topology=topology))
    return make(ts.make_mesh(axes, topology=topology))
