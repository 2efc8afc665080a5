"""The contexts that are part of the key under which JAX keeps traces and programs.

JAX forgets all of them when a context is made, the user's too. So they are made here, by `import
treeshard`, and not by modules that wait for their first use: it may be inside a trace, and the
next call of the jitted function would then be traced and compiled again.

From 0.12 on, importing `jax.extend` does the same: it has contexts of its own. Equinox and
treeshard import it, so it is imported here too.
"""

import jax
import jax.extend.core

# The plan of the step that is traced, as `_planning/plan_in_force.py` has it.
plan_in_force = jax.make_user_context(None)
# The rules for logical names, as `_planning/logical.py` reads them.
logical_rules = jax.make_user_context(None)
# On Explicit axes, the axes over which gradients wait for one sum: those that a user has named.
deferred_axes = jax.make_user_context(())
# Whether the function that accumulates gradients ends these sums, and not the one that made them.
summed_later = jax.make_user_context(False)
# Whether that function takes the full batch in one pass, for a check of what it does in several.
in_one_pass = jax.make_user_context(False)
# The axes over which that function has split the batch by `shard_map`. They are Manual, and yet the
# arrays that a function of the user closes over are full there.
full_over = jax.make_user_context(())
