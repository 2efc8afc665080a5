"""`treeshard plan`: its output, exit codes and errors."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import treeshard as ts
from treeshard._cli import main

SHAPES = {
    "layers/0/q": {"shape": [64, 32], "dtype": "bfloat16"},
    "layers/1/q": [[64, 32], "bfloat16"],
    "norm": [[64], "float32"],
}
RULES = """
min_size = 0
[[rules]]
pattern = "norm"
action = "None"
[[rules]]
pattern = "q$"
action = "P('fsdp', None)"
"""


@pytest.fixture
def run(tmp_path, capsys):
    """Writes the files, runs the command, and returns its exit code, output and errors."""

    def go(shapes=SHAPES, rules=RULES, mesh="data=8,fsdp=4", *options: str, name="shapes.json"):
        file = tmp_path / name
        if isinstance(shapes, bytes):
            file.write_bytes(shapes)
        else:
            file.write_text(shapes if isinstance(shapes, str) else json.dumps(shapes))
        rules_file = tmp_path / "rules.toml"
        rules_file.write_bytes(rules if isinstance(rules, bytes) else rules.encode())
        argv = [f"--shapes={file}", f"--rules={rules_file}", f"--mesh={mesh}", *options]
        code = main(["plan", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.replace(str(tmp_path) + "/", "")

    return go


# ------------------------------------------------------------------ output


def test_plan_is_printed(run) -> None:
    code, out, err = run(mesh="fsdp=4,tensor=8")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "path             array            spec             per device  why",
        "layers/{0..1}/q  bfloat16[64,32]  P('fsdp', None)     2.0 KiB  rule 1 'q$'",
        "norm             float32[64]      P()                   256 B  rule 0 'norm'",
        "3 leaves, 4,160 elements, 8.2 KiB in all; 1 leaf is replicated.",
        "2.2 KiB on the fullest of 32 devices (fsdp=4, tensor=8), 8.73x an even split.",
        "",
        "warning left-whole: layers/{0..1}/q: not split over the idle 'tensor' (8): 2.0 KiB per"
        " device, 8x an even split, 1.8 KiB more: rule 1 'q$', P('fsdp', None). Split another dim"
        " over 'tensor'.",
    ]


def test_plan_as_json(run) -> None:
    code, out, _ = run(SHAPES, RULES, "fsdp=3", "--json", "--memory=1MB")
    assert code == 1
    report = json.loads(out)
    assert (report["bytes_per_device"], report["memory"], report["fits"]) == (8448, 10**6, True)
    assert [finding["code"] for finding in report["findings"]] == ["indivisible"]
    assert report["findings"][0]["paths"] == ["layers/0/q", "layers/1/q"]
    decided = ts.Plan.from_json(json.dumps(report["plan"]))
    assert decided.bytes_per_device() == 8448


@pytest.mark.parametrize(
    ("memory", "code", "line"),
    [
        ("80GB", 0, "It fits: 2.2 KiB of 74.5 GiB on a device."),
        ("1kB", 1, "It does NOT fit: 2.2 KiB of 1000 B on a device."),
    ],
)
def test_memory_is_compared_with_the_plan(run, memory, code, line) -> None:
    exit_code, out, _ = run(SHAPES, RULES, "data=8,fsdp=4", f"--memory={memory}")
    assert (exit_code, out.splitlines()[-1]) == (code, line)


def test_every_kind_of_action_is_read(run) -> None:
    rules = """
    min_size = 0
    [[rules]]
    pattern = "norm"
    action = "('embed',)"
    [[rules]]
    pattern = "0"
    action = "shard_dim('data', -1)"
    [[rules]]
    pattern = "1"
    action = "fsdp(('data', 'fsdp'), min_size=0)"
    [logical]
    embed = "fsdp"
    """
    code, out, err = run(SHAPES, rules, "data=8,fsdp=4")
    assert (code, err) == (0, "")
    assert "P(None, 'data')" in out
    assert "P(('data', 'fsdp'),)" in out
    assert "norm        float32[64]      P('fsdp',)" in out


def test_shapes_from_a_safetensors_header(run) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "model.q": {"dtype": "BF16", "shape": [64, 32], "data_offsets": [0, 4096]},
            "model.norm": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [4096, 4160]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(4160)
    code, out, err = run(data, RULES, "fsdp=4", name="model.safetensors")
    assert (code, err) == (0, "")
    assert "model.q     bfloat16[64,32]" in out
    assert "float8_e4m3fn[64]" in out
    # A header alone is enough.
    assert run(data[:-4160], RULES, "fsdp=4", name="model.safetensors") == (code, out, err)
    code, _, err = run(data[:-4161], RULES, "fsdp=4", name="model.safetensors")
    assert code == 2
    assert "model.safetensors is not a safetensors file:" in err


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ("{", "shapes.json is not valid JSON: Expecting property name"),
        ("[1]", 'shapes.json is list, not an object. Write an object of path: {"shape": [8, 4]'),
        ('{"w": [[1], "int8"], "w": [[2], "int8"]}', "the key 'w' is repeated"),
        ({"w": 3}, "w: 3 has no shape and dtype."),
        ({"w": [[8, -4], "int8"]}, "w: the shape is [8, -4], not a list of lengths."),
        ({"w": [[8], "flaot32"]}, "w: 'flaot32' is not a dtype."),
        ({"w": {"shape": [8], "dtype": "int8", "x": 1}}, "w: unknown key 'x'."),
        ({"v": 1, "w": 2}, "2 entries are invalid:\n  v: 1 has no"),
    ],
)
def test_invalid_shapes_are_rejected(run, shapes, text) -> None:
    code, out, err = run(shapes)
    assert (code, out) == (2, "")
    assert err.startswith("treeshard: error: ")
    assert text in err


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "model.safetensors is not a safetensors file:"),
        (struct.pack("<Q", 2) + b"{}x", "model.safetensors is cut short or too long:"),
    ],
    ids=["empty", "too-long"],
)
def test_invalid_safetensors_are_rejected(run, data, text) -> None:
    code, _, err = run(data, name="model.safetensors")
    assert code == 2
    assert text in err


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("[[rules]\n", "rules.toml: Expected ']]' at the end of an array declaration (at line 1,"),
        (b"\xff\xfe", "rules.toml: 'utf-8' codec can't decode"),
        ("ruls = 1", "the file has an unknown key 'ruls'. Did you mean 'rules'?"),
        ("rules = [1]", "rules[0] is 1 (int), not a table."),
        ("[[rules]]\npatern = 'a'", "rules[0] has an unknown key 'patern'. Did you mean 'pattern'"),
        ("[[rules]]\npattern = 'a'\naction = ['x']", "rules[0].action is ['x'] (list), not"),
        (
            "[[rules]]\npattern = 'a'\naction = 'P(x)'",
            "rules[0].action: 'P(x)': 'x' is not a literal",
        ),
        ("[[rules]]\npattern = 'a'\naction = \"fdsp('x')\"", "Did you mean 'fsdp'?"),
        ("[[rules]]\npattern = 'a'\naction = \"__import__('os')\"", "__import__ is not a tactic"),
        ("[[rules]]\npattern = '('\naction = 'None'", "rule 0: the pattern '(' does not compile"),
        ("min_size = 'big'", "min_size is 'big' (str), not a number of elements."),
        ("[logical]\nbatch = 3", "logical rule 0, ('batch', 3), does not end with mesh axes."),
    ],
)
def test_invalid_rules_are_rejected(run, rules, text) -> None:
    code, out, err = run(rules=rules)
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--mesh=data"], "cannot read 'data'"),
        (["--mesh=data=-1"], "the size of 'data' cannot be -1 without devices. Give it a number."),
        (["--memory=much"], "'much' is not an amount of memory. Write it as 80GB or 80GiB."),
        (["--shapes=/nowhere"], "No such file or directory: '/nowhere'"),
    ],
)
def test_invalid_options_are_rejected(run, options, text) -> None:
    code, _, err = run(SHAPES, RULES, "fsdp=4", *options)
    assert code == 2
    assert text in err


def test_usage_and_help(capsys) -> None:
    for argv in ([], ["plan"], ["paln"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
        assert "usage: treeshard" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "exit code: 0, or 1 if the plan has errors" in capsys.readouterr().out


CODE = """
import signal, sys
from treeshard._cli import main
from jax._src import xla_bridge
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells disable it for background jobs
argv = ["plan", "--rules=r.toml", "--mesh=fsdp=65536", "--json", "--shapes"]
print(main([*argv, "s.json"]), xla_bridge.backends_are_initialized())
sys.exit(main([*argv, "slow.json"]))
"""


def test_plan_starts_no_backend_and_ctrl_c_prints_nothing(tmp_path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(SHAPES | {"key": [[], "key<fry>"]}))
    (tmp_path / "r.toml").write_text(RULES)
    os.mkfifo(tmp_path / "slow.json")
    # The interrupt may come just after the file was opened.
    options = ["-W", "error", "-W", "ignore::ResourceWarning"]
    process = start([sys.executable, *options, "-c", CODE], tmp_path)
    with (tmp_path / "slow.json").open("wb"):  # returns when the process opens the other end
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    report, said = out.splitlines()
    assert (process.returncode, said, err) == (130, "1 False", "")
    assert json.loads(report)["plan"]["mesh"][0]["size"] == 65536


def test_it_runs_as_a_module_and_a_reader_may_stop_early(tmp_path) -> None:
    (tmp_path / "s.json").write_text(json.dumps({f"w{i}x": [[i], "int8"] for i in range(3000)}))
    (tmp_path / "r.toml").write_text("rules = [{pattern = '', action = 'None'}]")
    command = f"{sys.executable} -m treeshard plan --shapes=s.json --rules=r.toml --mesh=a=1"
    out, err = start(["sh", "-c", f"{command} | head -1"], tmp_path).communicate(timeout=120)
    assert (out.startswith("path "), err) == (True, "")


def start(command: list[str], directory: Path) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=directory, env=env, **pipes)
