"""What pages tell to type, and what runs on no laptop: clusters, slices, commands."""

import re
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from files import PAGES
from jax._src.clusters import SlurmCluster
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples import multiprocess
from treeshard._core.mesh import parse_axes
from treeshard.training import init_sharded

HOSTS = PAGES["docs/how-to/several-hosts.md"]


# ------------------------------------------------------------------ several hosts


def _directories() -> list[str]:
    """The values of `--directory`, in commands and in lists of arguments."""
    return re.findall(r"--directory,? ([^\s\]\"]+)", HOSTS)


def test_a_directory_of_the_page_reaches_the_checkpoint_as_it_is() -> None:
    for directory in _directories():
        args = multiprocess.parse(["--worker", "--directory", directory])
        assert args.directory == directory


def test_the_page_saves_to_a_bucket_and_to_a_shared_folder() -> None:
    found = _directories()
    assert any("://" in one for one in found)
    assert any("://" not in one for one in found)


def test_every_task_of_the_slurm_recipe_sees_the_gpu_that_jax_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = dict(re.findall(r"#SBATCH --([\w-]+)=(\d+)", HOSTS))
    tasks = int(recipe["ntasks-per-node"])
    seen = int(recipe.get("gpus-per-task") or recipe["gpus-per-node"])
    assert tasks == int(recipe.get("gpus-per-node", tasks))
    for task in range(tasks):
        monkeypatch.setenv("SLURM_LOCALID", str(task))
        assert SlurmCluster.get_local_process_id() < seen, f"task {task} sees {seen} GPUs"


# ------------------------------------------------------------------ slices


_SLICES = re.compile(
    r'make_mesh\("([\w=,]+)",\s+dcn_axes="([\w=,]+)"\)`\s+makes\s+`([^`]+)`\s+of\s+(\d+)\s+devices\s+'
    r"in\s+(\d+)\s+slices"
)
SENTENCES = [match.groups() for text in PAGES.values() for match in _SLICES.finditer(text)]


def test_every_mesh_of_slices_says_what_it_makes() -> None:
    calls = sum(len(re.findall(r"make_mesh\([^)]*dcn_axes=", text)) for text in PAGES.values())
    assert len(SENTENCES) == calls >= 1


@pytest.mark.parametrize(("axes", "slow", "made", "devices", "slices"), SENTENCES)
def test_a_mesh_of_slices_is_the_one_that_the_page_says(
    axes: str, slow: str, made: str, devices: str, slices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax.experimental import mesh_utils

    class AskedError(Exception):
        pass

    def create(shape, dcn_shape, devices, *, process_is_granule):
        raise AskedError([a * b for a, b in zip(shape, dcn_shape, strict=True)])

    monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", create)
    count, of_slices = int(devices), int(slices)
    fakes = [SimpleNamespace(slice_index=i * of_slices // count) for i in range(count)]
    with pytest.raises(AskedError) as asked:
        ts.make_mesh(axes, dcn_axes=slow, devices=fakes)
    assert asked.value.args[0] == list(parse_axes(made.replace(" ", "")).values())


# ------------------------------------------------------------------ sentences


WORDS = {name: " ".join(text.split()) for name, text in PAGES.items()}


def test_the_floor_of_sizes_is_on_the_first_pages_and_where_rules_are_moved() -> None:
    """`MIN_SHARDING_SIZE` replaces a spec that somebody wrote."""
    for page in ("README.md", "docs/index.md", "docs/migrate.md"):
        text = WORDS[page]
        assert re.search(r"16,?384", text), page
        assert "min_size=0" in text, page


def test_what_does_not_fit_its_rule_is_refused_where_the_page_on_replicated_leaves_says() -> None:
    """`shard` places what a plan says, without a check of it."""
    rules, tree, mesh = [("w", P("fsdp"))], {"w": jnp.ones((6, 8))}, ts.make_mesh("fsdp=8")
    plan = ts.plan(tree, rules, mesh, min_size=0)
    match = partial(ts.match_partition_rules, rules, tree, mesh, min_size=0)
    initialise = partial(init_sharded, lambda: tree, rules=rules, mesh=mesh, min_size=0)
    for call in (plan.check, match, initialise):
        with pytest.raises(ts.ShardingRuleError, match="not divisible"):
            call()
    assert match(strict=False) == {"w": P()}
    assert initialise(strict=False)[0]["w"].sharding.spec == P()
    assert ts.shard(tree, plan)["w"].sharding.spec == P()
    said = WORDS["docs/how-to/fix-rules.md"]
    assert "`init_sharded` and `match_partition_rules` without `strict=False`." in said
    assert "`shard(tree, plan)` does not" in said
