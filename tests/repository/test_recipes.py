"""What pages tell to type, and what runs on no laptop: clusters, slices, commands."""

import re
from types import SimpleNamespace

import pytest
from files import PAGES
from jax._src.clusters import SlurmCluster

import treeshard as ts
from treeshard._core.mesh import parse_axes

HOSTS = PAGES["docs/how-to/several-hosts.md"]


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


_SLICES = re.compile(
    r'make_mesh\("([\w=,]+)",\s+dcn_axes="([\w=,]+)"\)`\s+makes\s+`([^`]+)`\s+of\s+(\d+)\s+devices\s+'
    r"in\s+(\d+)\s+slices"
)
SENTENCES = [match.groups() for text in PAGES.values() for match in _SLICES.finditer(text)]


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
