"""`suggest` ranks meshes and strategies by what was compiled, and gives every loser a reason."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import runs, wait_until
from treeshard.programs import Strategy, Suggestion, suggest
from treeshard.programs._candidates import Candidate, Estimate, candidates, named_strategies
from treeshard.programs._suggest import _Compiling, _Target, compile_in_turn, probes_of
from treeshard.programs._suggestions import Verdict, ranked

S = jax.ShapeDtypeStruct
WIDTH, ROWS = 256, 64
TENSOR = Strategy(
    "FSDP x TP",
    ("fsdp", "tensor"),
    [("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp")), (".*", ts.fsdp("fsdp"))],
)


def make(mesh: Any, rules: Any, remat: bool = False, *, split: bool = True) -> Any:
    layer = {"up": S((WIDTH, 4 * WIDTH), "float32"), "down": S((4 * WIDTH, WIDTH), "float32")}
    params = {f"layer{i}": layer for i in range(2)}
    plan = ts.plan({"params": params, "opt_state": {"mu": params}}, rules, mesh)
    specs = plan.specs["params"]

    def block(x: jax.Array, layer: Any, name: str) -> jax.Array:
        layer = ts.unshard(layer, specs[name], "fsdp")
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"]

    if remat:
        block = jax.checkpoint(block, static_argnums=2)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for name, layer in params.items():
            x = block(x, layer, name)
        return jnp.mean(x**2)

    def step(state: Any, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt_state"]["mu"], grads)
        new = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu)
        return {"params": new, "opt_state": {"mu": mu}}, value

    batch = P(tuple(axis for axis in mesh.axis_names if axis != "tensor")) if split else P()
    return ts.jit_step(step, plan, batch=batch), plan.structs, S((ROWS, WIDTH), "float32")


def test_repeated_work_loses() -> None:
    def whole(mesh: Any, rules: Any) -> Any:
        return make(mesh, rules, split=False)

    with pytest.warns(ts.ShardingWarning, match="do the same work"):
        found = suggest(whole, devices=8, strategies=["FSDP"], memory="1GB")
    assert found.best is None
    [row] = found.losers
    assert row.outcome == "devices repeat each other's work: each does 8.0 x an even share of it"


def _keys(found: Any) -> list[tuple[str, str]]:
    return [(row.candidate.strategy.name, row.candidate.described) for row in found.rows]


@pytest.fixture(scope="module")
def compiled() -> Any:
    """All that fit, compiled."""

    def plain(mesh: Any, rules: Any) -> Any:
        return make(mesh, rules)

    chosen = ["DP", "FSDP", "HSDP", TENSOR]
    return suggest(plain, devices=8, memory="1GB", strategies=chosen, top=99)


def test_the_first_exposes_no_more_than_any_other_that_was_compiled(compiled) -> None:
    assert compiled.stopped is None
    assert all(row.verdict is not None for row in compiled.rows)
    # CPUs have no published peaks, and so no times: what is sent decides.
    exposed = [row.verdict.exposed for row in compiled.rows]
    assert exposed[0] <= 1.03 * min(exposed)
    assert {name for name, _ in _keys(compiled)} == {"DP", "FSDP", "HSDP", "FSDP x TP"}
    assert compiled.losers == ()


def test_options_need_no_defaults_and_what_is_fixed_is_read_from_the_trace() -> None:
    def needed(mesh: Any, rules: Any, remat: bool, accumulate: int) -> Any:
        return make(mesh, rules, remat)

    found = suggest(needed, devices=8, strategies=["FSDP"], top=0, memory="1GB")
    assert len(found.rows) == 4

    def once(mesh: Any, rules: Any) -> Any:
        return make(mesh, rules, False)

    def always(mesh: Any, rules: Any) -> Any:
        return make(mesh, rules, True)

    for function, remat in ((once, False), (always, True)):
        found = suggest(function, devices=8, strategies=["FSDP"], top=1, memory="1GB")
        gathered = {False: 8, True: 12}[remat]  # MiB: 4 gathered, 4 scattered, 4 gathered again
        assert found.best.verdict.planned == pytest.approx(gathered * 2**20, rel=0.01)


def test_what_does_not_fit_is_never_suggested() -> None:
    # All of the state is 4 MiB.
    found = suggest(make, devices=8, memory="3MiB", strategies=["DP", "FSDP"], top=9)
    assert all(row.fits is True for row in found.rows)
    reasons = {str(row.candidate): row.outcome for row in found.losers}
    assert reasons["DP on data=8"].startswith("does not fit: the state alone needs 8.0 MiB of")
    for row in found.rows:
        assert row.verdict.need <= 3 * 2**20
    compiled = [row for row in found.losers if row.verdict is not None]
    for row in compiled:
        assert row.verdict.need > 3 * 2**20
        assert "does not fit: " in row.outcome
        assert "are temporaries" in row.outcome


def test_one_of_each_option_is_compiled() -> None:
    # Where the memory is not known, all count as if they fit.
    found = suggest(make, devices=8, strategies=["FSDP", "HSDP"], top=1)
    assert [row.candidate.remat for row in found.rows if row.verdict] == [False, True]
    assert len(found.rows) == 6
    assert found.best.fits is None


def test_what_a_loop_moves_an_unknown_number_of_times_is_unknown() -> None:
    def looping(mesh: Any, rules: Any) -> Any:
        plan = ts.plan({"w": S((WIDTH, WIDTH), "float32")}, rules, mesh)

        def update(w: jax.Array, batch: jax.Array) -> jax.Array:
            def loss(w: jax.Array) -> jax.Array:
                return jnp.mean((batch @ ts.unshard(w, P("fsdp"), "fsdp")) ** 2)

            return w - jax.grad(loss)(w)

        def step(state: Any, batch: jax.Array) -> Any:
            w = jax.lax.while_loop(lambda w: jnp.sum(w) > 1, lambda w: update(w, batch), state["w"])
            return {"w": w}, jnp.sum(w)

        return ts.jit_step(step, plan), plan.structs, S((ROWS, WIDTH), "float32")

    found = suggest(looping, devices=8, strategies=["FSDP"], memory="1GB")
    verdict = found.best.verdict
    assert (verdict.moved, verdict.exposed) == (None, None)
    assert str(found).splitlines()[2].split()[-4:-1] == 3 * ["unknown"]


def test_what_sends_an_unknown_number_of_bytes_comes_last() -> None:
    rows = [
        Suggestion(Candidate(TENSOR, {}), None, Verdict(1, 2, exposed=exposed), None)
        for exposed in (None, 2000, 1000)
    ]
    ordered = ranked(rows, "8 x cpu", None).rows
    assert [row.verdict.exposed for row in ordered] == [1000, 2000, None]


def timed(
    name: str, seconds: float, need: int = 1, *, exposed: float = 0.0, remat: bool = False,
    complete: bool = True,
) -> Suggestion:  # fmt: skip
    strategies = named_strategies({})
    axes = {"DP": "data", "ZeRO-1": "data", "FSDP": "fsdp", "HSDP": "data fsdp"}[name].split()
    candidate = Candidate(strategies[name], dict.fromkeys(axes, 2), {"remat": remat})
    verdict = Verdict(
        need, 99, exposed_seconds=exposed, seconds=seconds, exposed=0, is_complete=complete
    )
    return Suggestion(candidate, Estimate(1, 1, 1.0), verdict, None)


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        ([timed("FSDP", 2.0), timed("DP", 3.0), timed("HSDP", 1.0)], [2, 0, 1]),
        # Within 3%, the simplest comes first, and then the next simple one.
        ([timed("HSDP", 1.0), timed("FSDP", 1.01), timed("ZeRO-1", 1.02), timed("DP", 1.03)],
         [3, 2, 1, 0]),
        ([timed("HSDP", 1.0), timed("DP", 1.04), timed("FSDP", 1.02)], [2, 0, 1]),
        ([timed("FSDP", 1.0, remat=True), timed("FSDP", 1.02)], [1, 0]),
        # Of what takes equally long and is equally simple, what exposes least, then the memory.
        ([timed("FSDP", 1.0, exposed=0.2), timed("FSDP", 1.0, 5, exposed=0.1),
          timed("FSDP", 1.0, 4, exposed=0.1)], [2, 1, 0]),
        # A time that lacks something is after all that lack nothing.
        ([timed("DP", 0.5, complete=False), timed("HSDP", 1.0)], [1, 0]),
    ],
    ids=["time", "simplest", "no chain", "options", "ties", "incomplete"],
)  # fmt: skip
def test_the_fastest_is_first_and_of_equals_the_simplest(rows, order) -> None:
    assert list(ranked(rows, "8 x cpu", None).rows) == [rows[i] for i in order]


@pytest.mark.parametrize(
    ("times", "fitting", "compiled"),
    [
        # With remat it is faster: so the next are tried with it.
        ({"F": 3.0, "T": 1.0}, "FT", ["F0", "T0", "T1", "T2"]),
        ({"F": 1.0, "T": 3.0}, "FT", ["F0", "T0", "F1", "F2"]),
        # Without it nothing fits.
        ({"F": 1.0, "T": 3.0}, "T", ["F0", "F1", "F2", "F3", "T0", "T1", "T2"]),
        ({"F": 1.0, "T": 3.0}, "", ["F0", "F1", "F2", "F3", "T0", "T1", "T2", "T3"]),
    ],
)
def test_candidates_are_compiled_with_the_fastest_options(times, fitting, compiled) -> None:
    rows = [
        Suggestion(
            Candidate(TENSOR, {"fsdp": i}, {"remat": remat}), Estimate(1, 1, 1.0), None, None
        )
        for remat in (False, True)
        for i in range(4)
    ]
    judged: list[str] = []

    def judge(row: Suggestion) -> Suggestion:
        option = "FT"[row.candidate.remat]
        judged.append(f"{option}{row.candidate.axes['fsdp']}")
        need = 1 if option in fitting else 3
        return replace(row, verdict=Verdict(need, 2, seconds=times[option]))

    compile_in_turn(rows, 3, [{"remat": False}, {"remat": True}], judge)
    assert judged == compiled


def test_each_value_of_an_option_is_tried_with_the_first_of_the_others() -> None:
    assert probes_of({}) == [{}]
    assert probes_of({"remat": (False, True), "accumulate": (1, 4)}) == [
        {"remat": False, "accumulate": 1},
        {"remat": True, "accumulate": 1},
        {"remat": False, "accumulate": 4},
    ]


def test_each_impossible_candidate_has_its_reason() -> None:
    odd = Strategy("odd", ("fsdp", "tensor"), [("up", P(None, ("fsdp", "tensor")))])

    heads = TENSOR._replace(name="heads", divides={"tensor": 6})

    def with_batch(mesh: Any, rules: Any) -> Any:
        step, state, _ = make(mesh, rules)
        return step, state, S((4, WIDTH), "float32")

    found = suggest(with_batch, devices=8, strategies=["FSDP", "HSDP", TENSOR, odd, heads], top=0,
                    memory="1GB")  # fmt: skip
    reasons = {str(row.candidate): row.outcome for row in found.losers}
    assert reasons["FSDP on fsdp=8"] == "a batch of 4 does not divide by 8 devices"
    assert "a batch of 4" in reasons["HSDP on data=4,fsdp=2"]
    assert reasons["odd on fsdp=4,tensor=2"].startswith("error unmatched: ")
    assert reasons["heads on fsdp=2,tensor=4"] == "tensor=4 does not divide 6"
    assert ("heads", "fsdp=4,tensor=2") in _keys(found)
    assert ("FSDP x TP", "fsdp=4,tensor=2") in _keys(found)
    assert ("FSDP x TP", "fsdp=2,tensor=4") in _keys(found)


def test_accumulation_is_varied_where_it_is_offered() -> None:
    def offered(mesh: Any, rules: Any, accumulate: int = 1, global_batch: int = 0) -> Any:
        assert global_batch == 32
        step, state, _ = make(mesh, rules)
        return step, state, S((global_batch, WIDTH), "float32")

    found = suggest(offered, devices=8, strategies=["FSDP"], top=0, memory="1GB",
                    global_batch=32)  # fmt: skip
    assert _keys(found) == [("FSDP", "fsdp=8"), ("FSDP", "fsdp=8, accumulate=4")]
    more = [row.estimate.moved_bytes for row in found.rows]
    assert more[1] > 3 * more[0]
    with pytest.raises(ts.errors.TreeShardError, match="does not take it"):
        suggest(make, devices=8, global_batch=32)


def test_the_answer_is_code_that_runs_and_nothing_is_kept_on_disk(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = suggest(make, devices=8, memory="1GB", strategies=["HSDP"], top=1, progress=True)
    names: dict[str, Any] = {"ts": ts, "P": P}
    exec(found.code(), names)
    assert dict(names["mesh"].shape) == dict(found.best.candidate.axes)
    step, state, batch = make(names["mesh"], names["rules"])
    step.compile(state, batch)
    text = str(found)
    assert "memory" in text.splitlines()[1]
    assert found.code() in text
    report = json.loads(found.to_json())
    assert report["rows"][0]["fits"] is True
    assert report["rows"][0]["mesh"] == dict(found.best.candidate.axes)
    assert ": compiled (" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_the_devices_memory_is_a_lower_bound() -> None:
    found = suggest(make, devices=1024, strategies=["FSDP"], memory="1GB")
    assert found.best is None
    assert {row.outcome for row in found.losers} == {
        "a batch of 64 does not divide by 1024 devices"
    }
    assert "nothing is left" in str(found)
    found = suggest(make, devices=16, strategies=["FSDP"], memory="1GB")
    assert found.best.fits is None
    assert "only 8 devices are attached" in found.stopped
    assert "a lower bound" in str(found)
    assert "> 512.0 KiB" in str(found)


@pytest.mark.parametrize("budget", [0, 0.5])
def test_a_budget_stops_compiling(budget) -> None:
    found = suggest(make, devices=8, memory="1GB", budget=budget)
    assert all(row.verdict is None for row in found.rows)
    assert "Not everything was compiled: the budget of time was over." in str(found)


def test_wrong_functions_and_strategies_are_told() -> None:
    with pytest.raises(ts.errors.TreeShardError, match=r"not a tuple \(step, state, batch\)"):
        suggest(lambda mesh, rules: None, devices=8)
    with pytest.raises(ts.errors.TreeShardError, match=r"no strategy 'FSDP2'. Did you mean 'FSDP'"):
        suggest(make, devices=8, strategies=["FSDP2"])

    def failing(mesh: Any, rules: Any) -> Any:
        if mesh.size > 1:
            raise ValueError("no such model")
        return make(mesh, rules)

    with pytest.raises(ts.errors.TreeShardError, match="failed: no such model"):
        suggest(failing, devices=8, memory="1GB", strategies=["DP", "FSDP"])


# ------------------------------------------------------------------ the process that compiles


def test_a_compiler_that_ends_its_process_loses_that_program_only() -> None:
    def fragile(mesh: Any, rules: Any) -> Any:
        if dict(mesh.shape).get("fsdp") == 4:
            os.abort()
        return make(mesh, rules)

    found = suggest(fragile, devices=8, memory="1GB", strategies=["HSDP"], top=9)
    assert [row.mesh for row in found.rows] == ["data=4,fsdp=2"]
    [lost] = found.losers
    assert lost.mesh == "data=2,fsdp=4"
    assert lost.outcome == (
        "failed: its process ended, as where the compiler fails a check of its own or the host has"
        " no memory left"
    )


# A command, which Ctrl-C reaches when the file in its first argument is there.
INTERRUPTED = """
import os, signal, subprocess, sys, time
from pathlib import Path
import treeshard as ts
from tests.programs import test_suggest

