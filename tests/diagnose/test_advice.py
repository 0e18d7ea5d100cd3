"""Advice names what exists, is documented and works in the place where it is given."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnose.made import THERE, backward, head, op, read, steps, tensor

from leanstep.diagnose import cost
from leanstep.diagnose.find import find
from leanstep.diagnose.rules import RULES
from leanstep.tape.events import Event
from leanstep.tape.lines import Line, Site, Stack

DOCS = "\n".join(
    path.read_text(encoding="utf-8")
    for path in [*(Path(__file__).parents[2] / "docs").glob("*.md"), Path(__file__).parents[2] / "README.md"]
)
ADVICE = list(dict.fromkeys(advice for rule in RULES.values() for advice in rule.advice))
KINDS = ("fix", "short_fix")
TEXTS = {
    **{f"{name} {kind}": getattr(rule, kind) for name, rule in RULES.items() for kind in KINDS},
    **{f"advice {i} {kind}": getattr(a, kind) for i, a in enumerate(ADVICE) for kind in (*KINDS, "what")},
}
NAMED = sorted({x.leanstep for x in (*RULES.values(), *ADVICE) if x.leanstep is not None})


def leanstep_names() -> set[str]:
    """Public names of the packages and adapters."""
    names = set()
    for package in ("heads", "muon", "lens"):
        names |= set(importlib.import_module(f"leanstep.{package}").__all__)
    pytest.importorskip("transformers")
    adapter = importlib.import_module("leanstep.integrations.transformers")
    return names | {n for n in vars(adapter) if not n.startswith("_")} | {"model_logprobs"}


def others() -> list[Any]:
    """Where names of torch and transformers are looked for."""
    import transformers

    return [
        torch, torch.nn.functional, torch.nn.utils, torch.nn.Module, torch.Tensor, torch.nn, torch.optim,
        torch.nn.attention.flex_attention, torch.utils.checkpoint, transformers, transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase, transformers.GenerationMixin,
    ]  # fmt: skip


def keywords() -> set[str]:
    """Options that advice may name."""
    import transformers

    import leanstep

    functions = [
        torch.compile, torch.optim.AdamW, torch.utils.data.DataLoader, torch.nn.utils.clip_grad_norm_,
        torch.nn.MultiheadAttention.forward, torch.Tensor.backward, torch.nn.Module.zero_grad,
        transformers.TrainingArguments, leanstep.model_logprobs, leanstep.masked_token_logprobs,
        leanstep.heads.linear_logprobs,
    ]  # fmt: skip
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names |= {"is_causal", "approximate", "out", "non_blocking"}  # of torch's builtins
    names |= set(vars(transformers.GenerationConfig())) | {"attn_implementation", "labels", "attention_mask"}
    return names | {"use_vllm"}  # of TRL's trainers


@pytest.mark.parametrize("where", sorted(TEXTS))
def test_every_name_in_an_advice_exists(where):
    text = TEXTS[where].replace("NorMuon,", "NorMuon")
    own, known_keywords = leanstep_names(), keywords()
    for call in re.findall(r"([A-Za-z_][\w.]*)\(", text):
        if call.startswith("leanstep."):
            assert resolves(call), f"{call} does not exist"
            continue
        last = call.rpartition(".")[2]
        known = last in own or any(hasattr(space, last) for space in others())
        assert known or last in ("model", "apply_leanstep", "from_numpy", "astype"), (
            f"{call}() does not exist"
        )
    for name in re.findall(r"(?<![\w.])leanstep(?:\.\w+)+", text):
        assert resolves(name), f"{name} does not exist"
        assert name.rpartition(".")[2] in DOCS, f"{name} is not documented"
    for name in re.findall(r"(\w+)=", text):
        assert name in known_keywords, f"{name}= is no option of anything known"
    for name in own & set(re.findall(r"\w+", text)):
        assert name in DOCS, f"{name} is not documented"


def resolves(name: str) -> bool:
    """Whether a dotted name of leanstep can be imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


@pytest.mark.parametrize("name", NAMED)
def test_what_a_finding_links_to_exists_and_is_documented(name):
    if "trl" in name:
        pytest.importorskip("trl")
    assert resolves(name) and name.rpartition(".")[2] in DOCS


def test_a_name_that_does_not_exist_would_be_found():
    assert not resolves("leanstep.heads.skip_ignored_rows") and not resolves("leanstep.nothing")


def dead_head(site: Site) -> list[Event]:
    """A head whose softmax is read, and 80 of 100 rows without a gradient."""
    gone = backward("mm", tensor(100, 512), tensor(512, 16), node=5, value=(100, 80))
    return [*head(100, 16, 512, site=site), gone]


