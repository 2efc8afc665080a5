"""Do the processes find each other?"""

import jax

from tests.multiprocess.worker import Context


def check_all_are_there(context: Context) -> None:
    assert jax.process_count() == context.count
    assert jax.process_index() == context.index
    assert len(jax.devices()) == 4 * context.count


def check_the_arguments_arrive(context: Context) -> None:
    assert context.args == ["--loud"]


def check_that_fails_where_it_is_told_to(context: Context) -> None:
    assert context.index != 1, "process 1 has something to complain about"