running = Path(sys.argv[1])
# Python does not hear Ctrl-C where a shell began its parent in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
ts.simulate_devices(8)

def slow(mesh, rules):
    if mesh.size == 8 and "fsdp" in mesh.shape:
        started = subprocess.Popen(["sleep", "60"])
        running.with_suffix(".part").write_text(f"{os.getpid()} {started.pid}")
        running.with_suffix(".part").rename(running)
        time.sleep(60)
    return test_suggest.make(mesh, rules)

# By its plan, DP moves least.
found = ts.suggest(slow, memory="1GB", strategies=["DP", "FSDP"])
print(found.stopped, {row.mesh: row.verdict is not None for row in found.rows})
"""
# Python runs this when it starts: here, in the process that compiles.
STARTS = """
import sys
from pathlib import Path

if any("programs._child" in part for part in sys.orig_argv):
    import os, time
    part = Path(r"{running}.part")
    part.write_text(str(os.getpid()))
    part.rename(r"{running}")
    time.sleep(60)
"""


@pytest.mark.parametrize("while_it", ["starts", "compiles"])
def test_ctrl_c_returns_what_is_done_and_ends_the_compiler(while_it, tmp_path) -> None:
    """A terminal sends it to all processes of the command."""
    script, running = tmp_path / "script.py", tmp_path / "process"
    script.write_text(INTERRUPTED)
    if while_it == "starts":
        (tmp_path / "sitecustomize.py").write_text(STARTS.format(running=running))
    started = subprocess.Popen(
        [sys.executable, script, running],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not running.exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    compiled = {"data=8": while_it == "compiles", "fsdp=8": False}
    assert started.communicate(timeout=30) == (f"interrupted {compiled}\n", "")
    processes = [*map(int, running.read_text().split())]
    wait_until(lambda: not any(map(runs, processes)))


def test_a_killed_process_leaves_no_compiler(tmp_path) -> None:
    script, running = tmp_path / "script.py", tmp_path / "process"
    script.write_text(INTERRUPTED)
    started = subprocess.Popen(
        [sys.executable, script, running],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    wait_until(running.exists)
    compiler, below = map(int, running.read_text().split())
    started.kill()
    started.wait()
    wait_until(lambda: not runs(compiler))
    os.kill(below, signal.SIGKILL)  # it is not ours: a compiler's assembler ends by itself


def test_a_path_object_on_the_import_path_is_no_obstacle(monkeypatch, tmp_path) -> None:
    """Python passes over it."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert suggest(make, devices=8, memory="1GB", strategies=["DP"]).best.fits


