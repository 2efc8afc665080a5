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

    def go(*options: str, shapes=SHAPES, rules=RULES, mesh="data=8,fsdp=4", name="shapes.json"):
        text = shapes if isinstance(shapes, str | bytes) else json.dumps(shapes)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        (tmp_path / "rules.toml").write_text(rules)
        files = [f"--shapes={tmp_path / name}", f"--rules={tmp_path / 'rules.toml'}"]
        code = main(["plan", *files, f"--mesh={mesh}", *options])
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
    code, out, _ = run("--json", "--memory=1MB", mesh="fsdp=3")
    assert code == 1
    report = json.loads(out)
    assert (report["bytes_per_device"], report["memory"], report["fits"]) == (8448, 10**6, True)
    (finding,) = report["findings"]
    assert (finding["severity"], finding["code"]) == ("error", "indivisible")
    assert finding["paths"] == ["layers/0/q", "layers/1/q"]
    assert [leaf["path"] for leaf in report["plan"]["leaves"]] == [*SHAPES]
    code, out, _ = run("--memory=80GB")
    assert (code, out.splitlines()[-1]) == (0, "It fits: 2.2 KiB of 74.5 GiB on a device.")
    code, out, _ = run("--memory=1kB")
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
    code, out, err = run(rules=rules)
    assert (code, err) == (0, "")
    assert "P(None, 'data')" in out
    assert "P(('data', 'fsdp'),)" in out
    assert "norm        float32[64]      P('fsdp',)" in out


def test_shapes_from_a_safetensors_header(run) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "model.q": {"dtype": "BF16", "shape": [64, 32], "data_offsets": [0, 4096]},
        "model.norm": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [4096, 4160]},
    }
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(4160)
    code, out, err = run(shapes=data, name="model.safetensors")
    assert (code, err) == (0, "")
    assert "model.q     bfloat16[64,32]" in out
    assert "float8_e4m3fn[64]" in out
    # A header alone is enough.
    assert run(shapes=data[:-4160], name="model.safetensors") == (code, out, err)
    for wrong, said in {
        b"": "is not a safetensors file:",
        data[:-4161]: "is not a safetensors file:",
        data + b"x": "is cut short or too long:",
    }.items():
        code, _, err = run(shapes=wrong, name="model.safetensors")
        assert code == 2
        assert f"model.safetensors {said}" in err


# ------------------------------------------------------------------ bad input

RULE = "[[rules]]\npattern = 'a'\n"
INT8 = {"shape": [8], "dtype": "int8"}
INVALID_SHAPES = [
    ("{", "shapes.json: not valid JSON: Expecting property name"),
    ("[1]", 'the file is [1] (list), not an object. Write an object of path: {"shape": [8, 4]'),
    ('{"w": 1, "w": 2}', "the key 'w' is repeated"),
    ({"w": 3}, "w: 3 is not a shape and a dtype."),
    ({"w": INT8 | {"shape": [8, -4]}}, "w: the shape is [8, -4], not a list of"),
    ({"w": INT8 | {"dtype": "flaot32"}}, "w: 'flaot32' is not a dtype."),
    ({"w": INT8 | {"x": 1}}, "'x': 1} is not a shape and a dtype."),
    ({"v": 1, "w": 2}, "2 entries are invalid:\n  v: 1 is not"),
]
INVALID_RULES = [
    ("[[rules]\n", "rules.toml: Expected ']]' at the end of an array declaration (at line 1,"),
    ("rules = [1]", "rules[0] is 1 (int), not a table."),
    ("[[rules]]\npatern = 'a'", "rules[0] has an unknown key 'patern'. Did you mean 'pattern'"),
    (f"{RULE}action = ['x']", "rules[0].action is ['x'] (list), not"),
    (f"{RULE}action = 'P(x)'", "rules[0].action: 'P(x)': 'x' is not a"),
    (f"{RULE}action = \"fdsp('x')\"", "Did you mean 'fsdp'?"),
    (f"{RULE}action = \"__import__('os')\"", "__import__ is not a tactic"),
    ("[[rules]]\npattern = '('\naction = 'None'", "rule 0: the pattern '(' does not compile"),
    ("min_size = 'big'", "min_size is 'big' (str), not a number of elements."),
    ("[logical]\nbatch = 3", "logical rule 0, ('batch', 3), does not end with mesh axes."),
]
INVALID_OPTIONS = [
    ("--mesh=data", "cannot read 'data'"),
    ("--mesh=data=-1", "the size of 'data' cannot be -1 without devices. Give it a number."),
    ("--memory=much", "'much' is not an amount of memory. Write it as 80GB or 80GiB."),
    ("--shapes=/nowhere", "No such file or directory: '/nowhere'"),
]
INVALID = [
    *(((), {"shapes": shapes}, text) for shapes, text in INVALID_SHAPES),
    *(((), {"rules": rules}, text) for rules, text in INVALID_RULES),
    *(((option,), {}, text) for option, text in INVALID_OPTIONS),
]


@pytest.mark.parametrize(("options", "files", "text"), INVALID)
def test_invalid_input_is_rejected(run, options, files, text) -> None:
    code, out, err = run(*options, **files)
    assert (code, out) == (2, "")
    assert err.startswith("treeshard: error: ")
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
    assert "Exit code: 0 on success, 1 if the plan has errors" in capsys.readouterr().out
