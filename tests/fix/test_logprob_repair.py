"""Scoring functions of RL scripts: the edit that puts model_logprobs in place of logits and gather."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep.fix.logprob_repair import log_probs_of_tokens
from leanstep.fix.offers import changed_files
from leanstep.fix.repairs import Project
from leanstep.fix.source_edits import NotUnderstood

IMPORTS = "import torch\nimport torch.nn.functional as F\n"
SCORED = IMPORTS + "from leanstep import model_logprobs\n"
# Left-padded sequences: a helper gathers, callers have the mask.
CALLERS = """

def gathered(logits, ids):
    log_p = F.log_softmax(logits, dim=-1)
    return log_p.gather(dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)


def score(model, ids: torch.Tensor, attention_mask: torch.Tensor):
    output = model.forward(input_ids=ids, attention_mask=attention_mask)
    # The last row has no token.
    logits = output["logits"]
    log_probs = gathered(logits=logits[:, :-1].to(torch.float32), ids=ids[:, 1:])
    return log_probs


class Experience:
    ids: torch.Tensor
    attention_mask: torch.Tensor
    action_mask: torch.Tensor


def train(model, exp, ids, attention_mask):
    action_mask = attention_mask[:, 1:]
    old = score(model, ids, attention_mask)
    new = score(model, exp.ids, exp.attention_mask)
"""


def repaired(folder: Path, text: str, here: str = "log_softmax") -> list[tuple[str, str]]:
    """Title and new text of each repair of the first line that contains `here`."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    project = Project(path, [path])
    source = project.source(path)
    number = next(i for i, line in enumerate(text.splitlines(), 1) if here in line)
    repairs = log_probs_of_tokens(project.sources(), source, source.statement_at(number))
    return [(repair.title, changed_files(repair.edits)[path].decode()) for repair in repairs]


def test_the_mask_comes_from_the_callers(tmp_path):
    (masked_title, masked), (plain_title, plain) = repaired(tmp_path, IMPORTS + CALLERS)
    assert "mask from its callers" in masked_title and "all tokens" in plain_title
    expected = (SCORED + CALLERS).replace(
        "    output = model.forward(input_ids=ids, attention_mask=attention_mask)\n"
        "    # The last row has no token.\n"
        '    logits = output["logits"]\n'
        "    log_probs = gathered(logits=logits[:, :-1].to(torch.float32), ids=ids[:, 1:])\n",
        "    log_probs = model_logprobs(model{}, input_ids=ids, attention_mask=attention_mask)\n",
    )
    assert plain == expected.replace("{}", "")
    expected = expected.replace("{}", ", mask=mask").replace(
        "attention_mask: torch.Tensor):", "attention_mask: torch.Tensor, mask=None):"
    )
    expected = expected.replace(
        "ids, attention_mask)\n    new", "ids, attention_mask, mask=action_mask)\n    new"
    )
    assert masked == expected.replace(
        "exp.ids, exp.attention_mask)", "exp.ids, exp.attention_mask, mask=exp.action_mask)"
    )


def test_a_mask_that_the_result_is_multiplied_with_and_labels(tmp_path):
    text = (
        IMPORTS
        + """

def score(model, inputs, temperature):
    outputs = model(input_ids=inputs["input_ids"], use_cache=False)

    logits = outputs.logits / temperature
    shift_labels = inputs["labels"][..., 1:]
    shift_mask = inputs["labels_mask"][..., 1:]
    shift_labels[~shift_mask] = 0

    # Gather.
    log_probs = logits[..., :-1, :].log_softmax(dim=-1)
    log_probs = torch.gather(log_probs, dim=-1, index=shift_labels.unsqueeze(-1)).squeeze(-1)
    log_probs = log_probs * shift_mask
    return log_probs
"""
    )
    ((_, new),) = repaired(tmp_path, text)
    assert new == SCORED + '''

def score(model, inputs, temperature):
    log_probs = model_logprobs(model, mask=inputs["labels_mask"], temperature=temperature, \
targets=inputs["labels"], input_ids=inputs["input_ids"], use_cache=False)
    shift_labels = inputs["labels"][..., 1:]
    shift_mask = inputs["labels_mask"][..., 1:]
    shift_labels[~shift_mask] = 0
    log_probs = log_probs * shift_mask
    return log_probs
'''  # fmt: skip


def test_logits_to_keep_stays_with_the_call(tmp_path):
    text = (
        IMPORTS
        + """

def score(model, ids, mask, keep):
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits
    logits = logits[:, :-1, :]
    ids = ids[:, -keep:]
    logits = logits[:, -keep:, :]
    return F.log_softmax(logits, dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
"""
    )
    ((_, new),) = repaired(tmp_path, text)
    assert (
        new
        == SCORED
        + """

def score(model, ids, mask, keep):
    return model_logprobs(model, input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1)
"""
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("[:, :-1]", ""), "no function that gathers"),
        (("ids[:, 1:]", "ids"), "not shifted by one"),
        (("input_ids=ids", "*ids"), "no function that gathers"),
        (('output["logits"]', 'output["hidden"]'), "no function that gathers"),
    ],
)
def test_what_is_not_understood_is_left_alone(tmp_path, change, why):
    text = (IMPORTS + CALLERS).replace(*change)
    with pytest.raises(NotUnderstood, match=why):
        repaired(tmp_path, f"{text}\nimport transformers\nmodel = transformers.AutoModelForCausalLM(None)\n")


def test_a_model_of_the_scripts_own_is_said_to_be_one(tmp_path):
    text = (IMPORTS + CALLERS).replace('output["logits"]', "output")
    with pytest.raises(NotUnderstood, match=r"by hand, masked_token_logprobs"):
        repaired(tmp_path, text)


HEAD = """

def score(model, batch):
    hidden = model(batch.tokens)
    logits = model.head(hidden[:, :-1]) / TEMPERATURE
    logp_all = torch.log_softmax(logits, dim=-1)
    logp = logp_all.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    return logp
"""


def test_a_head_beside_its_hidden_states(tmp_path):
    ((title, new),) = repaired(tmp_path, "import torch\nTEMPERATURE = 0.8\n" + HEAD)
    assert title == "log-probs without the logits: masked_token_logprobs of all tokens"
    assert new == "import torch\nfrom leanstep import masked_token_logprobs\nTEMPERATURE = 0.8\n" + (
        "\n\ndef score(model, batch):\n    hidden = model(batch.tokens)\n"
        "    logp = masked_token_logprobs(hidden, model.head, batch.tokens, temperature=TEMPERATURE)\n"
        "    return logp\n"
    )
    entropy = "    return logp, -(logp_all.exp() * logp_all).sum(-1)\n"
    with pytest.raises(NotUnderstood, match="logits is used for more than the log-probs"):
        repaired(tmp_path, "import torch\nTEMPERATURE = 0.8\n" + HEAD.replace("    return logp\n", entropy))


def test_without_a_mask_in_every_caller_none_is_passed(tmp_path):
    ((title, _),) = repaired(
        tmp_path, IMPORTS + CALLERS + "\n\ndef other(model, ids):\n    score(model, ids, ids)\n"
    )
    assert "all tokens" in title
