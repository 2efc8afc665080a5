"""A finding of a plan, and the words of all of them.

The checks in `lint` choose a row and fill it in. One table has the words, so that
all findings can be read, and compared, in one place.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from treeshard._core.specs import MISFITS, Adjustment
from treeshard._core.text import fold_paths
from treeshard._planning.matching import SMALL_FIX, PlannedLeaf

T = TypeVar("T")


class Finding(NamedTuple):
    """One error or warning about a plan.

    Attributes:
        code: Errors: `"unmatched"`, `"rank"`, `"axis-not-in-mesh"`, `"axis-already-used"`,
            `"already-sharded"`, `"indivisible"`, `"reduced-type"`, `"path-collision"`. Warnings:
            `"dead-rule"`, `"shadowed-rule"`, `"explicit-spec-too-small"`,
            `"all-too-small"`, `"same-array"`,
            `"narrowed"`, `"left-whole"`, `"unlike-siblings"`,
            `"state-unlike-weight"`, `"cuts-head"`, `"not-elementwise"`.
        severity: `"error"` if `Plan.check` raises for it, else `"warning"`.
        fact: What is wrong.
        fix: What to do about it.
        paths: The paths of the leaves concerned; empty for a rule that matches no leaf.
        rule: The index of the rule concerned, or `None`.
        wasted: For `"left-whole"` and `"indivisible"`, the bytes that each device could save.
    """

    code: str
    severity: Literal["error", "warning"]
    fact: str
    fix: str
    paths: tuple[str, ...] = ()
    rule: int | None = None
    wasted: int = 0

    def __str__(self) -> str:
        """One line, the paths of repeated layers folded: `layers/{0..79}/attn/q`."""
        paths = fold_paths(self.paths)
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" * (len(paths) > 5))
        where = f"{shown}: " if shown and self.code != "shadowed-rule" else ""
        return f"{self.severity} {self.code}: {where}{self.fact} {self.fix}"


_ERRORS = MISFITS | {"unmatched", "path-collision"}
# The fact and the fix of each code. Where one code has several, its rows have a name after a comma.
_WORDS = {
    "unmatched": (
        "shape {shape}, no rule matches.",
        'Add a rule such as ("{key}", ...), or a last one (".*", None).',
    ),
    "path-collision": (
        "{places} share this path.",
        "Rename a key: rules cannot distinguish these leaves, and files cannot hold both.",
    ),
    "dead-rule": (
        "{by} matches no leaf.{hint}",
        "Correct the pattern, or remove the rule.",
    ),
    "dead-rule, of scalars": (
        "{by} matches only scalars, which need no rule.",
        "Remove it.",
    ),
    "shadowed-rule": (
        "{by} decides no leaf: {takers} {leaves} that it matches.",
        "Move it above rule {first}, or remove it.",
    ),
    "explicit-spec-too-small": (
        "{by}: {asked} is not used for leaves of fewer than {min_size} elements (`min_size`).",
        SMALL_FIX,
    ),
    "all-too-small": (
        "fsdp splits no leaf: all {leaves} have fewer than {min_size} elements (`min_size`). They"
        " take {now} per device, {waste} more than an even split over {axes}.",
        "To split them, pass a smaller `min_size`.",
    ),
    "same-array": (
        "the same array as {firsts} now, and an array of its own once it is placed or stepped:"
        " {cost} more on each device.",
        "To keep one array, use `equinox.nn.Shared`.",
    ),
    "not-elementwise": (
        "it has padding, and its optimizer (Adafactor, Muon, Shampoo, SOAP) computes the update of"
        " an element from others, so the padding changes updates.",
        "Give such leaves an elementwise optimizer, such as AdamW, with `optax.multi_transform`;"
        " or shard a dim that is divisible.",
    ),
    "narrowed": (
        "{wide} in the tree, and {narrow} on devices, since JAX's x64 mode is off.",
        "To keep {wide}, call `jax.config.update('jax_enable_x64', True)` first; otherwise convert"
        " them with `.astype`.",
    ),
    "left-whole": (
        "shape {shape} is replicated, {waste} more per device than an even split over {idle}:"
        " {why}",
        "{fix}",
    ),
    "left-whole, in part": (
        "not split over the idle {idle}: {now} per device, {times}x an even split, {waste} more:"
        " {why}",
        "{fix}",
    ),
    "unlike-siblings": (
        "{given} by {by}, unlike {count} other layers, which have {common}{common_by}.",
        "Let one rule decide all of them, or name this layer in a pattern, if this is intended.",
    ),
    "unlike-siblings, number": (
        "{given} by {by}, which does not say where the number of {key!r} begins and ends, and so"
        " matches these too.",
        "Write {key!r}.",
    ),
    "state-unlike-weight": (
        "{given} by {by}, while its parameter, {parameter}, has {of_parameter} by {parameter_by}:"
        " each step moves one of them to the sharding of the other.",
        "Use one rule for both, or `Plan.follow`.",
    ),
    "cuts-head": (
        "{given} by {by} splits dim {dim}, which is {heads}, into {parts} parts over {axes}: not"
        " between heads. Each product of queries and keys is then summed over devices.",
        "Split another dim over {axes}, or fewer heads over a smaller axis.",
    ),
}


def finding(
    row: str, paths: Iterable[str], rule: int | None = None, wasted: int = 0, **values: Any
) -> Finding:
    """The finding of a row of the table, with these values in its words."""
    code = row.partition(",")[0]
    fact, fix = (words.format(**values) for words in _WORDS[row])
    return Finding(code, _severity(code), fact, fix, tuple(paths), rule, wasted)


def finding_about(
    row: str, leaves: Sequence[PlannedLeaf], wasted: int = 0, **values: Any
) -> Finding:
    """The finding of a row about leaves that one rule decided alike."""
    leaf = leaves[0]
    facts = {"by": decided_by(leaf), "shape": leaf.shape, "asked": leaf.asked, "given": leaf.given}
    return finding(row, [x.path for x in leaves], leaf.rule, wasted, **facts, **values)


def finding_of(
    note: Adjustment, leaves: Sequence[PlannedLeaf], more: str = "", wasted: int = 0
) -> Finding:
    """The finding for an adjustment of leaves that one rule decided alike.

    The adjustment's text is a fact followed by its fix; `more` is added.
    """
    fact, _, fix = note.why.partition(". ")
    fact = f"{decided_by(leaves[0])}: {fact.rstrip('.')}."
    fix = " ".join(part for part in (fix, more) if part) or "Change the rule."
    paths = tuple(leaf.path for leaf in leaves)
    return Finding(note.kind, _severity(note.kind), fact, fix, paths, leaves[0].rule, wasted)


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """The items with equal keys together, in the order in which they appear."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _severity(code: str) -> Literal["error", "warning"]:
    return "error" if code in _ERRORS else "warning"


def rule_text(rule: int | None, pattern: str | None) -> str:
    """`rule 2 'attn/out'`."""
    return f"rule {rule} {pattern!r}"


def decided_by(leaf: PlannedLeaf) -> str:
    """The rule that decided a leaf, in words."""
    if leaf.rule is None:
        return "no rule"
    return rule_text(leaf.rule, leaf.pattern)
