"""FSDP and tensor parallelism for code inside `jax.shard_map`, which runs once per device.

Each device keeps its shards of the parameters, gathers them where they are used, and averages
their gradients. A plan, a tree of specs, or boxes around the leaves (`Partitioned` or Flax's) say
how each leaf is sharded.
"""

from treeshard.manual._boxes import Partitioned, partition_specs
from treeshard.manual._fsdp import (
    fold_rng_over_axis,
    gather_params,
    shard_params,
    sync_gradients,
    value_and_grad,
)
from treeshard.manual._mean_gather import gather_array_with_mean_grads, vary
from treeshard.manual._modules import shard_module_params
from treeshard.manual._tensor_parallel import (
    column_parallel,
    enter_parallel,
    leave_parallel,
    row_parallel,
)

__all__ = [
    "Partitioned",
    "column_parallel",
    "enter_parallel",
    "fold_rng_over_axis",
    "gather_array_with_mean_grads",
    "gather_params",
    "leave_parallel",
    "partition_specs",
    "row_parallel",
    "shard_module_params",
    "shard_params",
    "sync_gradients",
    "value_and_grad",
    "vary",
]


def __dir__() -> list[str]:
    return __all__
