"""The names that people know from other projects, and what new code uses instead.

Each function takes the arguments and returns the values of its original, and is a thin layer
over the rest of treeshard. Only the command line uses this package, for tactics as text: what
people arrive with is translated here, so that the rest has one form of each thing.

| name | known from | in new code |
|---|---|---|
| `infer_sharding` | big_vision | `plan(...).shardings`, by rules with tactics |
| `register_op` | big_vision | a function `(path, leaf) -> spec` is an action of a rule |
| `create_pattern_based_partition_spec` | EasyDeL | rules: `[("attention", P("data"))]` |
| `logical_to_mesh_spec` | Flax, MaxText | names instead of a spec, under `logical_axis_rules` |
| `analyze_sharding_strategy` | EasyDeL | `print(plan)`, `step.communication` |
| `extract_sharding_structure` | EasyDeL | `extract_shardings` |
| `get_shardings_with_structure` | EasyDeL | `extract_shardings` |
| `apply_logical_sharding` | EasyDeL | names instead of a spec, under `logical_axis_rules` |
| `PartitionManager` | EasyDeL | `PartitionAxis` |
| `auto_pytree` | EasyDeL | `equinox.Module`, or `jax.tree_util.register_dataclass` |
"""

from treeshard.compat._analysis import analyze_sharding_strategy
from treeshard.compat._big_vision import infer_sharding, register_op
from treeshard.compat._dataclasses import auto_pytree
from treeshard.compat._logical import logical_to_mesh_spec
from treeshard.compat._partition_manager import PartitionManager, apply_logical_sharding
from treeshard.compat._pattern_strings import create_pattern_based_partition_spec
from treeshard.compat._structure import extract_sharding_structure

get_shardings_with_structure = extract_sharding_structure

__all__ = [
    "PartitionManager",
    "analyze_sharding_strategy",
    "apply_logical_sharding",
    "auto_pytree",
    "create_pattern_based_partition_spec",
    "extract_sharding_structure",
    "get_shardings_with_structure",
    "infer_sharding",
    "logical_to_mesh_spec",
    "register_op",
]


def __dir__() -> list[str]:
    return __all__