class Place:
    """A script and a library's files, so that lines have text."""

    def __init__(self, folder: Path, call: str) -> None:
        self.folder = folder
        self.mine = self.line("train.py", call, library=False)

    def line(self, name: str, code: str, library: bool = True) -> Line:
        path = self.folder / ("site-packages" if library else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code + "\n", encoding="utf-8")
        return Line(str(path), 1, "forward", library)

    def advice(self, *, rollout: bool, extra: Line | None = None, own_head: bool = False) -> str:
        """The short advice on dead rows of a head."""
        line = self.line("model.py", "return x @ w.T", library=False)
        if not own_head:
            line = self.line("transformers/models/llama/modeling_llama.py", "logits = self.lm_head(hidden)")
        site = Site(line, None if own_head else self.mine)
        step = dead_head(site)
        if extra is not None:
            reader = op("nll_loss_forward", step[1].outs[0], tensor(100), site=Site(extra, self.mine))
            other = head(100, 16, 512, site=Site(extra, self.mine))[0]._replace(node=6)
            softmax = op("_log_softmax", other.outs[0], 1, False, site=THERE)
            gone = backward("mm", tensor(100, 512), tensor(512, 16), node=6, value=(100, 0))
            step = [*step, reader, other, softmax, gone]
        (finding,) = [f for f in find(steps(step, has_rollout=rollout)) if f.rule == "dead-rows"]
        return finding.short_fix


def test_a_trainer_gets_the_trainers_class(tmp_path):
    assert "LeanTrainer" in Place(tmp_path, "trainer.train()").advice(rollout=False)


def test_a_hand_written_rl_script_gets_a_function_for_its_model(tmp_path):
    place = Place(tmp_path, "output = model.forward(input_ids=ids)")
    assert place.advice(rollout=True) == "leanstep.model_logprobs(model, ids, mask)"
    assert "masked_token_logprobs" in place.advice(rollout=True, own_head=True)


def test_a_hand_written_sft_script_keeps_its_loss(tmp_path):
    place = Place(tmp_path, "loss = model(**batch).loss")
    loss = place.line("transformers/loss/loss_utils.py", "loss = nn.functional.cross_entropy(source, target)")
    assert place.advice(rollout=False, extra=loss) == "apply_leanstep(model) before the loop"


def test_a_models_own_cross_entropy_gets_a_function_for_it(tmp_path):
    place = Place(tmp_path, "loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())")
    (finding,) = [f for f in find(steps(dead_head(Site(place.mine)))) if f.rule == "dead-rows"]
    assert finding.leanstep == "leanstep.heads.linear_cross_entropy"


@pytest.mark.parametrize(
    ("file", "code", "call", "advice"),
    [
        ("generation/utils.py", "return bool(unfinished_sequences.max())", "m.generate(x)", "generate()"),
        ("masking_utils.py", "if padding_mask.all():", "out = model(ids)", "attention_mask"),
        ("tokenization_utils_base.py", "token_ids = to_py_obj(token_ids)", "t.decode(ids)", "batch_decode()"),
        ("tokenization_utils_base.py", "ids = to_py_obj(ids)", "texts = t.batch_decode(ids)", "on the host"),
        ("cache_utils.py", "if n.item():", "out = model(ids)", "fewer calls"),
        ("trainer.py", "tr_loss.item()", "trainer.train()", "log less often"),
    ],
)  # fmt: skip
def test_reads_inside_transformers_get_what_can_be_done_about_them(tmp_path, file, code, call, advice):
    place = Place(tmp_path, call)
    site = Site(place.line(f"transformers/{file}", code), place.mine)
    (finding,) = find(steps([read(site)] * 9))
    assert advice in finding.short_fix and "vllm" not in finding.fix


@pytest.mark.parametrize(
    ("code", "rollout", "advice"),
    [
        ("if is_finished.all():", True, "check every k-th token"),
        ("if is_finished.all():", False, "keep on the device; read once per step"),
        ("if not loss.isfinite().all():", True, "keep on the device; read once per step"),
    ],
)
def test_a_loop_that_asks_for_the_end_at_every_token(tmp_path, code, rollout, advice):
    site = Site(Place(tmp_path, code).mine)
    (finding,) = find(steps([read(site)] * 32, has_rollout=rollout))
    assert finding.short_fix == advice


def test_reads_are_ranked_by_cost_wherever_they_are():
    rates = cost.Calibration(1e-6, 1e-6, 1e10, 1e9, 1e11)
    mine, theirs = Line("train.py", 7), Line("site-packages/net.py", 3, "forward", True)
    made = steps([*[read(Site(mine))] * 2, *[read(Site(theirs, mine))] * 48])
    assert [f.line for f in cost.price(find(made), made, 0.1, rates)] == [theirs, mine]


def test_a_wrapper_that_passes_its_arguments_on_is_no_call_site(tmp_path):
    """The line that called the wrapper is named."""
    library = tmp_path / "site-packages" / "net.py"
    library.parent.mkdir()
    library.write_text("def forward(stack, frame):\n    return stack.locate(frame(), False)[0]\n", "utf-8")
    script = tmp_path / "train.py"
    script.write_text(
        "def wrapper(*args, **kwargs):\n    return inner(*args, **kwargs)\n\n\n"
        "def use(*args):\n    return wrapper(*args)\n",
        "utf-8",
    )
    names: dict[str, Any] = {}
    exec(compile(library.read_text("utf-8"), str(library), "exec"), names)
    mine: dict[str, Any] = {"inner": names["forward"]}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), mine)
    site = mine["use"](Stack(), lambda: sys._getframe(1))
    assert (site.line.file, site.caller.number) == (str(library), 6)
