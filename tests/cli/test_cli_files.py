"""The commands on files (inspect, verify, export): output, files, exit codes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same, files_in, flip_in
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import treeshard as ts
from treeshard._cli import main
from treeshard.checkpoint import Checkpoints, _restore, save
from treeshard.interchange import load_safetensors, save_safetensors

ROOT = Path(__file__).parents[2]


def model(change: float = 0.0) -> dict[str, Any]:
    """Two layers of the same types."""
    layers = [
        {"w": np.full((8, 4), i + 1, np.float32), "b": np.ones(4, ml_dtypes.bfloat16)}
        for i in range(2)
    ]
    layers[1]["w"][2, 3] += change
    return {"layers": layers}


def state(step: int, seed: int = 0) -> dict[str, Any]:
    """A training state with leaves that safetensors cannot hold."""
    return {
        "model": model(step / 100 - 1),
        "step": step,
        "rate": 0.1,
        "run": "Übung",
        "nothing": None,
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.key(seed),
        "int4": np.array([0, 1, 2, 3 - step // 50], ml_dtypes.int4),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A directory of checkpoints with steps 100 and 200."""
    directory = tmp_path_factory.mktemp("läufe") / "run"
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(100, state(100))
        checkpoints.save(200, state(200, seed=1))
    return directory


@pytest.fixture(scope="module")
def weights(run) -> Path:
    """The model of step 100 as a safetensors file."""
    file = run.parent / "weights.safetensors"
    save_safetensors(file, model(), rename=lambda path: path.replace("/", "."))
    return file


