"""The public functions take their parameters in one order, with the same defaults everywhere."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

from surface import surface

# The default of an option, wherever there is such an option.
DEFAULTS = {
    "mesh": None,
    "min_size": None,
    "uneven": "warn",
    "progress": False,
    "timeout": 60.0,
    "strict": True,
    "donate": True,
    "partial": False,
    "remat": False,
    "scan": False,
    "dtype": None,
    "is_leaf": None,
}

# ------------------------------------------------------------------ exceptions, and why

TREE_IS_NOT_FIRST = {
    "match_partition_rules": "rules come first, as in EasyLM",
    "named_tree_map": "as `jax.tree.map`",
    "interchange.save_safetensors": "the file comes first, as in all that writes files",
    "checkpoint.save": "the same",
}
MESH_IS_NOT_LAST = {
    "logical_to_mesh_spec": "`shape` came later, as in Flax",
    "create_pattern_based_partition_spec": "EasyDeL's order",
    "Tactic.refine": "the order of an update: (spec, mesh, path, leaf)",
}
BY_POSITION = {
    "shard_dim": "`ignore_ndim_error` is given by position in big_vision's strategies",
    "Tactic.refine": "the order of an update",
}


def is_record(thing: type) -> bool:
    """Whether only treeshard makes objects of a class, from its fields."""
    return is_dataclass(thing) or issubclass(thing, tuple)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions and the methods of public classes, by their names in the package."""
    for qualified, thing in surface().items():
        name = qualified.removeprefix("treeshard.").removeprefix("compat.")
        if not isinstance(thing, type):
            if callable(thing):  # not a table, such as programs.CHIPS
                yield name, thing
        elif not issubclass(thing, Exception):
            for method in vars(thing):
                if method.startswith("_") and (method != "__init__" or is_record(thing)):
                    continue
                value = inspect.getattr_static(thing, method)
                value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                # JAX defines what the functions of its pytrees take.
                if inspect.isfunction(value) and not method.startswith("tree_"):
                    yield f"{name}.{method}", value


FUNCTIONS = dict(functions())


PARAMETERS = [
    (name, parameter)
    for name, function in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters.values()
    if parameter.name != "self"
]


def test_exceptions_are_of_existing_functions() -> None:
    exceptions = {*TREE_IS_NOT_FIRST, *MESH_IS_NOT_LAST, *BY_POSITION}
    assert exceptions <= FUNCTIONS.keys()
    assert DEFAULTS.keys() <= {parameter.name for _, parameter in PARAMETERS}


def test_everything_is_annotated() -> None:
    bare = [name for name, parameter in PARAMETERS if parameter.annotation is parameter.empty]
    bare += [name for name, f in FUNCTIONS.items() if "return" not in inspect.get_annotations(f)]
    assert not bare


def test_axes_may_be_one_or_several() -> None:
    for name, parameter in PARAMETERS:
        if parameter.name in ("axis", "extra_axis", "axis_names"):
            said = inspect.formatannotation(parameter.annotation).removesuffix(" | None")
            assert said == "str | collections.abc.Sequence[str]", (name, parameter)


def test_the_tree_comes_first_and_the_mesh_last() -> None:
    for name in FUNCTIONS:
        order = [x.name for n, x in PARAMETERS if n == name and x.kind is x.POSITIONAL_OR_KEYWORD]
        if "tree" in order and name not in TREE_IS_NOT_FIRST:
            assert order[0] == "tree", name
        if "mesh" in order and name not in MESH_IS_NOT_LAST:
            assert order[-1] == "mesh", name
        trees = [i for i, word in enumerate(order) if word in ("tree", "params", "grads")]
        specs = [i for i, word in enumerate(order) if word in ("specs", "param_specs", "shardings")]
        assert not trees or not specs or max(trees) < min(specs), name


def test_options_are_given_by_name() -> None:
    for name, parameter in PARAMETERS:
        switch = isinstance(parameter.default, bool)
        if (switch or parameter.name in DEFAULTS.keys() - {"mesh"}) and name not in BY_POSITION:
            assert parameter.kind is parameter.KEYWORD_ONLY, (name, parameter)


def test_an_option_has_one_default() -> None:
    for name, parameter in PARAMETERS:
        if parameter.name in DEFAULTS and parameter.default is not parameter.empty:
            assert parameter.default == DEFAULTS[parameter.name], (name, parameter)