def test_settings_of_jax_hold_where_a_program_is_compiled() -> None:
    def told(mesh: Any, rules: Any) -> Any:
        if mesh.size > 1:
            raise ValueError(f"precision {jax.config.jax_default_matmul_precision}")
        return make(mesh, rules)

    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(ts.errors.TreeShardError, match="failed: precision highest"),
    ):
        suggest(told, devices=8, strategies=["DP"], memory="1GB")


def test_a_function_that_cannot_be_copied_is_told() -> None:
    device = jax.devices()[0]

    def bound(mesh: Any, rules: Any) -> Any:
        assert device
        return make(mesh, rules)

    with pytest.raises(ts.errors.TreeShardError, match=(
        "suggest: the function cannot be copied to the process that compiles: cannot pickle"
        " '.*Device' object. Make what it refers to inside of it, or in a module that it imports."
    )):  # fmt: skip
        suggest(bound, devices=8, strategies=["DP"], memory="1GB")


def test_a_script_is_not_run_again(tmp_path) -> None:
    """It calls `suggest` at its top level, with a function of its own. What the current folder has
    is not imported, as it is not by a script of another folder."""
    script, current = tmp_path / "script.py", tmp_path / "current"
    current.mkdir()
    (current / "jax.py").write_text("raise ImportError")
    script.write_text(
        "import treeshard as ts\n"
        "from tests.programs import test_suggest\n"
        "print('once')\n"
        "ts.simulate_devices(8)\n"
        "def make(mesh, rules):\n"
        "    return test_suggest.make(mesh, rules)\n"
        "found = ts.suggest(make, memory='1GB', strategies=['DP'])\n"
        "print(found.best.fits)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=current,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("once\nTrue\n", "")


@pytest.mark.parametrize(
    ("attached", "processes", "reason"),
    [
        ("tpu", 1, "this process holds the TPUs; name them by `topology`"),
        ("cpu", 2, "the devices belong to several processes; name them by `topology`"),
    ],
)
def test_devices_that_another_process_cannot_open_are_only_estimated(
    monkeypatch, attached, processes, reason
) -> None:
    monkeypatch.setattr("jax.process_count", lambda: processes)
    devices = [SimpleNamespace(platform=attached, device_kind="TPU v5 lite")] * 8
    monkeypatch.setattr("jax.devices", lambda: devices)
    assert _Target(None, 8, None, None).missing() == reason


@pytest.mark.parametrize(
    ("state", "options", "reason"),
    [
        # 8 MiB fit; what was refused needs 4 MiB beside its state, of which 3 MiB are counted.
        (6, {}, "not compiled: HSDP on data=2,fsdp=4 needs 4.0 MiB beside its state, and the state"
                " alone takes 6.0 MiB here"),
        (5, {}, None),
        (6, {"accumulate": 4}, None),
    ],
    ids=["more state", "less state", "smaller passes"],
)  # fmt: skip
def test_what_needs_more_than_one_that_was_refused_is_not_compiled(state, options, reason) -> None:
    hsdp = Strategy("HSDP", ("data", "fsdp"), [(".*", ts.fsdp("fsdp"))])
    target = _Target(None, 8, None, 8 * 2**20)
    compiling = _Compiling(make, target, {}, math.inf, False)
    compiling.refused.append((Candidate(hsdp, {"data": 2, "fsdp": 4}), 4 * 2**20))
    other = Candidate(hsdp, {"data": 4, "fsdp": 2}, options)
    row = Suggestion(other, Estimate(state * 2**20, 0, 0.0), None, None)
    assert compiling._refused_alike(row) == reason
    # A tensor axis splits what is beside the state too.
    smaller = replace(other, axes={"data": 2, "fsdp": 2, "tensor": 2})
    assert compiling._refused_alike(replace(row, candidate=smaller)) is None


# ------------------------------------------------------------------ candidates


def test_hundreds_of_candidates_need_no_compiling() -> None:
    strategies = [TENSOR._replace(name=f"rules {i}") for i in range(8)]
    every = list(candidates(strategies, 512, 1, {"remat": (False, True)}))
    assert len(every) >= 200
    assert all(math.prod(one.axes.values()) == 512 for one in every)
    assert len(set(map(str, every))) == len(every)


def test_candidates_that_differ_in_options_are_planned_once(monkeypatch) -> None:
    planned: list[str] = []

    def counting(state: Any, rules: Any, mesh: str) -> Any:
        planned.append(mesh)
        return ts.plan(state, rules, mesh)

    def offering(mesh: Any, rules: Any, remat: bool, accumulate: int) -> Any:
        return make(mesh, rules, remat)

    monkeypatch.setattr("treeshard.programs._candidates.plan", counting)
    found = suggest(offering, devices=8, strategies=["FSDP", "HSDP"], top=0)
    assert len(found.rows) == 12
    assert [mesh for mesh in planned if mesh != "data=1"] == [
        "fsdp=8", "data=2,fsdp=4", "data=4,fsdp=2"
    ]  # fmt: skip


def test_strategies_of_one_name_are_planned_by_their_own_rules() -> None:
    split, whole = (
        Strategy("mine", ("fsdp",), [(".*", ts.fsdp("fsdp"))]),
        Strategy("mine", ("fsdp",), [(".*", None)]),
    )
    found = suggest(make, devices=8, strategies=[split, whole], memory="1GB", top=0)
    assert len({row.estimate.state_bytes for row in found.rows}) == 2


def test_the_outer_axis_runs_between_nodes() -> None:
    found = suggest(make, topology="h100:2x4", strategies=["FSDP", "HSDP"], top=0)
    by_mesh = {row.mesh: row.estimate.seconds for row in found.rows}
    # Only gradients, and not weights, go over the slow network.
    assert by_mesh["data=2,fsdp=4"] < by_mesh["fsdp=8"]
    assert by_mesh["data=2,fsdp=4"] < by_mesh["data=4,fsdp=2"]


def test_only_what_the_step_uses_is_estimated_to_move() -> None:
    def averaged(mesh: Any, rules: Any, *, copies: tuple[str, ...] = ("average",)) -> Any:
        weights = {"model": {"w": S((512, 512), "float32")}}
        state = {**weights, **{name: {"w": S((512, 512), "float32")} for name in copies}}
        plan = ts.plan(state, rules, mesh)

        def step(state: Any, batch: jax.Array) -> Any:
            loss = lambda model: jnp.mean((batch @ ts.unshard(model)["w"]) ** 2)  # noqa: E731
            value, grads = jax.value_and_grad(loss)(state["model"])
            model = jax.tree.map(lambda p, g: p - 0.1 * g, state["model"], grads)
            new = {
                name: jax.tree.map(lambda a, p: 0.9 * a + p, state[name], model) for name in copies
            }
            return {"model": model, **new}, value

        return ts.jit_step(step, plan), plan.structs, S((ROWS, 512), "float32")

    def plain(mesh: Any, rules: Any) -> Any:
        return averaged(mesh, rules, copies=())

    def with_average(mesh: Any, rules: Any) -> Any:
        return averaged(mesh, rules)

    one, two = (
        suggest(function, devices=8, strategies=["FSDP"], memory="1GB", top=0).rows[0].estimate
        for function in (plain, with_average)
    )
    assert two.moved_bytes == one.moved_bytes == 2 * 512 * 512 * 4 + 4
    assert two.state_bytes == 2 * one.state_bytes


def test_what_sends_longer_comes_later() -> None:
    def plain(mesh: Any, rules: Any) -> Any:
        return make(mesh, rules)

    # All send about the same bytes; the largest `fsdp` has the least state. On 8 x 8 chips, 16 and
    # more are in both dims of the torus, where a collective uses more links.
    found = suggest(plain, topology="v5e-64", strategies=["HSDP", "FSDP"], top=0)
    sizes = [row.candidate.axes["fsdp"] for row in found.rows]
    assert sizes == [64, 32, 16, 2, 4, 8]


def test_activations_of_tensor_parallelism_count() -> None:
    found = suggest(make, devices=8, strategies=[TENSOR], memory="1GB", top=0)
    rows = [row for row in found.rows if not row.candidate.options["remat"]]
    moved = {row.mesh: row.estimate.moved_bytes for row in rows}
    # All-reduces of 4 weights, each of WIDTH floats for a row; gathers, scatters and the loss.
    local, weights = ROWS // 2, 4 * 4 * WIDTH**2 * 4 // 4
    activations = 4 * local * WIDTH * 4
    assert moved["fsdp=2,tensor=4"] == activations + 2 * weights + 4


def test_every_difference_from_the_plan_has_its_reason(compiled) -> None:
    for row in compiled.rows:
        reasons = [text for text in row.verdict.findings if "activation" in text]
        assert bool(reasons) == ("tensor" in row.mesh)
        assert row.verdict.planned == row.verdict.moved or row.verdict.findings
    assert "does not move exactly what its plan says:\n    including " in str(compiled)


def test_slices_are_given_to_make_mesh_by_their_outer_axis() -> None:
    one = Candidate(TENSOR, {"data": 4, "fsdp": 2}, slices=2)
    assert one.mesh_arguments == ("data=2,fsdp=2", "data=2")
    assert Candidate(TENSOR, {"data": 4, "fsdp": 2}).mesh_arguments == ("data=4,fsdp=2", None)
