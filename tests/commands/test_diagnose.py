"""`leanstep diagnose` as a user meets it: exit codes, tracebacks, JSON, gates."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

from leanstep import cli
from leanstep.commands import terminal
from leanstep.diagnose.outputs.screen import SCHEMA_FILE

STEPS = Path(__file__).parents[1] / "diagnose" / "steps"
READS = """\
import sys
import torch

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(5):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    total = sum(model.weight.detach()[i, 0].item() for i in range(4))
    optimizer.step()
    optimizer.zero_grad()
print("done", sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Switched off: a recording would see the fill."""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reads() -> str:
    Path("train.py").write_text(READS, encoding="utf-8")
    return "train.py"


def run(*arguments: str) -> int:
    return cli.run(["diagnose", *map(str, arguments)])


def validated(path: str | Path) -> dict:
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    return report


def test_json_validates_and_names_the_line(reads: str) -> None:
    assert run(reads, "--json", "out.json", "--", "--lr", "3") == 0
    report = validated("out.json")
    (finding,) = report["findings"]
    assert (finding["rule"], finding["file"], finding["line"], finding["count"]) == (
        "host-sync",
        "train.py",
        9,
        4,
    )
    assert finding["id"].startswith("host-sync:train.py:total = sum(")
    assert report["argv"] == ["--lr", "3"]
    assert report["steps"]["recorded"] == 3
    assert report["exit"] == {"code": 0, "exception": None}
    assert finding["cost"]["basis"] == "assumed"


@pytest.mark.parametrize(
    "name", ["dead_rows_sft", "unbatched_adamw", "transposed_add", "clean_rows", "unused_grad_adapter"]
)
def test_every_output_validates(name: str) -> None:
    assert run(STEPS / f"{name}.py", "--json", "out.json") == 0
    report = validated("out.json")
    assert bool(report["findings"]) == (not name.startswith("clean"))
    ranks = [finding["rank"] for finding in report["findings"]]
    assert ranks == list(range(1, len(ranks) + 1))


def test_dash_puts_nothing_but_json_on_standard_output(reads: str, capsys) -> None:
    assert run(reads, "--json", "-", "--steps", "9") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"]
    assert "done" in captured.err
    assert "host-sync" in captured.err


def test_the_screen_says_what_and_what_to_do(reads: str, capsys) -> None:
    assert run(reads) == 0
    text = capsys.readouterr().out
    assert "host-sync" in text
    assert "train.py:9" in text
    assert "4 reads" in text
    assert "40–200 µs on a GPU → keep on the device" in text


def test_five_entries_fit_on_one_screen(capsys) -> None:
    lines = "\n".join(f"    x{i} = float(w.detach()[{i}]) + float(w.detach()[0])\n\n\n\n" for i in range(5))
    Path("many.py").write_text(
        "import torch\nw = torch.ones(9, requires_grad=True)\no = torch.optim.SGD([w], lr=0.1)\n"
        f"for _ in range(4):\n    w.sum().backward()\n    o.step()\n{lines}",
        encoding="utf-8",
    )
    assert run("many.py") == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum("host-sync" in line for line in shown) == 5
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 80


def test_explain_shows_the_source_and_five_facts(reads: str, capsys) -> None:
    assert run(reads, "--explain", "1") == 0
    text = capsys.readouterr().out
    for word in ("what", "count", "costs", "why", "fix "):
        assert f"\n  {word}" in text
    assert ">    9      total = sum(" in text
    assert run(reads, "--explain", "7") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "no such file"),
        (("train.py", "--fail-on", "host-synk"), "unknown rule 'host-synk'"),
        (("train.py", "--baseline", "none.json"), "no such file: none.json"),
        (("train.py", "--write-baseline"), "expected --baseline"),
        (("train.py", "--json", "nowhere/out.json"), "nowhere"),
        (("train.py", "--device", "abacus"), "--device: expected one of v100"),
        (("-m", "train", "--device", "h100"), "--device: expected a script; a rehearsal takes no -m"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, message: str, reads: str, capsys) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert "done" not in captured.out


def test_gate(reads: str) -> None:
    assert run(reads, "--fail-on", "host-sync,dead-rows") == 1
    assert run(reads, "--fail-on", "any") == 1
    assert run(reads, "--fail-on", "dead-rows") == 0


def test_gate_without_a_step_is_bad_input(capsys) -> None:
    Path("short.py").write_text(
        "import torch\nw = torch.ones(1, requires_grad=True)\no = torch.optim.SGD([w], lr=1.0)\n"
        "w.sum().backward()\no.step()\n",
        encoding="utf-8",
    )
    assert run("short.py", "--fail-on", "any") == 2
    assert "no step was recorded" in capsys.readouterr().err


def test_gate_without_training_is_bad_input(capsys) -> None:
    Path("idle.py").write_text("import torch\ntorch.ones(3) + 1\n", encoding="utf-8")
    assert run("idle.py", "--fail-on", "any") == 2
    assert "ran no training step" in capsys.readouterr().err
    assert run("idle.py") == 0


@pytest.mark.parametrize(
    "closing",
    ["sys.stdout.close()", "os.close(1)", "sys.stdout = open('log', 'w'); sys.stderr.close()"],
)
def test_the_report_survives_what_a_script_does_to_its_streams(closing: str) -> None:
    Path("train.py").write_text(
        READS.replace("import sys\n", "import os, sys\n").replace('print("done", sys.argv[1:])', closing),
        encoding="utf-8",
    )
    done = _leanstep("diagnose", "train.py", "--steps", "9")
    assert done.returncode == 0
    assert "4 reads" in done.stdout
    assert "Traceback" not in done.stderr


def _leanstep(*arguments: str, root: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root or Path(cli.__file__).parents[1])}
    command = [sys.executable, "-m", "leanstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_own_frames_are_known_through_a_link(tmp_path) -> None:
    """A package that is imported by way of a link is no part of the user's code."""
    (tmp_path / "link").symlink_to(Path(cli.__file__).parents[1])
    (tmp_path / "train.py").write_text(READS.replace('print("done"', 'loss @ loss, print("done"'))
    done = _leanstep("diagnose", "train.py", "--json", "out.json", "--steps", "9", root=tmp_path / "link")
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    # On a busy machine there are progress lines before.
    lines = done.stderr.splitlines(keepends=True)
    errors = "".join(line for line in lines if not line.startswith("diagnose: no step"))
    assert (done.returncode, errors) == (1, plain.stderr)
    assert [f["file"] for f in validated("out.json")["findings"]] == ["train.py"]


def test_baseline_survives_inserted_lines_but_not_more_reads(reads: str, capsys) -> None:
    assert run(reads, "--baseline", "base.json", "--write-baseline") == 0
    Path(reads).write_text(READS.replace("import sys\n", "import sys\n\n# moved\n\n"), encoding="utf-8")
    assert run(reads, "--baseline", "base.json", "--fail-on", "any") == 0
    assert "Suppressed by baseline: 1." in capsys.readouterr().out
    Path(reads).write_text(
        READS.replace("range(4))", "range(4))").replace("(8, 4)", "(8, 6)"), encoding="utf-8"
    )
    assert run(reads, "--baseline", "base.json", "--fail-on", "any") == 0
    known = json.loads(Path("base.json").read_text(encoding="utf-8"))
    known["findings"][0]["count"] = 3
    Path("base.json").write_text(json.dumps(known), encoding="utf-8")
    assert run(reads, "--baseline", "base.json", "--fail-on", "any") == 1
    Path("base.json").write_text("[]", encoding="utf-8")
    assert run(reads, "--baseline", "base.json") == 2


def test_a_comment_switches_a_rule_off_on_its_line(reads: str, capsys) -> None:
    allowed = READS.replace("range(4))\n", "range(4))  # leanstep: ignore[op-storm, host-sync]\n")
    Path(reads).write_text(allowed, encoding="utf-8")
    assert run(reads, "--fail-on", "any") == 0
    assert "Ignored by comments: 1." in capsys.readouterr().out
    Path(reads).write_text(
        READS.replace("range(4))\n", "range(4))  # leanstep: ignore[op-storm]\n"), encoding="utf-8"
    )
    assert run(reads, "--fail-on", "any") == 1
    # Characters of a string are no comment, on one line or on several.
    for text in ('; "# leanstep: ignore[host-sync]"\n', '; """\n# leanstep: ignore[host-sync]"""\n'):
        Path(reads).write_text(READS.replace("range(4))\n", f"range(4)){text}"), encoding="utf-8")
        assert run(reads, "--fail-on", "any") == 1


def test_annotations_are_escaped(capsys) -> None:
    folder = Path("odd,name:100%")
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(READS, encoding="utf-8")
    assert run(script, "--annotations") == 0
    found = re.findall(
        r"^::warning file=(.*),line=9,title=leanstep host-sync::(.*)$", capsys.readouterr().out, re.M
    )
    assert len(found) == 1
    assert found[0][0] == "odd%2Cname%3A100%25/train.py"
    assert "4 × scalar" in found[0][1]


def test_a_device_says_what_a_finding_costs_there(reads: str, capsys) -> None:
    assert cli.run(["rehearse", reads, "--device", "h100", "--json", "rehearsed.json"]) == 0
    step_ms = json.loads(Path("rehearsed.json").read_text(encoding="utf-8"))["time"]["step_ms"]
    capsys.readouterr()
    assert run(reads, "--device", "h100", "--json", "out.json") == 0
    on = validated("out.json")["on"]
    (gain,) = on["findings"]
    assert (on["device"], on["step_ms"]) == ("h100", pytest.approx(step_ms))
    assert 0 < gain["gain_ms"] < step_ms and gain["gain_share"] == pytest.approx(gain["gain_ms"] / step_ms)
    assert "on h100 (predicted): " in capsys.readouterr().out


def test_html_gets_a_section(reads: str) -> None:
    assert run(reads, "--html", "page.html") == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "host-sync" in page
    assert "train.py:9" in page


BROKEN = """\
import torch


def widen(x, number):
    if number == 3:
        return x @ torch.zeros(3, 3)
    return x


model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    loss = widen(model(torch.randn(2, 4)), number).sum()
    loss.backward()
    loss.item()
    optimizer.step()
"""


def test_a_broken_script_shows_pythons_traceback_and_keeps_its_findings(capfd) -> None:
    Path("broken.py").write_text(BROKEN, encoding="utf-8")
    plain = subprocess.run([sys.executable, "broken.py"], capture_output=True, text=True, check=False)
    assert run("broken.py", "--json", "out.json", "--fail-on", "dead-rows") == plain.returncode == 1
    captured = capfd.readouterr()
    assert captured.err == plain.stderr
    report = validated("out.json")
    assert report["exit"] == {"code": 1, "exception": "RuntimeError"}
    assert [(f["rule"], f["line"]) for f in report["findings"]] == [("host-sync", 15)]
    assert report["steps"]["recorded"] == 2


@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("raise SystemExit(7)\n", 7, ""),
        ("raise SystemExit\n", 0, ""),
        ("raise SystemExit('enough')\n", 1, "enough\n"),
        ("def f(:\n", 1, None),
        ("raise KeyboardInterrupt\n", 130, None),
    ],
)
def test_the_scripts_own_exit_code(text: str, code: int, stderr: str | None, capfd) -> None:
    Path("script.py").write_text(text, encoding="utf-8")
    plain = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert run("script.py") == code
    captured = capfd.readouterr()
    assert captured.err == plain.stderr
    if stderr is not None:
        assert captured.err == stderr


