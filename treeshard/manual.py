"""For code inside `jax.shard_map`, which runs once per device: FSDP and tensor parallelism.

Each device keeps its shards of the parameters. They are gathered where they are used, and
their gradients are averaged. How each leaf is sharded is given by a tree of specs, or by boxes
around the leaves (`Partitioned`, Flax's).
"""

from treeshard._boxes import Partitioned as Partitioned
from treeshard._boxes import partition_specs as partition_specs
from treeshard._by_hand_grads import sync_gradients as sync_gradients
from treeshard._by_hand_grads import value_and_grad as value_and_grad
from treeshard._by_hand_modules import shard_module_params as shard_module_params
from treeshard._by_hand_params import fold_rng_over_axis as fold_rng_over_axis
from treeshard._by_hand_params import gather_params as gather_params
from treeshard._by_hand_params import shard_params as shard_params
from treeshard._mean_grads import gather_array_with_mean_grads as gather_array_with_mean_grads
from treeshard._mean_grads import vary as vary
from treeshard._parallel_regions import enter_parallel as enter_parallel
from treeshard._parallel_regions import leave_parallel as leave_parallel
from treeshard._tensor_parallel import column_parallel as column_parallel
from treeshard._tensor_parallel import parallel_attention as parallel_attention
from treeshard._tensor_parallel import parallel_mlp as parallel_mlp
from treeshard._tensor_parallel import row_parallel as row_parallel
