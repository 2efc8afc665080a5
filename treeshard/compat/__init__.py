"""The names that people arrive with from other projects. Thin, and used by nothing else here."""

from treeshard.compat._analysis import analyze_sharding_strategy as analyze_sharding_strategy
from treeshard.compat._big_vision import infer_sharding as infer_sharding
from treeshard.compat._live import extract_sharding_structure as extract_sharding_structure
from treeshard.compat._live import extract_shardings as extract_shardings
from treeshard.compat._live import get_partition_spec as get_partition_spec
from treeshard.compat._live import get_shardings_with_structure as get_shardings_with_structure
from treeshard.compat._pattern_strings import (
    create_pattern_based_partition_spec as create_pattern_based_partition_spec,
)
