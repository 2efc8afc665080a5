"""Functions of the sources take the arguments of the sources, by name and by position."""

import inspect
from inspect import Parameter

import pytest

import treeshard as ts

# Of each, as they are written in its source. What treeshard adds comes after, and has defaults.
SIGNATURES = """
fold_rng_over_axis(rng, axis_name)
shard_params(params, axis_name, min_weight_size=2**18)
gather_array_with_mean_grads(x, axis, axis_name)
gather_params(params, axis_name)
shard_module_params(target, axis_name, min_weight_size=2**18)
sync_gradients(grads, axis_names)
print_metrics(metrics, title)

infer_sharding(params, strategy, mesh)
logical_partitioning()
replicate()
shard_dim(axis, dim, ignore_ndim_error=False)

names_in_current_mesh(*names)
make_shard_and_gather_fns(partition_specs, mesh=None)
get_names_from_partition_spec(partition_specs)
with_sharding_constraint(arr, sharding)
match_partition_rules(rules, tree)
analyze_sharding_strategy(pytree, partition_specs, mesh=None)
create_pattern_based_partition_spec(pattern, mesh=None, default_spec=None)
extract_sharding_structure(pytree)
get_shardings_with_structure(pytree)
get_incontext_mesh(raise_error=True)
get_axes_size_in_mesh(axis_names, mesh=None)
get_mesh_axis_names(mesh=None)
get_mesh_axis_size(axis_names)
get_submesh_device_index(axis_names)
extract_shardings(tree, mesh=None)
get_partition_spec(tree)
named_tree_map(f, tree, *rest)
apply_logical_sharding(x, partition_manager)
"""
CALLS = [line for line in SIGNATURES.splitlines() if line]


@pytest.mark.parametrize("call", CALLS, ids=[call.partition("(")[0] for call in CALLS])
def test_arguments_are_those_of_the_source(call: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def {call}: ...", scope)
    name = call.partition("(")[0]
    wanted = list(inspect.signature(scope[name]).parameters.values())  # pyright: ignore
    found = list(inspect.signature(getattr(ts, name)).parameters.values())
    of_source, added = found[: len(wanted)], found[len(wanted) :]
    assert [(x.name, x.kind) for x in of_source] == [(x.name, x.kind) for x in wanted]
    for mine, source in zip(of_source, wanted, strict=True):
        if source.default is not Parameter.empty:
            assert mine.default == source.default, mine
    assert all(x.default is not Parameter.empty for x in added), added
