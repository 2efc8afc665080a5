"""`treeshard plan`: its output, exit codes and errors."""

import json
import struct

import pytest

from treeshard._cli import main

SHAPES = {
    "layers/0/q": {"shape": [64, 32], "dtype": "bfloat16"},
    "layers/1/q": {"shape": [64, 32], "dtype": "bfloat16"},
    "norm": {"shape": [64], "dtype": "float32"},
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
        rules_file.write_text(rules)
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


def test_plan_as_json_and_what_fits(run) -> None:
    code, out, _ = run(SHAPES, RULES, "fsdp=3", "--json", "--memory=1MB")
    assert code == 1
    report = json.loads(out)
    assert (report["bytes_per_device"], report["memory"], report["fits"]) == (8448, 10**6, True)
    assert [finding["code"] for finding in report["findings"]] == ["indivisible"]
    assert report["findings"][0]["paths"] == ["layers/0/q", "layers/1/q"]
    assert [leaf["path"] for leaf in report["plan"]["leaves"]] == [
        "layers/0/q",
        "layers/1/q",
        "norm",
    ]
    code, out, _ = run(SHAPES, RULES, "data=8,fsdp=4", "--memory=80GB")
    assert (code, out.splitlines()[-1]) == (0, "It fits: 2.2 KiB of 74.5 GiB on a device.")
    code, out, _ = run(SHAPES, RULES, "data=8,fsdp=4", "--memory=1kB")
    assert (code, out.splitlines()[-1]) == (1, "It does NOT fit: 2.2 KiB of 1000 B on a device.")


def test_every_kind_of_action_is_read(run) -> None:
    rules = """
    min_size = 0
    rules = [
        {pattern = "norm", action = "('embed',)"},
        {pattern = "0", action = "shard_dim('data', -1)"},
        {pattern = "1", action = "fsdp(('data', 'fsdp'), min_size=0)"},
    ]
    logical = {embed = "fsdp"}
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
    for wrong, said in {
        b"": "is not a safetensors file:",
        data[:-4161]: "is not a safetensors file:",
        data + b"x": "is cut short or too long:",
    }.items():
        code, _, err = run(wrong, RULES, "fsdp=4", name="model.safetensors")
        assert code == 2
        assert f"model.safetensors {said}" in err


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ("{", "shapes.json: not valid JSON: Expecting property name"),
        ("[1]", 'the file is [1] (list), not an object. Write an object of path: {"shape": [8, 4]'),
        ('{"w": 1, "w": 2}', "the key 'w' is repeated"),
        ({"w": 3}, "w: 3 is not a shape and a dtype."),
        ({"w": {"shape": [8, -4], "dtype": "int8"}}, "w: the shape is [8, -4], not a list of"),
        ({"w": {"shape": [8], "dtype": "flaot32"}}, "w: 'flaot32' is not a dtype."),
        ({"w": {"shape": [8], "dtype": "int8", "x": 1}}, "'x': 1} is not a shape and a dtype."),
        ({"v": 1, "w": 2}, "2 entries are invalid:\n  v: 1 is not"),
    ],
)
def test_invalid_shapes_are_rejected(run, shapes, text) -> None:
    code, out, err = run(shapes)
    assert (code, out) == (2, "")
    assert err.startswith("treeshard: error: ")
    assert text in err


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("[[rules]\n", "rules.toml: Expected ']]' at the end of an array declaration (at line 1,"),
        ("rules = [1]", "rules[0] is 1 (int), not a table."),
        ("[[rules]]\npatern = 'a'", "rules[0] has an unknown key 'patern'. Did you mean 'pattern'"),
        ("[[rules]]\npattern = 'a'\naction = ['x']", "rules[0].action is ['x'] (list), not"),
        ("[[rules]]\npattern = 'a'\naction = 'P(x)'", "rules[0].action: 'P(x)': 'x' is not a"),
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
