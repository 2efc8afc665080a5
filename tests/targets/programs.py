"""Training steps as people write them, to be compiled for devices that are not attached."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import training
from treeshard.communication._comparison import compare_step
from treeshard.communication._program import read_program
from treeshard.manual import gather_params, value_and_grad
from treeshard.training import accumulate_gradients, jit_step, shard_map_step

LAYERS, WIDTH, HIDDEN, ROWS = 4, 1024, 4096, 512
SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-3)


class Case(NamedTuple):
    """One step, its plan and its batch."""

    plan: ts.Plan
    step: Any
    batch: Any

    def lower(self) -> jax.stages.Lowered:
        return self.step.lower(self.plan.structs, self.batch)

    def compare(self, text: str, mesh: Any) -> ts.communication.Comparison:
        """Compares the text of its program, for another mesh, with what its trace predicts."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            roles = self.step.roles(self.plan.structs, self.batch)
        plan = self.plan.on(mesh)
        return compare_step(plan, self.step.batch_specs, roles, read_program(text, mesh))


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
    optimizer: optax.GradientTransformation = SGD,
    hints: bool = True,
    replicate: bool = False,
    minibatches: int = 0,
    axis_names: str | None = None,
    gradient: Callable[..., Any] = jax.value_and_grad,
) -> Case:
    """FSDP with `jit_step`, layers unrolled; or data parallelism, with all weights replicated."""
    state = _state(_params(False, dtype), optimizer)
    plan = ts.plan(state, [(".*", None)] if replicate else _rules(False), mesh)
    specs = plan.specs["params"]

    @jit_step(plan=plan, batch=P(tuple(mesh.axis_names)))
    def step(state: Any, batch: Any) -> Any:
        def use(layer: Any, name: str) -> Any:
            return ts.unshard(layer, specs[name], "fsdp") if hints else layer

        def grad(rows: Any, key: Any) -> Any:
            loss, grads = gradient(lambda p, x: _loss(p, x, use))(state["params"], rows)
            return grads, loss

        if minibatches:
            grads, loss = accumulate_gradients(grad, batch, minibatches, axis_names=axis_names)
        else:
            grads, loss = grad(batch, None)
        return _update(optimizer, state, grads), loss

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))


def scanned(mesh: jax.sharding.Mesh, *, dtype: str = "float32", remat: bool = False) -> Case:
    """FSDP with `jit_step`, a scan over stacked layers."""
    state = _state(_params(True, dtype), SGD)
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
        return _update(SGD, state, grads), value

    struct = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    return Case(plan, step, struct)


def by_hand(
    mesh: jax.sharding.Mesh,
    *,
    dtype: str = "float32",
    scan: bool = False,
    optimizer: optax.GradientTransformation = SGD,
) -> Case:
    """FSDP with `shard_map_step`."""
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

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))


def with_biases(mesh: jax.sharding.Mesh, *, stacked: bool, hand: bool = False) -> Case:
    """FSDP of a model with norms and biases: compilers all-reduce small gathers and gradients."""
    width, hidden, axes = 256, 512, tuple(mesh.axis_names)
    shapes = {"norm": (width,), "up": (width, hidden), "up_bias": (hidden,)}
    shapes |= {"down": (hidden, width), "down_bias": (width,)}
    if stacked:
        layers = {k: jax.ShapeDtypeStruct((LAYERS, *s), "float32") for k, s in shapes.items()}
    else:
        one = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
        layers = {f"layer{i}": one for i in range(LAYERS)}
    norm = jax.ShapeDtypeStruct((width,), "float32")
    state = _state({"layers": layers, "norm": norm}, ADAMW)
    skip = (0,) if stacked else ()
    rules = [("layer", ts.fsdp("fsdp", skip=skip)), (".*", P("fsdp"))]
    plan = ts.plan(state, rules, mesh, min_size=0)
    specs = plan.specs["params"]

    def use(weights: Any, specs: Any) -> Any:
        if hand:
            return gather_params(weights, axes, specs)
        return ts.unshard(weights, specs, "fsdp")

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def layer(x: jax.Array, w: Any) -> jax.Array:
        hidden = jax.nn.relu(normed(x, w["norm"]) @ w["up"] + w["up_bias"])
        return x + hidden @ w["down"] + w["down_bias"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if stacked:
            of_layer = ts.layer_specs(specs["layers"])
            body = lambda x, w: (layer(x, use(w, of_layer)), None)  # noqa: E731
            x, _ = jax.lax.scan(body, x, params["layers"])
        else:
            for name, w in params["layers"].items():
                x = layer(x, use(w, specs["layers"][name]))
        return jnp.mean(normed(x, use(params["norm"], specs["norm"])) ** 2)

    grad = training.value_and_grad(loss)
    if hand:
        grad = value_and_grad(loss, axes, specs, gather=False)

    @(shard_map_step if hand else jit_step)(plan=plan, batch=P(axes))
    def step(state: Any, batch: Any) -> Any:
        value, grads = grad(state["params"], batch)
        return _update(ADAMW, state, grads), value

    struct = jax.ShapeDtypeStruct((64, width), "float32")
    return Case(plan, step, struct)


def zero_1(mesh: jax.sharding.Mesh, *, gradient: Any = jax.value_and_grad) -> Case:
    """Parameters replicated, optimizer state sharded."""
    state = _state(_params(False, "float32"), ADAMW)
    plan = ts.plan(state, [("params", None), ("opt", _rules(False)[0][1])], mesh)

    @jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, batch: Any) -> Any:
        loss = lambda p, x: _loss(p, x, lambda layer, _: layer)  # noqa: E731
        value, grads = gradient(loss)(state["params"], batch)
        return _update(ADAMW, state, grads), value

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def tensor_parallel(mesh: jax.sharding.Mesh) -> Case:
    """FSDP beside tensor parallelism: `up` is split by columns, `down` by rows."""
    state = _state(_params(False, "float32"), SGD)
    rules = [("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp"))]
    plan = ts.plan(state, [*rules, (".*", None)], mesh)
    specs = plan.specs["params"]

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return _loss(params, batch, lambda layer, name: ts.unshard(layer, specs[name], "fsdp"))

    @jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return _update(SGD, state, grads), value

    return Case(plan, step, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def sequences(mesh: jax.sharding.Mesh, *, hidden: Any = None) -> Case:
    """FSDP beside tensor parallelism, with sequences whose tokens are split over `tensor` between
    the layers. `hidden` is how values within a layer are split, if that is said."""
    state = _state(_params(False, "float32"), SGD)
    rules = [("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp"))]
    plan = ts.plan(state, rules, mesh)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = jnp.tanh(batch)
        for weights in params.values():
            w = ts.unshard(weights)
            x = ts.with_sharding_constraint(x, P("fsdp", "tensor"))
            h = jax.nn.relu(x @ w["up"])
            x += (h if hidden is None else ts.with_sharding_constraint(h, hidden)) @ w["down"]
        return jnp.mean((x - batch) ** 2)

    @jit_step(plan=plan, batch=P("fsdp"))
    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return _update(SGD, state, grads), value

    return Case(plan, step, jax.ShapeDtypeStruct((64, 512, WIDTH), "float32"))


