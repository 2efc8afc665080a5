"""Assertions for your own tests: arrays are sharded as planned, and gradients are right."""

from treeshard._inspection.stability import assert_stable_step, diff_shardings
from treeshard.communication import assert_collectives
from treeshard.testing._assertions import (
    assert_same_plan,
    assert_step,
    assert_trees_sharded_as,
)
from treeshard.testing._checks import check_gradients, check_step
from treeshard.testing._layouts import Layout, layouts
from treeshard.testing._report import Problem, Report

__all__ = [
    "Layout",
    "Problem",
    "Report",
    "assert_collectives",
    "assert_same_plan",
    "assert_stable_step",
    "assert_step",
    "assert_trees_sharded_as",
    "check_gradients",
    "check_step",
    "diff_shardings",
    "layouts",
]


def __dir__() -> list[str]:
    return __all__
