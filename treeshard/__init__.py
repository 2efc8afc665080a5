"""Decides, applies and checks how a PyTree is split over devices."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from treeshard._core.make_mesh import make_mesh as make_mesh
    from treeshard._core.make_mesh import simulate_devices as simulate_devices
    from treeshard._core.mesh import get_axes_size_in_mesh as get_axes_size_in_mesh
    from treeshard._core.mesh import get_incontext_mesh as get_incontext_mesh
    from treeshard._core.paths import leaf_paths as leaf_paths
    from treeshard._core.paths import named_tree_map as named_tree_map
    from treeshard._core.spec_trees import (
        get_names_from_partition_spec as get_names_from_partition_spec,
    )
    from treeshard._core.spec_trees import layer_specs as layer_specs
    from treeshard._core.specs import Adjustment as Adjustment
    from treeshard._inspection.draw import draw as draw
    from treeshard._inspection.stability import assert_stable_step as assert_stable_step
    from treeshard._inspection.stability import diff_shardings as diff_shardings
    from treeshard._placement.constraint import unshard as unshard
    from treeshard._placement.constraint import with_sharding_constraint as with_sharding_constraint
    from treeshard._placement.gather import gather as gather
    from treeshard._placement.gather import iter_gather as iter_gather
    from treeshard._placement.gather import make_shard_and_gather_fns as make_shard_and_gather_fns
    from treeshard._placement.padding import pad_leaves as pad_leaves
    from treeshard._placement.padding import unpad_leaves as unpad_leaves
    from treeshard._placement.process_local import from_process_local as from_process_local
    from treeshard._placement.shard import reshard as reshard
    from treeshard._placement.shard import shard as shard
    from treeshard._planning.adapters import follow as follow
    from treeshard._planning.lint import Finding as Finding
    from treeshard._planning.logical import PartitionAxis as PartitionAxis
    from treeshard._planning.logical import logical_axis_rules as logical_axis_rules
    from treeshard._planning.logical import logical_to_mesh_spec as logical_to_mesh_spec
    from treeshard._planning.matching import PlannedLeaf as PlannedLeaf
    from treeshard._planning.optimizer_state import optimizer_state_specs as optimizer_state_specs
    from treeshard._planning.plan import Plan as Plan
    from treeshard._planning.plan import plan as plan
    from treeshard._planning.plan_report import LeafChange as LeafChange
    from treeshard._planning.plan_report import PlanDiff as PlanDiff
    from treeshard._planning.rules import match_partition_rules as match_partition_rules
    from treeshard._planning.tactics import Tactic as Tactic
    from treeshard._planning.tactics import fsdp as fsdp
    from treeshard._planning.tactics import logical_partitioning as logical_partitioning
    from treeshard._planning.tactics import replicate as replicate
    from treeshard._planning.tactics import shard_dim as shard_dim
    from treeshard._planning.tactics import tactic as tactic
    from treeshard.communication import Collective as Collective
    from treeshard.communication import Comparison as Comparison
    from treeshard.communication import PlannedTransfer as PlannedTransfer
    from treeshard.communication import assert_collectives as assert_collectives
    from treeshard.communication import capture_partitioner_warnings as capture_partitioner_warnings
    from treeshard.communication import collectives as collectives
    from treeshard.communication import compare_communication as compare_communication
    from treeshard.communication import predict_communication as predict_communication
    from treeshard.compat import analyze_sharding_strategy as analyze_sharding_strategy
    from treeshard.compat import (
        create_pattern_based_partition_spec as create_pattern_based_partition_spec,
    )
    from treeshard.compat import extract_sharding_structure as extract_sharding_structure
    from treeshard.compat import extract_shardings as extract_shardings
    from treeshard.compat import get_mesh_axis_names as get_mesh_axis_names
    from treeshard.compat import get_mesh_axis_size as get_mesh_axis_size
    from treeshard.compat import get_partition_spec as get_partition_spec
    from treeshard.compat import get_shardings_with_structure as get_shardings_with_structure
    from treeshard.compat import get_submesh_device_index as get_submesh_device_index
    from treeshard.compat import infer_sharding as infer_sharding
    from treeshard.compat import names_in_current_mesh as names_in_current_mesh
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
    from treeshard.errors import UnexpectedShardingError as UnexpectedShardingError
    from treeshard.errors import UnknownAxisError as UnknownAxisError
    from treeshard.errors import UnstableStepError as UnstableStepError
    from treeshard.programs import suggest as suggest
    from treeshard.training import init_sharded as init_sharded
    from treeshard.training import jit_step as jit_step
    from treeshard.training import shard_map_step as shard_map_step

__version__ = "0.3.0"


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    return {name: module for module, names in names_of.items() for name in names.split()}


# Everything loads on first touch: module -> names. This is the first page of the reference, ...
_FIRST_PAGE = _by_name(
    {
        "_core.make_mesh": "make_mesh simulate_devices",
        "_planning.plan": "plan Plan",
        "_planning.rules": "match_partition_rules",
        "_planning.tactics": "fsdp shard_dim replicate logical_partitioning tactic",
        "_planning.adapters": "follow",
        "_planning.logical": "PartitionAxis",
        "_planning.optimizer_state": "optimizer_state_specs",
        "training": "init_sharded jit_step shard_map_step",
        "programs": "suggest",
        "_placement.constraint": "with_sharding_constraint unshard",
        "_core.spec_trees": "layer_specs",
        "_placement.shard": "shard reshard",
        "_placement.gather": "gather iter_gather make_shard_and_gather_fns",
        "_placement.padding": "pad_leaves unpad_leaves",
        "_placement.process_local": "from_process_local",
        "_inspection.draw": "draw",
        "_core.paths": "leaf_paths named_tree_map",
        "errors": "TreeShardError ShardingWarning ShardingRuleError SpecError MeshError",
    }
)
# ... and these are the names that have a home of their own, and keep working here.
_ELSEWHERE = _by_name(
    {
        "_core.mesh": "get_axes_size_in_mesh get_incontext_mesh",
        "_core.spec_trees": "get_names_from_partition_spec",
        "_core.specs": "Adjustment",
        "_inspection.stability": "assert_stable_step diff_shardings",
        "_planning.matching": "PlannedLeaf",
        "_planning.lint": "Finding",
        "_planning.logical": "logical_axis_rules logical_to_mesh_spec",
        "_planning.plan_report": "LeafChange PlanDiff",
        "_planning.tactics": "Tactic",
        "communication": (
            "Collective Comparison PlannedTransfer assert_collectives "
            "capture_partitioner_warnings collectives compare_communication "
            "predict_communication"
        ),
        "compat._meshes": (
            "get_mesh_axis_names get_mesh_axis_size get_submesh_device_index names_in_current_mesh"
        ),
        "compat": (
            "analyze_sharding_strategy create_pattern_based_partition_spec "
            "extract_sharding_structure extract_shardings get_partition_spec "
            "get_shardings_with_structure infer_sharding"
        ),
        "errors": (
            "CheckpointError CommunicationError DamagedError DeletedLeafError FormatError "
            "LeafError MismatchError NoMeshError ProcessError StateError "
            "UnexpectedShardingError UnknownAxisError UnstableStepError"
        ),
    }
)
_SUBMODULES = (
    "checkpoint",
    "communication",
    "compat",
    "errors",
    "interchange",
    "manual",
    "programs",
    "testing",
    "training",
)


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        return _importlib.import_module(f"treeshard.{name}")
    module = _FIRST_PAGE.get(name) or _ELSEWHERE.get(name)
    if module is not None:
        from treeshard._core.tracebacks import hide_frames

        home = vars(_importlib.import_module(f"treeshard.{module}"))
        if module.startswith("_"):  # the others do it themselves
            hide_frames(home, [name])
        return globals().setdefault(name, home[name])  # the next touch costs nothing
    from treeshard.errors import did_you_mean

    near = did_you_mean(name, [*__dir__(), *_ELSEWHERE])
    raise AttributeError(f"module 'treeshard' has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    return sorted({*_FIRST_PAGE, *_SUBMODULES, "__version__"})
