"""Decides, applies and checks how a PyTree is split over devices."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from treeshard._core.make_mesh import make_mesh as make_mesh
from treeshard._core.make_mesh import simulate_devices as simulate_devices
from treeshard._core.mesh import get_axes_size_in_mesh as get_axes_size_in_mesh
from treeshard._core.mesh import get_incontext_mesh as get_incontext_mesh
from treeshard._core.mesh import get_mesh_axis_names as get_mesh_axis_names
from treeshard._core.mesh import get_mesh_axis_size as get_mesh_axis_size
from treeshard._core.mesh import get_submesh_device_index as get_submesh_device_index
from treeshard._core.mesh import names_in_current_mesh as names_in_current_mesh
from treeshard._core.paths import leaf_paths as leaf_paths
from treeshard._core.paths import named_tree_map as named_tree_map
from treeshard._core.spec_trees import (
    get_names_from_partition_spec as get_names_from_partition_spec,
)
from treeshard._core.spec_trees import layer_specs as layer_specs
from treeshard._core.specs import Adjustment as Adjustment
from treeshard._placement.constraint import unshard as unshard
from treeshard._placement.constraint import with_sharding_constraint as with_sharding_constraint
from treeshard._placement.gather import gather as gather
from treeshard._placement.gather import iter_gather as iter_gather
from treeshard._placement.process_local import from_process_local as from_process_local
from treeshard._placement.shard import make_shard_and_gather_fns as make_shard_and_gather_fns
from treeshard._placement.shard import reshard as reshard
from treeshard._placement.shard import shard as shard
from treeshard._planning.logical import logical_axis_rules as logical_axis_rules
from treeshard._planning.logical import logical_to_mesh_spec as logical_to_mesh_spec
from treeshard._planning.rules import match_partition_rules as match_partition_rules
from treeshard._planning.tactics import Tactic as Tactic
from treeshard._planning.tactics import fsdp as fsdp
from treeshard._planning.tactics import logical_partitioning as logical_partitioning
from treeshard._planning.tactics import replicate as replicate
from treeshard._planning.tactics import shard_dim as shard_dim
from treeshard._planning.tactics import tactic as tactic
from treeshard.errors import CheckpointError as CheckpointError
from treeshard.errors import CommunicationError as CommunicationError
from treeshard.errors import DamagedError as DamagedError
from treeshard.errors import DeletedLeafError as DeletedLeafError
from treeshard.errors import FormatError as FormatError
from treeshard.errors import LeafError as LeafError
from treeshard.errors import MeshError as MeshError
from treeshard.errors import MismatchError as MismatchError
from treeshard.errors import NoMeshError as NoMeshError
from treeshard.errors import ProcessError as ProcessError
from treeshard.errors import ShardingRuleError as ShardingRuleError
from treeshard.errors import ShardingWarning as ShardingWarning
from treeshard.errors import SpecError as SpecError
from treeshard.errors import StateError as StateError
from treeshard.errors import TreeShardError as TreeShardError
from treeshard.errors import UnknownAxisError as UnknownAxisError
from treeshard.errors import UnstableStepError as UnstableStepError
from treeshard.errors import did_you_mean as _did_you_mean

# The rest loads on first touch: not everybody needs what it costs.
if _TYPE_CHECKING:
    from treeshard._inspection.draw import draw as draw
    from treeshard._inspection.stability import assert_stable_step as assert_stable_step
    from treeshard._inspection.stability import diff_shardings as diff_shardings
    from treeshard._planning.decision import PlannedLeaf as PlannedLeaf
    from treeshard._planning.lint import Finding as Finding
    from treeshard._planning.logical import PartitionAxis as PartitionAxis
    from treeshard._planning.optimizer_state import optimizer_state_specs as optimizer_state_specs
    from treeshard._planning.plan import Plan as Plan
    from treeshard._planning.plan import plan as plan
    from treeshard._planning.plan_report import LeafChange as LeafChange
    from treeshard._planning.plan_report import PlanDiff as PlanDiff
    from treeshard.communication.collectives import Collective as Collective
    from treeshard.communication.collectives import assert_collectives as assert_collectives
    from treeshard.communication.collectives import collectives as collectives
    from treeshard.communication.comparison import Comparison as Comparison
    from treeshard.communication.comparison import compare_communication as compare_communication
    from treeshard.communication.forecast import PlannedTransfer as PlannedTransfer
    from treeshard.communication.forecast import predict_communication as predict_communication
    from treeshard.communication.partitioner_warnings import (
        capture_partitioner_warnings as capture_partitioner_warnings,
    )
    from treeshard.compat._analysis import analyze_sharding_strategy as analyze_sharding_strategy
    from treeshard.compat._big_vision import infer_sharding as infer_sharding
    from treeshard.compat._live import extract_sharding_structure as extract_sharding_structure
    from treeshard.compat._live import extract_shardings as extract_shardings
    from treeshard.compat._live import get_partition_spec as get_partition_spec
    from treeshard.compat._live import get_shardings_with_structure as get_shardings_with_structure
    from treeshard.compat._pattern_strings import (
        create_pattern_based_partition_spec as create_pattern_based_partition_spec,
    )

__version__ = "0.1.0"

_SUBMODULES = ("checkpoint", "interchange", "manual", "training")
_ON_TOUCH = {
    "analyze_sharding_strategy": "compat._analysis",
    "assert_collectives": "communication.collectives",
    "collectives": "communication.collectives",
    "PlannedTransfer": "communication.forecast",
    "predict_communication": "communication.forecast",
    "Comparison": "communication.comparison",
    "compare_communication": "communication.comparison",
    "draw": "_inspection.draw",
    "infer_sharding": "compat._big_vision",
    "Finding": "_planning.lint",
    "extract_sharding_structure": "compat._live",
    "get_partition_spec": "compat._live",
    "get_shardings_with_structure": "compat._live",
    "extract_shardings": "compat._live",
    "Collective": "communication.collectives",
    "optimizer_state_specs": "_planning.optimizer_state",
    "PartitionAxis": "_planning.logical",
    "capture_partitioner_warnings": "communication.partitioner_warnings",
    "create_pattern_based_partition_spec": "compat._pattern_strings",
    "plan": "_planning.plan",
    "Plan": "_planning.plan",
    "PlannedLeaf": "_planning.decision",
    "PlanDiff": "_planning.plan_report",
    "LeafChange": "_planning.plan_report",
    "diff_shardings": "_inspection.stability",
    "assert_stable_step": "_inspection.stability",
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
