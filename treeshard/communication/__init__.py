"""Reads compiled programs: what moves between devices, compared with what a plan predicts."""

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
