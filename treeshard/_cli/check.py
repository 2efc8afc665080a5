"""`treeshard check`: are the gradients of a model the same in every layout? On simulated CPUs."""

import argparse
import sys

from treeshard._cli.compile import mesh_for
from treeshard._cli.functions import call_function, load_function
from treeshard._planning.plan import plan
from treeshard.errors import FormatError, WrongResultError
from treeshard.testing._checks import check
from treeshard.testing._computations import Gradients
from treeshard.testing._layouts import layouts


def run_check(options: argparse.Namespace) -> tuple[str, int]:
    """Prints a table of layouts and leaves, and what is wrong. Returns 1 if something is."""
    mesh = mesh_for(options.mesh, None)
    result = call_function(options.function, load_function(options.function))
    if not isinstance(result, tuple) or len(result) != 4 or not callable(result[0]):
        shown = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise FormatError(
            f"{options.function} returned {shown}. It must return (loss, params, batch, rules):"
            " a function `loss(params, batch)`, its arguments as arrays, and the rules."
        )
    loss, params, batch, rules = result
    planned = plan(params, rules, mesh, min_size=0)
    planned.check()
    try:
        computation = Gradients(loss, params, batch, planned)
        report = call_function(
            options.function,
            lambda: check("check_gradients", computation, layouts(planned, batch), _say),
        )
    except WrongResultError as error:
        return str(error), 1
    return str(report), 0


def _say(text: str) -> None:
    print(f"check: {text}", file=sys.stderr, flush=True)
