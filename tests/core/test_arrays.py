"""Arrays: regions and their contiguous runs."""

import itertools

import numpy as np
import pytest

from treeshard._core.arrays import lengths, region_of, run_dim, runs, within


def test_regions() -> None:
    region = region_of((slice(None), slice(2, 4)), (3, 8))
    assert region == ((0, 3), (2, 4))
    assert lengths(region) == (3, 2)
    assert within(((1, 2), (3, 4)), region) == (slice(1, 2), slice(1, 2))


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        ((), ()),
        (((0, 4),), (4,)),
        (((1, 3),), (4,)),
        (((0, 2), (0, 3)), (2, 3)),
        (((1, 2), (0, 3)), (2, 3)),
        (((0, 2), (1, 3)), (2, 3)),
        (((1, 3), (1, 2), (0, 5)), (4, 3, 5)),
        (((1, 3), (0, 3), (2, 4)), (4, 3, 5)),
    ],
    ids=str,
)
def test_runs_hold_the_items_of_a_region_in_order(region, shape) -> None:
    items = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    starts, length = runs(region, shape)
    covered = list(
        itertools.chain(*(range(start, start + length) for start in starts.reshape(-1).tolist()))
    )
    assert covered == items[tuple(slice(*span) for span in region)].reshape(-1).tolist()
    assert starts.shape == lengths(region)[: run_dim(lengths(region), shape)]
