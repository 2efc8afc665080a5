"""The names of other projects: all of them are listed with what new code uses instead."""

import re
from pathlib import Path

import treeshard as ts

TABLE = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", ts.compat.__doc__ or "", re.MULTILINE))


def test_every_name_says_what_to_use_in_new_code() -> None:
    assert sorted(TABLE) == sorted(ts.compat.__all__) == dir(ts.compat)
    assert all(TABLE.values())


def test_every_name_that_people_know_is_also_a_name_of_the_package() -> None:
    for name in ts.compat.__all__:
        assert getattr(ts, name) == getattr(ts.compat, name)


def test_only_the_command_line_uses_it() -> None:
    package = Path(ts.__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name not in ("compat", "_cli") and path != package / "__init__.py":
            assert not re.search(r"^\s*(from|import) treeshard.compat", path.read_text(), re.M), (
                path
            )