def test_ctrl_c_from_outside() -> None:
    Path("slow.py").write_text(
        READS.replace("range(5)", "range(10**9)").replace(
            "optimizer.zero_grad()", "optimizer.zero_grad(); print(number, flush=True)"
        ),
        encoding="utf-8",
    )
    root = str(Path(cli.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "leanstep", "diagnose", "slow.py", "--steps", "10000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root},
        # A background shell ignores Ctrl-C and its children inherit that: start from the default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    while process.stdout.readline().strip() != "9":
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "leanstep: interrupted at slow.py:" in err and "Traceback" not in err
    assert str(Path(cli.__file__).parent) + os.sep not in err
    assert "4 reads" in out


def test_the_script_is_stopped_after_the_recorded_steps_and_one_that_is_timed(reads: str, capsys) -> None:
    Path(reads).write_text(READS.replace("range(5)", "range(10**9)"), encoding="utf-8")
    assert run(reads, "--steps", "2", "--json", "out.json") == 0
    assert "2 steps recorded after 1" in capsys.readouterr().out
    parts = validated("out.json")["steps"]["parts"]
    assert set(parts) == {"before the model", "forward", "backward", "optimizer", "other"}
    assert sum(parts.values()) == pytest.approx(validated("out.json")["steps"]["step_seconds"])


def test_a_module_runs_as_python_m_does(capsys) -> None:
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("")
    Path("pack/train.py").write_text(
        READS.replace("import sys\n", "import sys\nfrom . import __name__ as n\n")
    )
    assert run("-m", "pack.train", "--steps", "9", "--json", "out.json", "--", "--lr", "3") == 0
    assert "done ['--lr', '3']" in capsys.readouterr().out
    report = validated("out.json")
    assert [(f["file"], f["count"]) for f in report["findings"]] == [("pack/train.py", 4)]
    assert (report["script"], report["argv"]) == ("-m pack.train", ["--lr", "3"])
    assert run("--steps", "2") == 2
    assert "-m package.module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (
            "import torch\nimport nothing_of_that_name\n",
            1,
            "raised ModuleNotFoundError before its first step",
        ),
        ("if\n", 1, "raised SyntaxError before its first step"),
        ("raise SystemExit(2)\n", 2, "exited with code 2 before its first step"),
        ("print(1)\n", 0, None),
        (
            READS.replace("    loss = ", "    {}['data_path']\n    loss = "),
            1,
            "KeyError before its first step",
        ),
        (
            READS.replace("    loss.back", "    {}['weight']\n    loss.back"),
            1,
            "KeyError during its first step",
        ),
        (
            READS.replace("    optimizer.step()", "    raise KeyboardInterrupt"),
            130,
            "interrupted; no optimizer step was seen in ",
        ),
        (READS.replace("range(5)", "range(1)"), 0, None),
        (READS.replace("range(5)", "range(1)") + "exit(3)\n", 3, "exited with code 3 during warm-up"),
    ],
)
def test_where_a_script_without_a_recorded_step_ended_is_said(text, code, said, capsys) -> None:
    Path("crash.py").write_text(text)
    assert run("crash.py") == code
    printed = capsys.readouterr().out
    assert said is None or f"No step was recorded: the script {said}"[-len(said) :] in printed, printed
    assert (said is None) == ("No step was recorded" not in printed) or "warm-up" in printed


