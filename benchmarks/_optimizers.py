"""Every optimizer and wrapper of optax, and where its state belongs, written down by hand."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec as P

import treeshard as ts

# A little of what transformers have. Two paths end alike, and one array is square. All of it
# can be laid on a mesh of data=2, fsdp=4.
SHAPES: dict[str, tuple[int, ...]] = {
    "attn/q": (8, 8),
    "emb": (32, 8),
    "heads": (4, 8, 6),
    "norm": (8,),
    "scale": (),
    "x/attn/q": (8, 16),
}
SPECS: dict[str, P] = {
    "attn/q": P("fsdp", "data"),
    "emb": P("data", "fsdp"),
    "heads": P("data", "fsdp"),
    "norm": P("fsdp"),
    "scale": P(),
    "x/attn/q": P("data", "fsdp"),
}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`{"attn/q": x}` as `{"attn": {"q": x}}`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def structs(dtype: Any = jnp.float32) -> dict[str, Any]:
    """The parameters, as shapes."""
    return nested({path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in SHAPES.items()})


class Case(NamedTuple):
    """An optimizer and its state.

    Attributes:
        make: Makes the optimizer.
        copies: Where the state holds arrays shaped like the parameters.
        others: The specs of what is shaped otherwise and belongs to a parameter.
        params: What the state is made for.
    """

    make: Callable[[], Any]
    copies: tuple[str, ...] = ()
    others: Mapping[str, P] = {}
    params: Any = None

    def state(self) -> Any:
        """The state's shapes."""
        return jax.eval_shape(self.make().init, structs() if self.params is None else self.params)

    def expected(self) -> dict[str, P]:
        """The spec of every array of the state, by path."""
        state = self.state()
        right = dict.fromkeys(ts.leaf_paths(state), P())
        shapes = zip(ts.leaf_paths(state), jax.tree.leaves(state), strict=True)
        shape_of = {path: leaf.shape for path, leaf in shapes}
        places = {f"{copy}/{path}".lstrip("/"): path for copy in self.copies for path in SHAPES}
        found = {place: path for place, path in places.items() if place in right}
        right |= {
            place: SPECS[path] for place, path in found.items() if shape_of[place] == SHAPES[path]
        }
        missing = [path for path in self.others if path not in right]
        missing += [c for c in self.copies if not any(place.startswith(c) for place in found)]
        if missing:
            raise LookupError(f"the state has no {missing}")
        return right | dict(self.others)


# ------------------------------------------------------------------ what is not a copy

# Adafactor's row leaves out the longest dim, its column the second longest; the last of equal
# ones counts as the longest.
_FACTORED = {
    "v_row/attn/q": P("fsdp"),
    "v_col/attn/q": P("data"),
    "v_row/emb": P("fsdp"),
    "v_col/emb": P("data"),
    "v_row/heads": P("data"),
    "v_col/heads": P("data", "fsdp"),
    "v_row/x/attn/q": P("data"),
    "v_col/x/attn/q": P("fsdp"),
}
_PER_DIM = {
    "mu/attn/q/0": P("fsdp"),
    "mu/attn/q/1": P("data"),
    "mu/emb/0": P("data"),
    "mu/emb/1": P("fsdp"),
    "mu/heads/0": P("data"),
    "mu/heads/1": P("fsdp"),
    "mu/norm/0": P("fsdp"),
    "mu/x/attn/q/0": P("data"),
    "mu/x/attn/q/1": P("fsdp"),
}
_HISTORIES = {
    f"diff_{what}_memory/{path}": P(None, *spec)
    for what in ("params", "updates")
    for path, spec in SPECS.items()
    if spec != P()
}
# Of rank 4: what is projected keeps one dim of the parameter, the projector the other.
_PROJECTED = {
    f"base_optimizer_state/{moment}/{path}": spec
    for moment in ("mu", "nu")
    for path, spec in (
        ("attn/q", P(None, "data")),
        ("emb", P(None, "fsdp")),
        ("x/attn/q", P("data")),
    )
} | {
    "projector/attn/q": P("fsdp"),
    "projector/emb": P("data"),
    "projector/x/attn/q": P("fsdp"),
}


