"""Decides, applies and checks how a PyTree is split over devices."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from treeshard._constraint import unshard as unshard
from treeshard._constraint import with_sharding_constraint as with_sharding_constraint
from treeshard._errors import CheckpointError as CheckpointError
from treeshard._errors import CommunicationError as CommunicationError
from treeshard._errors import DamagedError as DamagedError
from treeshard._errors import DeletedLeafError as DeletedLeafError
from treeshard._errors import FormatError as FormatError
from treeshard._errors import LeafError as LeafError
from treeshard._errors import MeshError as MeshError
from treeshard._errors import MismatchError as MismatchError
from treeshard._errors import NoMeshError as NoMeshError
from treeshard._errors import ProcessError as ProcessError
from treeshard._errors import ShardingRuleError as ShardingRuleError
from treeshard._errors import ShardingWarning as ShardingWarning
from treeshard._errors import SpecError as SpecError
from treeshard._errors import StateError as StateError
from treeshard._errors import TreeShardError as TreeShardError
from treeshard._errors import UnknownAxisError as UnknownAxisError
from treeshard._errors import UnstableStepError as UnstableStepError
from treeshard._errors import did_you_mean as _did_you_mean
from treeshard._gather import gather as gather
from treeshard._gather import iter_gather as iter_gather
from treeshard._logical import logical_axis_rules as logical_axis_rules
from treeshard._logical import logical_to_mesh_spec as logical_to_mesh_spec
from treeshard._make_mesh import make_mesh as make_mesh
from treeshard._make_mesh import simulate_devices as simulate_devices
from treeshard._mesh import get_axes_size_in_mesh as get_axes_size_in_mesh
from treeshard._mesh import get_incontext_mesh as get_incontext_mesh
from treeshard._mesh import get_mesh_axis_names as get_mesh_axis_names
from treeshard._mesh import get_mesh_axis_size as get_mesh_axis_size
from treeshard._mesh import get_submesh_device_index as get_submesh_device_index
from treeshard._mesh import names_in_current_mesh as names_in_current_mesh
from treeshard._paths import leaf_paths as leaf_paths
from treeshard._paths import named_tree_map as named_tree_map
from treeshard._process_local import from_process_local as from_process_local
from treeshard._rules import match_partition_rules as match_partition_rules
from treeshard._spec_trees import get_names_from_partition_spec as get_names_from_partition_spec
from treeshard._spec_trees import layer_specs as layer_specs
from treeshard._specs import Adjustment as Adjustment
from treeshard._tactics import Tactic as Tactic
from treeshard._tactics import fsdp as fsdp
from treeshard._tactics import logical_partitioning as logical_partitioning
from treeshard._tactics import replicate as replicate
from treeshard._tactics import shard_dim as shard_dim
from treeshard._tactics import tactic as tactic
from treeshard._transfer import make_shard_and_gather_fns as make_shard_and_gather_fns
from treeshard._transfer import reshard as reshard
from treeshard._transfer import shard as shard

# The rest loads on first touch: not everybody needs what it costs.
if _TYPE_CHECKING:
    from treeshard._analysis import analyze_sharding_strategy as analyze_sharding_strategy
    from treeshard._collective_budgets import assert_collectives as assert_collectives
    from treeshard._collectives import collectives as collectives
    from treeshard._communication import PlannedTransfer as PlannedTransfer
    from treeshard._communication import predict_communication as predict_communication
    from treeshard._comparison import Comparison as Comparison
    from treeshard._comparison import compare_communication as compare_communication
    from treeshard._draw import draw as draw
    from treeshard._infer import infer_sharding as infer_sharding
    from treeshard._leaf_findings import Finding as Finding
    from treeshard._live import extract_sharding_structure as extract_sharding_structure
    from treeshard._live import extract_shardings as extract_shardings
    from treeshard._live import get_partition_spec as get_partition_spec
    from treeshard._live import get_shardings_with_structure as get_shardings_with_structure
    from treeshard._moved import Collective as Collective
    from treeshard._optimizer_state import optimizer_state_specs as optimizer_state_specs
    from treeshard._partition_axis import PartitionAxis as PartitionAxis
    from treeshard._partitioner_warnings import (
        capture_partitioner_warnings as capture_partitioner_warnings,
    )
    from treeshard._pattern_strings import (
        create_pattern_based_partition_spec as create_pattern_based_partition_spec,
    )
    from treeshard._plan import Plan as Plan
    from treeshard._plan import PlannedLeaf as PlannedLeaf
    from treeshard._plan import plan as plan
    from treeshard._plan_diff import LeafChange as LeafChange
    from treeshard._plan_diff import PlanDiff as PlanDiff
    from treeshard._stability import assert_stable_step as assert_stable_step
    from treeshard._stability import diff_shardings as diff_shardings

__version__ = "0.1.0"

_SUBMODULES = ("checkpoint", "interchange", "manual", "training")
_ON_TOUCH = {
    "analyze_sharding_strategy": "_analysis",
    "assert_collectives": "_collective_budgets",
    "collectives": "_collectives",
    "PlannedTransfer": "_communication",
    "predict_communication": "_communication",
    "Comparison": "_comparison",
    "compare_communication": "_comparison",
    "draw": "_draw",
    "infer_sharding": "_infer",
    "Finding": "_leaf_findings",
    "extract_sharding_structure": "_live",
    "get_partition_spec": "_live",
    "get_shardings_with_structure": "_live",
    "extract_shardings": "_live",
    "Collective": "_moved",
    "optimizer_state_specs": "_optimizer_state",
    "PartitionAxis": "_partition_axis",
    "capture_partitioner_warnings": "_partitioner_warnings",
    "create_pattern_based_partition_spec": "_pattern_strings",
    "plan": "_plan",
    "Plan": "_plan",
    "PlannedLeaf": "_plan",
    "PlanDiff": "_plan_diff",
    "LeafChange": "_plan_diff",
    "diff_shardings": "_stability",
    "assert_stable_step": "_stability",
}


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        return _importlib.import_module(f"treeshard.{name}")
    if name in _ON_TOUCH:
        return getattr(_importlib.import_module(f"treeshard.{_ON_TOUCH[name]}"), name)
    near = _did_you_mean(name, __dir__())
    raise AttributeError(f"module 'treeshard' has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    here = (name for name in globals() if not name.startswith("_"))
    return sorted({*here, *_SUBMODULES, *_ON_TOUCH})