@pytest.mark.parametrize("made", ["optimizer = ", "optimizer = None and "])
def test_a_script_that_never_steps_shows_its_place_and_what_was_seen(made: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(terminal, "PLAIN_LINE_S", 0.01)
    Path("train.py").write_text(
        READS.replace("optimizer = ", made)
        .replace("range(5)", "range(1000)")
        .replace("    optimizer.step()", "    if number == 200: time.sleep(0.1); signal.raise_signal(2)")
        .replace("    optimizer.zero_grad()", "")
        .replace("import sys", "import sys, time, signal"),
        encoding="utf-8",
    )
    assert run("train.py") == 130
    out, err = capsys.readouterr()
    said = r"^diagnose: no step yet, at train.py:\d+; Ctrl-C shows what was seen, \d+ s$"
    assert re.search(said, err, re.M)
    assert "No optimizer step was seen" in out and re.search(r"host-sync +train.py:9 +\d{3} reads", out)


def test_a_module_of_an_installed_package_is_the_users_program(tmp_path, monkeypatch) -> None:
    """Its lines are named, not those of the installed command that runs it."""
    package = tmp_path / "site-packages" / "installed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(READS)
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "leanstep"
    launcher.write_text("from leanstep.cli import main\nmain()\n")
    root = str(Path(cli.__file__).parents[1])
    path = os.pathsep.join([str(package.parent), root])
    subprocess.run(
        [sys.executable, launcher, "diagnose", "-m", "installed.train", "--json", "out.json"],
        check=True, capture_output=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    (finding,) = validated("out.json")["findings"]
    assert (finding["file"], finding["line"]) == ("installed/train.py", 9)
    assert finding["called_from"] == []


def test_rules_are_selected_and_ignored(reads: str) -> None:
    assert run(reads, "--json", "a.json", "--select", "dead-rows,op-storm") == 0
    assert validated("a.json")["findings"] == []
    assert run(reads, "--json", "a.json", "--ignore", "host-sync", "--fail-on", "any") == 0
    assert run(reads, "--select", "host-sync", "--fail-on", "any") == 1
    assert run(reads, "--select", "host-synk") == 2


def test_help_names_the_rules(capsys) -> None:
    assert run("-h") == 0
    text = capsys.readouterr().out
    assert all(rule in text for rule in ("dead-rows", "unused-grad"))
    assert "<bool>" not in text


def test_a_folder_runs_its_train_py(capsys) -> None:
    assert run(STEPS / "dead_rows_folder", "--json", "out.json") == 0
    places = {(f["rule"], Path(f["file"]).name) for f in validated("out.json")["findings"]}
    assert places == {("dead-rows", "net.py"), ("host-sync", "losses.py")}
    for name in ("model", "model.net", "losses"):
        sys.modules.pop(name, None)
    capsys.readouterr()
    assert run(".") == 2
