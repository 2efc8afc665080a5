"""One word for one thing, in one place, across the whole public surface.

A parameter that is not in the list below is either a word that has a synonym there, or a new one:
then it gets a line here, and says what it is everywhere.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

from surface import surface

# ------------------------------------------------------------------ the words

WORDS = {
    # where
    "mesh": "a mesh; `None` is the one in force, or the one that specs carry",
    "axis": "a mesh axis, or several, over which something is to be split or gathered",
    "extra_axis": "the same, beside those that the parameters have",
    "axis_names": "the same, where code already runs along it, as JAX's own collectives call it",
    "axes": "the axes of a mesh that is to be made, with sizes",
    "dim": "a dim of an array, by index",
    "names": "logical names of dims, or names of axes",
    "specs": "a tree of specs, a prefix of one, or a `Plan`",
    "spec": "one spec",
    "default_spec": "the spec where nothing else decides",
    "shardings": "as `specs`; JAX's word in its function of the same name",
    "param_specs": "the specs of `params`, beside the tree that gets others",
    "path": "a leaf's name; a file, where a tree is written to it or read from it",
    "sep": "what stands between the keys of a path",
    "is_leaf": "as in `jax.tree.map`",
    "shape": "the shape of an array",
    # trees
    "tree": "any pytree",
    "params": "the parameters; as an option, a pattern of their paths",
    "grads": "their gradients",
    "opt_state": "the optimizer's state",
    "state": "a training state",
    "leaf": "one leaf",
    "x": "one array, or what is to be shown",
    "rest": "more trees, as in `jax.tree.map`",
    "like": "a tree that something is to be laid out as",
    "a": "one of two trees",
    "b": "the other",
    "other": "another of the same class",
    "value": "what a box holds",
    # decide
    "rules": "pairs of a pattern and an action; in functions of logical names, of a name and axes",
    "strategy": "big_vision's pairs of a pattern and tactics",
    "text": "what is to be read",
    "update": "whether a stored plan is replaced",
    "expected": "the specs, or the `Plan`, that a test expects of a tree",
    "plan": "a `Plan`",
    "min_size": "a floor in elements",
    "floor": "the one that is in force",
    "skip": "dims that are left alone",
    "strict": "whether what does not fit is an error",
    "ignore_ndim_error": "big_vision's word",
    "factory": "makes an update",
    "mode": "of a model: training or generation",
    # do
    "uneven": "what to do where axes do not divide a dim",
    "to": "where something goes: a process, or a file",
    "read": "reads a part of a leaf",
    "timeout": "seconds that other processes are waited for",
    "progress": "whether to show a bar",
    "rename": "names in a file by paths",
    "cast": "a dtype to convert to, in words",
    "partial": "whether leaves may be missing",
    "metadata": "texts beside the arrays",
    "max_file_size": "bytes of a file",
    "directory": "where checkpoints are kept",
    "keep": "how many of them",
    "every": "how many steps apart",
    "background": "whether the loop goes on meanwhile",
    "read_only": "whether nothing is written",
    "fingerprints": "whether checksums are saved",
    "verify": "whether they are compared",
    "compress": "whether files are compressed",
    "ocdbt": "Orbax's word",
    "options": "those of the function that does it",
    # functions and what they are called with
    "f": "a function, as `jax.tree.map` calls it",
    "fn": "a function of the user's that is compiled",
    "grad_fn": "gives gradients",
    "loss": "gives a loss",
    "step": "a step of training",
    "target": "a function or a module; the tutorials' word",
    "args": "what the function takes",
    "key": "a PRNG key",
    "rng": "a PRNG key; the tutorials' word",
    "batch": "a batch; as an option, its specs",
    "num_minibatches": "into how many parts a batch is split",
    "donate": "whether the memory of the old state is used for the new",
    "has_aux": "as in `jax.value_and_grad`",
    "dtype": "in which weights are gathered",
    "gather": "whether parameters are gathered first",
    "remat": "whether, or which, weights are gathered again for gradients",
    "scan": "which leaves are stacked layers",
    "metrics": "sums and counts",
    "title": "a line above",
    # layers
    "weight": "a matrix",
    "weights": "one, or several that share an input",
    "bias": "a vector",
    "biases": "one, or several",
    "up": "the first matrix of an MLP, or several",
    "down": "the last",
    "qkv": "the three first of attention",
    "out": "the last",
    "head_width": "of attention",
    "attend": "attention itself",
    "activation": "between the matrices",
    # look
    "program": "a compiled or lowered program, or its text",
    "all_gather": "a budget",
    "reduce_scatter": "a budget",
    "all_reduce": "a budget",
    "all_to_all": "a budget",
    "collective_permute": "a budget",
    "max_bytes": "a budget for all",
    # devices
    "devices": "those of a mesh",
    "dcn_axes": "as `axes`, over a slower network",
    "axis_types": "Auto or Explicit",
    "n": "a number of devices",
    "raise_error": "EasyDeL's word",
}

# A word has one default wherever it is an option.
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
OTHER_DEFAULTS = {
    # The tutorials' threshold, since a gather by hand costs a call for each leaf.
    ("manual.shard_params", "min_size"): 2**18,
    ("manual.shard_module_params", "min_size"): 2**18,
}

# ------------------------------------------------------------------ who may differ, and why

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
}


def is_record(thing: type) -> bool:
    """Whether a class is only made by treeshard, with its fields as arguments."""
    return is_dataclass(thing) or issubclass(thing, tuple)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and what public classes define, by name without `treeshard.`."""
    for qualified, thing in surface().items():
        name = qualified.removeprefix("treeshard.")
        if not isinstance(thing, type):
            yield name, thing
        elif not issubclass(thing, Exception):
            for method in vars(thing):
                if method.startswith("_") and (method != "__init__" or is_record(thing)):
                    continue
                value = inspect.getattr_static(thing, method)
                value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                # How JAX takes a pytree apart is its own affair.
                if inspect.isfunction(value) and not method.startswith("tree_"):
                    yield f"{name}.{method}", value


FUNCTIONS = dict(functions())


PARAMETERS = [
    (name, parameter)
    for name, function in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters.values()
    if parameter.name != "self"
]


def test_every_parameter_is_a_known_word() -> None:
    new = [f"{name}: {parameter}" for name, parameter in PARAMETERS if parameter.name not in WORDS]
    assert not new, "use words of this file, or add them with what they mean"


def test_no_word_is_left_over() -> None:
    assert WORDS.keys() - {parameter.name for _, parameter in PARAMETERS} == set()
    assert {*TREE_IS_NOT_FIRST, *MESH_IS_NOT_LAST, *BY_POSITION} <= FUNCTIONS.keys()


def test_everything_is_annotated() -> None:
    bare = [name for name, parameter in PARAMETERS if parameter.annotation is parameter.empty]
    bare += [name for name, f in FUNCTIONS.items() if "return" not in inspect.get_annotations(f)]
    assert not bare


def test_axes_are_one_or_several() -> None:
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
            default = OTHER_DEFAULTS.get((name, parameter.name), DEFAULTS[parameter.name])
            assert parameter.default == default, (name, parameter)
