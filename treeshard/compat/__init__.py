"""Functions with the names of other projects, and their replacements in new code.

Each function takes the arguments and returns the values of its original, and is a thin layer over
the rest of treeshard. Old forms are translated here, so the rest of treeshard has one form of each
thing. Only the command line uses this package, for tactics as text.

| name | known from | in new code |
|---|---|---|
| `infer_sharding` | big_vision | `plan(...).shardings`, by rules with tactics |
| `Registry` | big_vision | a function `(path, leaf) -> spec` is an action of a rule |
| `create_pattern_based_partition_spec` | EasyDeL | rules: `[("attention", P("data"))]` |
| `logical_to_mesh_spec` | Flax, MaxText | names instead of a spec, under `logical_axis_rules` |
| `analyze_sharding_strategy` | EasyDeL | `print(plan)`, `step.communication` |
| `extract_sharding_structure` | EasyDeL | `extract_shardings` |
| `get_shardings_with_structure` | EasyDeL | `extract_shardings` |
| `apply_logical_sharding` | EasyDeL | names instead of a spec, under `logical_axis_rules` |
| `PartitionManager` | EasyDeL | `PartitionAxis` |
| `auto_pytree` | EasyDeL | `equinox.Module`, or `jax.tree_util.register_dataclass` |
| `MIN_SHARDING_SIZE` | EasyDeL | `min_size=` |
| `LOG_SHARDING_MOVE` | EasyDeL | `print(plan)` |
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from treeshard._planning.rules import logs_moves
from treeshard._planning.tactics import min_size_in_force
from treeshard.compat._analysis import analyze_sharding_strategy
from treeshard.compat._big_vision import Registry, infer_sharding
from treeshard.compat._dataclasses import auto_pytree
from treeshard.compat._logical import logical_to_mesh_spec
from treeshard.compat._partition_manager import PartitionManager, apply_logical_sharding
from treeshard.compat._pattern_strings import create_pattern_based_partition_spec
from treeshard.compat._structure import extract_sharding_structure

get_shardings_with_structure = extract_sharding_structure

__all__ = [
    "LOG_SHARDING_MOVE",
    "MIN_SHARDING_SIZE",
    "PartitionManager",
    "Registry",
    "analyze_sharding_strategy",
    "apply_logical_sharding",
    "auto_pytree",
    "create_pattern_based_partition_spec",
    "extract_sharding_structure",
    "get_shardings_with_structure",
    "infer_sharding",
    "logical_to_mesh_spec",
]


MIN_SHARDING_SIZE: int
"""Rules replicate leaves with fewer elements, unless `min_size` is passed.

Read from the environment at each access; 16384 if the variable is not set.
"""

LOG_SHARDING_MOVE: bool
"""Whether warnings also list trimmed specs and leaves that are replicated for their size.

Read from the environment at each access: `true`, `yes`, `1` and `on` turn it on.
"""

# The originals read them once, during import, so that later settings have no effect.
_FROM_ENVIRONMENT: dict[str, Callable[[], Any]] = {
    "MIN_SHARDING_SIZE": partial(min_size_in_force, None),
    "LOG_SHARDING_MOVE": logs_moves,
}


def __getattr__(name: str) -> Any:
    if name in _FROM_ENVIRONMENT:
        return _FROM_ENVIRONMENT[name]()
    raise AttributeError(f"module 'treeshard.compat' has no attribute {name!r}.")


def __dir__() -> list[str]:
    return __all__