def _at(prefix: str, others: Mapping[str, P]) -> dict[str, P]:
    return {f"{prefix}/{path}": spec for path, spec in others.items()}


def _by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", params)


# ------------------------------------------------------------------ the optimizers

_trace = optax.trace(0.9)
_complex = structs(jnp.complex64)
_both = optax.LookaheadParams(structs(), structs())
_some = {"attn": True, "emb": False, "heads": True, "norm": False, "scale": False, "x": True}
_labels = {name: "a" if some else "b" for name, some in _some.items()}


def _of_some(others: Mapping[str, P]) -> dict[str, P]:
    """Without what belongs to `emb` and `norm`."""
    return {path: spec for path, spec in others.items() if not {"emb", "norm"} & {*path.split("/")}}


def _always(*_: Any, **__: Any) -> Any:
    return True


def _itself(updates: Any, *_: Any, **__: Any) -> Any:
    return updates


def _plain(module: Any, names: str, *args: Any) -> dict[str, Case]:
    """Optimizers that need no more than `args`, as `name:copy,copy`."""
    cases: dict[str, Case] = {}
    for entry in names.split():
        name, _, copies = entry.partition(":")
        make = getattr(module, name)
        cases[name] = Case(lambda make=make: make(*args), tuple(filter(None, copies.split(","))))
    return cases


