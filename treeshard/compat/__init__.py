"""The names that people know from other projects, and what new code uses instead.

Each function takes the arguments and returns the values of its original, and is a thin layer
over the rest of treeshard. Only the command line uses this package, for tactics as text: what
people arrive with is translated here, so that the rest has one form of each thing.

| name | known from | in new code |
|---|---|---|
| `infer_sharding` | big_vision | `plan(...).shardings`, by rules with tactics |
| `register_op` | big_vision | a function `(path, leaf) -> spec` is an action of a rule |
| `create_pattern_based_partition_spec` | EasyDeL | rules: `[("attention", P("data"))]` |
| `logical_to_mesh_spec` | Flax, MaxText | names in place of a spec, under `logical_axis_rules` |
| `analyze_sharding_strategy` | EasyDeL | `print(plan)`, `step.communication` |
| `extract_shardings` | EasyDeL | `Plan.shardings`; of an array `x.sharding` |
| `extract_sharding_structure` | EasyDeL | the same |
| `get_shardings_with_structure` | EasyDeL | the same |
| `get_partition_spec` | EasyDeL | `Plan.specs`; of an array `x.sharding.spec` |
| `get_names_from_partition_spec` | EasyLM, EasyDeL | the entries of a spec |
| `get_incontext_mesh` | EasyDeL | `jax.sharding.get_mesh`, in a trace `get_abstract_mesh` |
| `get_mesh_axis_names` | EasyDeL | `mesh.axis_names` |
| `get_axes_size_in_mesh` | EasyDeL | `mesh.shape[axis]` |
| `names_in_current_mesh` | EasyLM, EasyDeL | `axis in mesh.shape` |
| `get_mesh_axis_size` | EasyDeL | `jax.lax.axis_size(axis)` |
| `get_submesh_device_index` | EasyDeL | `jax.lax.axis_index(axes)` |
"""

from treeshard._core.mesh import get_axes_size_in_mesh, get_incontext_mesh
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard.compat._analysis import analyze_sharding_strategy
from treeshard.compat._big_vision import infer_sharding, register_op
from treeshard.compat._live import (
    extract_sharding_structure,
    extract_shardings,
    get_partition_spec,
    get_shardings_with_structure,
)
from treeshard.compat._logical import logical_to_mesh_spec
from treeshard.compat._meshes import (
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
)
from treeshard.compat._pattern_strings import create_pattern_based_partition_spec

__all__ = [
    "analyze_sharding_strategy",
    "create_pattern_based_partition_spec",
    "extract_sharding_structure",
    "extract_shardings",
    "get_axes_size_in_mesh",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "get_shardings_with_structure",
    "get_submesh_device_index",
    "infer_sharding",
    "logical_to_mesh_spec",
    "names_in_current_mesh",
    "register_op",
]


def __dir__() -> list[str]:
    return __all__
