"""Assertions about sharding, for users' own tests."""

from treeshard._inspection.stability import assert_stable_step as assert_stable_step
from treeshard._inspection.stability import diff_shardings as diff_shardings
from treeshard.communication import assert_collectives as assert_collectives