def _bf16(make: Callable[..., Case], **options: Any) -> Callable[[jax.sharding.Mesh], Case]:
    return partial(make, dtype="bfloat16", **options)


def explicit(mesh: jax.sharding.Mesh, *, make: Callable[..., Case], **options: Any) -> Case:
    """The case on Explicit axes, with sums that wait."""
    devices = list(mesh.devices.flat)
    mesh = ts.make_mesh(dict(mesh.shape), devices=devices, axis_types="explicit")
    gradient = partial(training.value_and_grad, axis_names=mesh.axis_names)
    return make(mesh, gradient=gradient, **options)


# Name -> the axes of the mesh on 8 devices, and the case.
CASES: dict[str, tuple[str, Callable[[jax.sharding.Mesh], Case]]] = {
    "mlp_bf16": ("fsdp=8", _bf16(by_jit)),
    "mlp_f32": ("fsdp=8", by_jit),
    "mlp_no_hints": ("fsdp=8", _bf16(by_jit, hints=False)),
    "adamw": ("fsdp=8", partial(by_jit, optimizer=ADAMW)),
    "data": ("fsdp=8", _bf16(by_jit, replicate=True)),
    "hsdp": ("data=2,fsdp=4", by_jit),
    "hsdp_hand": ("data=2,fsdp=4", by_hand),
    "hand": ("fsdp=8", by_hand),
    "hand_scan": ("fsdp=8", _bf16(by_hand, scan=True)),
    "biases": ("fsdp=8", partial(with_biases, stacked=False)),
    "biases_scan": ("fsdp=8", partial(with_biases, stacked=True)),
    "biases_hand": ("fsdp=8", partial(with_biases, stacked=True, hand=True)),
    "scan": ("fsdp=8", scanned),
    "scan_remat": ("fsdp=8", _bf16(scanned, remat=True)),
    "zero_1": ("fsdp=8", zero_1),
    "zero_1_gradient": ("fsdp=8", partial(zero_1, gradient=ts.training.value_and_grad)),
    "tensor": ("fsdp=2,tensor=4", tensor_parallel),
    "tensor_rows": ("fsdp=2,tensor=4", sequences),
    "tensor_kept": ("fsdp=2,tensor=4", partial(sequences, hidden=P("fsdp", None, "tensor"))),
    "hsdp_explicit": ("data=2,fsdp=4", partial(explicit, make=by_jit)),
    "adamw_jit": ("fsdp=8", partial(by_jit, optimizer=ADAMW, gradient=training.value_and_grad)),
    "accumulate": (
        "data=2,fsdp=4",
        partial(by_jit, minibatches=4, axis_names="data", gradient=training.value_and_grad),
    ),
}


def case_of(name: str, topology: str | None = None) -> Case:
    """A case on devices of a topology; by default on those of this machine.

    With several slices, `data` runs over them, and `fsdp` over the devices of each.
    """
    axes, make = CASES[name]
    if topology is not None and "*" in topology:
        return make(ts.make_mesh("data=1,fsdp=8", dcn_axes="data=2", topology=topology))
    return make(ts.make_mesh(axes, topology=topology))