@pytest.fixture
def go(capsys, run, tmp_path):
    """Runs a command, and returns its exit code, output and errors."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(x) for x in argv])
        captured = capsys.readouterr()
        short = (
            text.replace(f"{tmp_path}/", "").replace(f"{run.parent}/", "")
            for text in (captured.out, captured.err)
        )
        return code, *short

    return call


# ------------------------------------------------------------------ inspect


def test_inspect_reads_the_latest_step(go, run) -> None:
    code, out, err = go("inspect", run)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "run/200, of steps 100, 200:",
        "path                   leaf          spec  bytes",
        "empty                  float32[0,3]          0 B",
        "int4                   int4[4]               4 B",
        "key                    key<fry>[]            8 B",
        "model/layers/{0..1}/b  bfloat16[4]          16 B",
        "model/layers/{0..1}/w  float32[8,4]        256 B",
        "nothing                None                  0 B",
        "rate                   float 0.1            20 B",
        "run                    str 'Übung'           5 B",
        "step                   int 200               3 B",
        "11 leaves, 312 B.",
    ]
    code, out, _ = go("inspect", run, "--step=100")
    assert (code, out.splitlines()[0]) == (0, "run/100, of steps 100, 200:")
    assert "int 100" in out


def test_inspect_prints_json(go, run, mesh, tmp_path) -> None:
    _, out, _ = go("inspect", run, "--json")
    found = json.loads(out)
    assert (found["format"], found["steps"], found["bytes"]) == ("checkpoint", [100, 200], 312)
    rows = {row.pop("path"): row for row in found["leaves"]}
    assert rows["step"] == {"kind": "int", "value": "200", "bytes": 3}
    assert rows["model/layers/0/w"]["shape"] == [8, 4]
    save(tmp_path / "x", {"w": ts.shard(np.ones((8, 4), np.float32), P("data"), mesh)})
    found = json.loads(go("inspect", tmp_path / "x", "--json")[1])
    assert found["meshes"] == [{"data": 2, "fsdp": 4}]
    assert found["leaves"][0]["spec"] == "P('data',)"


def test_inspect_reads_safetensors(go, weights, tmp_path) -> None:
    code, out, _ = go("inspect", weights)
    assert code == 0
    assert out.splitlines()[1:] == [
        "layers.{0..1}.w  float32[8,4]        256 B",
        "layers.{0..1}.b  bfloat16[4]          16 B",
        "4 leaves, 272 B.",
    ]
    save_safetensors(tmp_path / "m.safetensors", model(), max_file_size=200)
    for path in (tmp_path, tmp_path / "m.safetensors.index.json"):
        found = json.loads(go("inspect", path, "--json")[1])
        assert (found["format"], len(found["leaves"])) == ("safetensors", 4)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere", "There is no checkpoint at nowhere."),
        ("run --step=7", "There is no checkpoint at run/7. The directory has steps 100, 200."),
        ("weights.safetensors --step=7", "is not a directory of checkpoints: it has no step 7."),
        ("run/100/leaves/table.json", "has no 'weight_map'"),
        ("run/100/leaves", "is not a checkpoint: it has no table of leaves."),
        ("noise", "noise is not a safetensors file:"),
    ],
)
def test_paths_that_cannot_be_read_raise(go, run, weights, path, text) -> None:
    (run.parent / "noise").write_bytes(b"n" * 100)
    code, out, err = go("inspect", *f"{run.parent}/{path}".split())
    assert (code, out) == (2, "")
    assert err.startswith("treeshard: error: ")
    assert text in err


def test_control_characters_in_names_are_escaped(go, tmp_path) -> None:
    save_safetensors(
        tmp_path / "x.safetensors", {"a\x1b[2J\x9bm": np.ones(2), "gewicht-ü": np.ones(2)}
    )
    _, out, _ = go("inspect", tmp_path / "x.safetensors")
    assert "a\\x1b[2J\\x9bm" in out
    assert "gewicht-ü" in out
    save(tmp_path / "x", {"a\x1b[2J": 1})
    code, _, err = go("export", tmp_path / "x", tmp_path / "y.safetensors")
    assert code == 2
    assert "a\\x1b[2J: int 1" in err


# ------------------------------------------------------------------ verify


def test_verify_reports_totals(go, run, weights) -> None:
    for path, said in {
        run: "run/200: 11 leaves, 312 B. All match their checksums.\n",
        weights: (
            "weights.safetensors: 4 leaves, 272 B. Headers and sizes are correct. The format has no"
            " checksums, so the values cannot be verified.\n"
        ),
    }.items():
        assert go("verify", path) == (0, said, "")


def test_damaged_leaves_are_listed_and_not_exported(go, tmp_path) -> None:
    names = [f"w{i:02d}" for i in range(12)]
    data = {name: np.random.default_rng(i).random(4096) for i, name in enumerate(names)}
    save(tmp_path / "x", data | {"fine": np.ones(3)})
    for x in data.values():
        flip_in(tmp_path / "x", x.tobytes()[100:120])
    code, out, err = go("verify", tmp_path / "x")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == "x: 12 of 13 leaves damaged:"
    assert [line.split(":")[0].strip() for line in out.splitlines()[1:]] == names
    assert "is damaged (Digest mismatch" in out
    (tmp_path / "m.safetensors").write_bytes(b"before")
    code, said, err = go("export", tmp_path / "x", tmp_path / "m.safetensors")
    assert (code, said) == (2, "")
    assert "x: 12 leaves are damaged:\n  w00: it cannot be read: chunk w00/c/0 in state/" in err
    assert (tmp_path / "m.safetensors").read_bytes() == b"before"
    assert files_in(tmp_path) == ["m.safetensors", "x"]


def test_verify_reports_files_from_which_no_leaf_is_read(go, tmp_path) -> None:
    save(tmp_path / "x", {"w": np.ones(3)})
    (tmp_path / "x/state/_METADATA").unlink()
    lines = "x: 0 of 1 leaf damaged, and 1 other file:\n  state/_METADATA is missing.\n"
    assert go("verify", tmp_path / "x") == (1, lines, "")


def test_verify_reports_truncated_files(go, run, weights, tmp_path) -> None:
    shutil.copytree(run / "100", tmp_path / "x")
    os.truncate(tmp_path / "x" / "leaves" / "table.json", 300)
    shutil.copy(weights, tmp_path / "y")
    os.truncate(tmp_path / "y", weights.stat().st_size - 1)
    for name in "xy":
        code, out, err = go("verify", tmp_path / name)
        assert (code, err) == (1, "")
        assert name in out
        assert go("inspect", tmp_path / name)[:2] == (2, "")


@pytest.mark.parametrize("command", ["verify", "inspect", "export"])
def test_a_step_that_its_writer_removes_meanwhile(command, go, tmp_path, monkeypatch) -> None:
    """The latest one is that of a later step; one that was named is an error, and not damaged."""
    name = "run"
    real = _restore.seal

    def remove_first(path: Path) -> str:
        monkeypatch.setattr(_restore, "seal", real)
        with Checkpoints(tmp_path / name, keep=1) as writer:
            writer.save(int(path.name) + 1, {"w": np.ones(3, np.float32)})
        return real(path)

    more = [tmp_path / "m.safetensors"] if command == "export" else []
    save(tmp_path / name / "1", {"w": np.ones(3, np.float32)})
    monkeypatch.setattr(_restore, "seal", remove_first)
    code, out, err = go(command, tmp_path / name, *more)
    assert (code, err) == (0, "")
    assert ("run/2: 1 leaf" in out) == (command == "verify")
    for named in ([tmp_path / name / "2"], [tmp_path / name, "--step=3"]):
        monkeypatch.setattr(_restore, "seal", remove_first)
        code, out, err = go(command, *named[:1], *more, *named[1:])
        assert (code, out) == (2, "")
        assert "was removed while it was read, as `keep=` of its writer does" in err


# ------------------------------------------------------------------ export


def test_export_writes_the_selected_arrays(go, run, tmp_path) -> None:
    out, expected = tmp_path / "m.safetensors", model(1.0)["layers"]
    rename = ["--rename", "^model/=>", "--rename", "/=>."]
    code, said, _ = go("export", run, out, "--only=^model/", *rename, "--metadata", "format=pt")
    assert (code, said) == (0, "4 tensors, 272 B: m.safetensors\n")
    named = {f"layers.{i}.{name}": expected[i][name] for i in range(2) for name in "wb"}
    assert_same(load_file(out), named)
    code, said, _ = go("export", run, out, "--only=model", "--max-file-size=150")
    assert (code, said) == (0, "4 tensors, 272 B: 2 files and m.safetensors.index.json\n")
    assert go("verify", tmp_path)[0] == 0
    assert_same(load_safetensors(out), {f"model/{x.replace('.', '/')}": named[x] for x in named})
    assert go("export", run, out, "--only=model")[0] == 0
    assert files_in(tmp_path) == ["m.safetensors"]


def test_export_refuses_or_skips_leaves_that_the_format_cannot_hold(go, run, tmp_path) -> None:
    out = tmp_path / "m.safetensors"
    code, said, err = go("export", run / "100", out)
    assert (code, said) == (2, "")
    facts = ["int4: int4[4]", "key: key<fry>[]", "rate: float 0.1", "run: str 'Übung'"]
    for fact in facts:
        assert f"\n  {fact}\n" in err
    assert "--skip leaves them out; --only selects the leaves to export." in err
    assert "nothing" not in err
    assert files_in(tmp_path) == []
    code, said, _ = go("export", run / "100", out, "--skip")
    assert code == 0
    head = ["5 tensors, 272 B: m.safetensors", "5 leaves left out:"]
    assert said.splitlines() == [*head, *(f"  {fact}" for fact in [*facts, "step: int 100"])]
    assert load_file(out)["empty"].shape == (0, 3)
    assert files_in(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only=^opt"], "no array to export with a path that '^opt' matches. It has empty,"),
        (["--only=("], "--only '(': the pattern does not compile"),
        (["--only=model", "--rename=x"], "--rename 'x' has no '=>'. Write it as 'REGEX=>NEW'"),
        (["--only=model", r"--rename=o=>\2"], r"--rename: '\\2' is not a replacement: invalid gr"),
        (["--only=model", "--rename=[01]=>0"], "layers/0/b: the name of ['model/layers/0/b'] and"),
        (["--metadata=pt"], "--metadata 'pt' has no '='. Write it as 'format=pt'."),
    ],
)
def test_export_rejects_invalid_options(go, run, tmp_path, options, text) -> None:
    code, said, err = go("export", run, tmp_path / "m.safetensors", *options)
    assert (code, said) == (2, "")
    assert text in err
    assert files_in(tmp_path) == []


# ------------------------------------------------------------------ plan


def test_plan_reads_shapes_from_checkpoints_and_indexes(go, run, weights, tmp_path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("rules = [{pattern = '', action = \"fsdp('fsdp', min_size=0)\"}]")
    options = [f"--rules={rules}", "--mesh=fsdp=4"]
    code, out, err = go("plan", f"--shapes={run}", *options)
    assert (code, err) == (0, "")
    assert "model/layers/{0..1}/w  float32[8,4]  P('fsdp'," in out
    assert "\nkey " in out
    assert "step" not in out
    save_safetensors(tmp_path / "m.safetensors", model(), max_file_size=150)
    code, out, _ = go("plan", f"--shapes={tmp_path}", *options)
    assert code == 0
    assert "layers/{0..1}/w  float32[8,4]  P('fsdp'," in out


# ------------------------------------------------------------------ as a program


def start(directory: Path, *argv: str, **env: str) -> subprocess.Popen:
    """Starts a Python process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen([sys.executable, *argv], cwd=directory, env=env, **pipes)


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    """Waits for a process; returns its exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


SHAPES = {
    "w": {"shape": [64], "dtype": "float32"},
    "key": {"shape": [], "dtype": "key<fry>"},
}
PLAN = """
import signal, sys
from treeshard._cli import main
from jax._src import xla_bridge
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells disable it for background jobs
argv = ["plan", "--rules=r.toml", "--mesh=fsdp=65536", "--json", "--shapes"]
print(main([*argv, "s.json"]), xla_bridge.backends_are_initialized())
sys.exit(main([*argv, "slow.json"]))
"""


def test_plan_starts_no_backend_and_ctrl_c_prints_nothing(tmp_path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SHAPES))
    (tmp_path / "r.toml").write_text("rules = [{pattern = '', action = \"P('fsdp')\"}]")
    os.mkfifo(tmp_path / "slow.json")
    # The interrupt may come just after the file was opened.
    options = ["-W", "error", "-W", "ignore::ResourceWarning"]
    process = start(tmp_path, *options, "-c", PLAN)
    with (tmp_path / "slow.json").open("wb"):  # returns when the process opens the other end
        process.send_signal(signal.SIGINT)
        code, out, err = ended(process)
    report, said = out.splitlines()
    assert (code, said, err) == (130, "0 False", "")
    assert json.loads(report)["plan"]["mesh"][0]["size"] == 65536


def test_a_reader_may_stop_early_and_read_ascii_only(tmp_path) -> None:
    (tmp_path / "s.json").write_text(
        json.dumps({f"ü{i}x": {"shape": [i], "dtype": "int8"} for i in range(3000)})
    )
    (tmp_path / "r.toml").write_text("rules = [{pattern = '', action = 'None'}]")
    argv = ["plan", "--shapes=s.json", "--rules=r.toml", "--mesh=a=1"]
    with start(tmp_path, "-m", "treeshard", *argv, PYTHONIOENCODING="ascii") as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.stdout.close()
        assert process.stderr.read() == ""
    assert lines[0].startswith("path ")
    assert lines[1].startswith("\\xfc0x ")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_exit_codes_are_the_same_if_output_is_closed(run, tmp_path, closed: str) -> None:
    python = f"{shlex.quote(sys.executable)} -W error -m treeshard"
    for path, code in ((run, 0), (tmp_path / "missing", 2)):
        command = f"{python} verify {shlex.quote(str(path))} {closed}"
        process = subprocess.run(
            command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert process.returncode == code, process.stderr
        assert "Traceback" not in process.stdout + process.stderr
        if code and closed == "2>&-":  # an error is not printed as a result
            assert process.stdout == ""


NO_TENSORSTORE = """
import sys
sys.modules["tensorstore"] = None
from treeshard._cli import main
codes = [main([*argv.split(" ")]) for argv in sys.argv[1:4]]
import jax
print("treeshard.checkpoint" in sys.modules, jax.config.jax_platforms)
print(codes + [main([*argv.split(" ")]) for argv in sys.argv[4:]])
"""


def test_only_checkpoints_need_tensorstore(run, weights) -> None:
    fine = ["inspect weights.safetensors", "verify weights.safetensors"]
    fine += ["export weights.safetensors copy.safetensors"]
    needs = ["inspect run", "export run x.safetensors"]
    process = start(run.parent, "-c", NO_TENSORSTORE, *fine, *needs, JAX_PLATFORMS="")
    code, out, err = ended(process)
    # Nor do they start an accelerator.
    assert (code, out.splitlines()[-2:]) == (0, ["False cpu", "[0, 0, 0, 2, 2]"]), err
    line = (
        "treeshard: error: treeshard.checkpoint needs TensorStore and etils. Install"
        " them with `pip install 'treeshard[checkpoint]'`."
    )
    assert err.splitlines() == [line] * 2


MEMORY = """
from benchmarks._harness import peak_of
from treeshard._cli import main
from treeshard.checkpoint import _array_store
_array_store.IN_FLIGHT = 2**20
# All modules are loaded by a small export: what a large one leaves to the allocator would hide the
# next one.
main(["export", "small", "small.safetensors"])
print(peak_of(lambda: main(["export", "a", "x.safetensors"]))[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_export_holds_a_few_leaves_at_a_time(tmp_path) -> None:
    save(tmp_path / "a", {f"w{i}": np.full(2**20, i, np.float32) for i in range(20)})  # 4 MiB each
    save(tmp_path / "small", {"w": np.ones(4)})
    code, out, err = ended(start(tmp_path, "-c", MEMORY))
    assert code == 0, err
    assert (tmp_path / "x.safetensors").stat().st_size > 80 * 2**20
    assert float(out.splitlines()[-1]) <= 60  # MiB; without the whole tree, which has 80
