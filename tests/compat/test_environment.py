"""EasyDeL's names of the environment's settings, at the top of treeshard."""

import jax
import numpy as np
import pytest

import treeshard as ts

SETTINGS = {
    **dict.fromkeys(["true", "yes", "1", "on", "True", " ON "], True),
    **dict.fromkeys(["false", "no", "0", "off", "", "2"], False),
}


@pytest.mark.parametrize(("text", "is_on"), SETTINGS.items())
def test_log_sharding_move(text: str, is_on: bool, monkeypatch, recwarn) -> None:
    monkeypatch.setenv("LOG_SHARDING_MOVE", text)
    rules = [("b", ts.fsdp("data")), (".*", None)]
    ts.match_partition_rules(rules, {"b": np.ones(64)}, "data=8")
    assert bool(recwarn) is is_on
    assert ts.LOG_SHARDING_MOVE is ts.compat.LOG_SHARDING_MOVE is is_on


def test_both_are_read_when_they_are_accessed(monkeypatch) -> None:
    monkeypatch.delenv("LOG_SHARDING_MOVE", raising=False)
    monkeypatch.delenv("MIN_SHARDING_SIZE", raising=False)
    assert (ts.LOG_SHARDING_MOVE, ts.MIN_SHARDING_SIZE) == (False, 16384)
    monkeypatch.setenv("MIN_SHARDING_SIZE", "64")
    assert ts.MIN_SHARDING_SIZE == ts.compat.MIN_SHARDING_SIZE == 64
    rules = [(".*", jax.P("data"))]
    assert ts.match_partition_rules(rules, np.ones(64)) == jax.P("data")


def test_other_names_of_compat_are_unknown() -> None:
    with pytest.raises(AttributeError, match="'treeshard.compat' has no attribute 'MIN_SIZE'"):
        ts.compat.MIN_SIZE  # noqa: B018  # pyright: ignore