CASES: dict[str, Case] = {
    **_plain(
        optax,
        "adabelief:0/mu,0/nu adagrad:0/sum_of_squares adam:0/mu,0/nu adamax:0/mu,0/nu"
        " adamaxw:0/mu,0/nu adamw:0/mu,0/nu adan:0/m,0/v,0/n,0/g amsgrad:0/mu,0/nu,0/nu_max"
        " ema:ema lamb:0/mu,0/nu lars:3/trace lion:0/mu nadam:0/mu,0/nu nadamw:0/mu,0/nu"
        " novograd:0/mu optimistic_adam:0/mu,0/nu,1/previous_gradient"
        " optimistic_adam_v2:0/mu,0/nu,1/previous_gradient"
        " optimistic_gradient_descent:0/previous_gradient radam:0/mu,0/nu rmsprop:0/nu"
        " rprop:0/step_sizes,0/prev_updates scale_by_rprop:step_sizes,prev_updates"
        " scale_by_zoom_linesearch:grad sgd signum:0/ema trace:trace yogi:0/mu,0/nu"
        " adaptive_grad_clip clip clip_by_block_rms clip_by_global_norm freeze fromage"
        " scale scale_by_backtracking_linesearch scale_by_learning_rate scale_by_schedule"
        " sign_sgd stateless stateless_with_tree_map",
        0.1,
    ),
    **_plain(
        optax,
        "adadelta:1/e_g,1/e_x apply_every:grad_acc scale_by_adadelta:e_g,e_x"
        " scale_by_adam:mu,nu scale_by_adamax:mu,nu scale_by_adan:m,v,n,g"
        " scale_by_amsgrad:mu,nu,nu_max scale_by_belief:mu,nu"
        " scale_by_distance_over_gradients:init_params scale_by_lion:mu scale_by_novograd:mu"
        " scale_by_optimistic_gradient:previous_gradient scale_by_radam:mu,nu scale_by_rms:nu"
        " scale_by_rss:sum_of_squares scale_by_stddev:mu,nu scale_by_yogi:mu,nu"
        " add_decayed_weights centralize identity keep_params_nonnegative"
        " normalize_by_update_norm polyak_sgd scale_by_param_block_norm"
        " scale_by_param_block_rms scale_by_polyak scale_by_sign scale_by_trust_ratio"
        " set_to_zero zero_nans",
    ),
    **_plain(
        optax.contrib,
        "acprop:0/mu,0/nu ademamix:0/m1,0/m2,0/nu adopt:0/mu,0/nu"
        " madgrad:1/grad_sum_sq,1/s,1/x0 scale_by_madgrad:grad_sum_sq,s,x0"
        " simplified_ademamix:0/m,0/n sophia:0/mu,0/nu",
        0.1,
    ),
    **_plain(
        optax.contrib,
        "cocob:2/init_particles,2/cumulative_gradients,2/scale,2/subgradients,2/reward"
        " scale_by_cocob:init_particles,cumulative_gradients,scale,subgradients,reward"
        " dadapt_adamw:exp_avg,exp_avg_sq,grad_sum dog:1/init_params dowg:1/init_params"
        " momo:exp_avg momo_adam:exp_avg,exp_avg_sq"
        " prodigy:exp_avg,exp_avg_sq,grad_sum,params0 scale_by_acprop:mu,nu"
        " scale_by_ademamix:m1,m2,nu scale_by_adopt:mu,nu scale_by_muon:mu"
        " scale_by_simplified_ademamix:m,n schedule_free_adamw:z,base_optimizer_state/0/nu"
        " schedule_free_sgd:z hutchinson_estimator_diag_hessian normalize reduce_on_plateau",
    ),
    # What has shapes of its own.
    "adafactor": Case(
        lambda: optax.adafactor(0.1, min_dim_size_to_factor=4), ("0/v",), _at("0", _FACTORED)
    ),
    "adafactor, unfactored": Case(lambda: optax.adafactor(0.1, factored=False), ("0/v",)),
    "scale_by_factored_rms": Case(
        lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4), ("v",), _FACTORED
    ),
    "sm3": Case(lambda: optax.sm3(0.1), ("0/nu",), _at("0", _PER_DIM)),
    "scale_by_sm3": Case(optax.scale_by_sm3, ("nu",), _PER_DIM),
    "lbfgs": Case(optax.lbfgs, ("0/params", "0/updates", "2/grad"), _at("0", _HISTORIES)),
    "scale_by_lbfgs": Case(optax.scale_by_lbfgs, ("params", "updates"), _HISTORIES),
    "galore": Case(
        lambda: optax.contrib.galore(0.1, rank=4),
        ("0/base_optimizer_state/mu", "0/base_optimizer_state/nu"),
        _at("0", _PROJECTED),
    ),
    "scale_by_galore": Case(
        lambda: optax.contrib.scale_by_galore(rank=4),
        ("base_optimizer_state/mu", "base_optimizer_state/nu"),
        _PROJECTED,
    ),
    "muon": Case(
        lambda: optax.contrib.muon(0.1),
        tuple(
            f"inner_states/{inner}/inner_state/0/{moment}"
            for inner, moment in (("muon", "mu"), ("adam", "mu"), ("adam", "nu"))
        ),
    ),
    "add_noise": Case(lambda: optax.add_noise(0.1, 0.1, jax.random.key(0))),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.1, key=jax.random.key(0))),
    "differentially_private_aggregate": Case(
        lambda: optax.contrib.differentially_private_aggregate(0.1, 0.1, jax.random.key(0))
    ),
    "dpsgd": Case(lambda: optax.contrib.dpsgd(0.1, 0.1, 0.1, 0, 0.9), ("1/trace",)),
    # Wrappers.
    "chain": Case(
        lambda: optax.chain(optax.clip(1.0), optax.adam(0.1), optax.chain(_trace, optax.ema(0.1))),
        ("1/0/mu", "1/0/nu", "2/0/trace", "2/1/ema"),
    ),
    "named_chain": Case(
        lambda: optax.named_chain(("a", optax.clip(1.0)), ("b", _trace)), ("b/trace",)
    ),
    "masked, by leaf": Case(
        lambda: optax.masked(_trace, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        ("inner_state/trace",),
    ),
    "masked, by subtree": Case(lambda: optax.masked(_trace, _some), ("inner_state/trace",)),
    "masked, factored": Case(
        lambda: optax.masked(optax.scale_by_factored_rms(min_dim_size_to_factor=4), _some),
        (),
        _at("inner_state", _of_some(_FACTORED)),
    ),
    "masked, sm3": Case(
        lambda: optax.masked(optax.scale_by_sm3(), _some),
        ("inner_state/nu",),
        _at(
            "inner_state",
            {p: s for p, s in _PER_DIM.items() if not p.startswith(("mu/emb", "mu/norm"))},
        ),
    ),
    "multi_transform": Case(
        lambda: optax.multi_transform({"a": _trace, "b": optax.adam(0.1)}, _labels),
        (
            "inner_states/a/inner_state/trace",
            "inner_states/b/inner_state/0/mu",
            "inner_states/b/inner_state/0/nu",
        ),
    ),
    "partition": Case(
        lambda: optax.partition({"matrix": _trace, "rest": optax.ema(0.1)}, _by_rank),
        ("inner_states/matrix/inner_state/trace", "inner_states/rest/inner_state/ema"),
    ),
    "selective_transform": Case(
        lambda: optax.selective_transform(_trace, freeze_mask=_some),
        ("inner_states/train/inner_state/trace",),
    ),
    "MultiSteps": Case(
        lambda: optax.MultiSteps(optax.adam(0.1), 2),
        ("inner_opt_state/0/mu", "inner_opt_state/0/nu", "acc_grads"),
    ),
    "inject_hyperparams": Case(
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        ("inner_state/0/mu", "inner_state/0/nu"),
    ),
    "inject_stateful_hyperparams": Case(
        lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=0.1),
        ("inner_state/0/mu", "inner_state/0/nu"),
    ),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(_trace, 2), ("inner_state/trace",)),
    "conditionally_mask": Case(
        lambda: optax.conditionally_mask(_trace, _always), ("inner_state/trace",)
    ),
    "conditionally_transform": Case(
        lambda: optax.conditionally_transform(_trace, _always), ("inner_state/trace",)
    ),
    "flatten": Case(lambda: optax.flatten(_trace)),  # all parameters in one row
    "lookahead": Case(lambda: optax.lookahead(_trace, 2, 0.5), ("fast_state/trace",), params=_both),
    "lookahead, sm3": Case(
        lambda: optax.lookahead(optax.scale_by_sm3(), 2, 0.5),
        ("fast_state/nu",),
        _at("fast_state", _PER_DIM),
        _both,
    ),
    "measure_with_ema": Case(lambda: optax.measure_with_ema(_itself, 0.9), ("1/ema",)),
    "snapshot": Case(lambda: optax.snapshot("it", _itself), ("measurement/it",)),
    "monitor": Case(lambda: optax.monitor({"it": _itself})),
    "with_extra_args_support": Case(lambda: optax.with_extra_args_support(_trace), ("trace",)),
    "mechanize": Case(
        lambda: optax.contrib.mechanize(_trace), ("base_optimizer_state/trace", "x0")
    ),
    "sam": Case(
        lambda: optax.contrib.sam(_trace, optax.adam(0.1)),
        ("opt_state/trace", "adv_state/0/mu", "adv_state/0/nu", "cache"),
    ),
    "schedule_free": Case(
        lambda: optax.contrib.schedule_free(_trace, 0.1), ("base_optimizer_state/trace", "z")
    ),
    "split_real_and_imaginary": Case(
        lambda: optax.contrib.split_real_and_imaginary(_trace),
        (),
        {
            f"inner_state/trace/{path}/{half}": spec
            for path, spec in SPECS.items()
            for half in ("real", "imaginary")
        },
        _complex,
    ),
}
