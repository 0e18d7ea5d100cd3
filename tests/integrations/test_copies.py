"""What people do with models after `apply_leanstep`: the copy computes with its own weights and gradients.

Every way is tried in training mode (leanstep's loss) and evaluation mode (the model's own logits), against a
stock model with the copy's weights.
"""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from integrations.tiny_models import VOCAB, causal_lm
from ranks import fully_shard

from leanstep import model_logprobs
from leanstep.integrations.class_forward import handle_calls
from leanstep.integrations.transformers import apply_leanstep
from leanstep.integrations.trl import FusedCalls

pytestmark = pytest.mark.filterwarnings("ignore")


def batch():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB - 3, (2, 9), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def patched(adapter, model=None):
    model = causal_lm("llama") if model is None else model
    if adapter == "transformers":
        return apply_leanstep(model)
    handle_calls(model, FusedCalls(("is_top1",), "grad", 0.7, in_fp32=False))
    return model


def stock_like(model):
    """An unpatched model with the weights of `model`."""
    stock = causal_lm("llama")
    stock.load_state_dict({name.removeprefix("_orig_mod."): x for name, x in model.state_dict().items()})
    return stock.train(model.training)


def perturb(model, seed):
    with torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def plain_logp(logits, labels, temperature=1.0):
    log_p = (logits[:, :-1].float() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] != -100)


def training_loss(adapter, model):
    """Of leanstep; no logits come back."""
    if adapter == "transformers":
        outputs = model(**batch())
        assert outputs.logits is None
        return outputs.loss
    outputs = model(**batch(), fused_lm_head=True)
    assert type(outputs).__name__ == "FusedCausalLMOutput"
    return outputs.log_probs.sum()


def stock_loss(adapter, model):
    if adapter == "transformers":
        return model(**batch()).loss
    return plain_logp(model(batch()["input_ids"]).logits, batch()["labels"], 0.7).sum()


def gradients(model):
    return {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}


def assert_computes_with_its_own_weights(adapter, model, original=None, *, compiled=False):
    """Both modes against a stock model with the same weights; `original` gets no gradient."""
    for mode in (True, False):
        model.train(mode)
        stock = stock_like(model)
        for each in (model, stock, *([] if original is None else [original])):
            each.zero_grad(set_to_none=True)
        if mode:
            ours, theirs = training_loss(adapter, model), stock_loss(adapter, stock)
        else:
            outputs, expected = model(**batch()), stock(**batch())
            assert compiled or torch.equal(outputs.logits, expected.logits)
            ours, theirs = outputs.loss, expected.loss
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        ours.backward(), theirs.backward()
        found = gradients(model)
        for name, gradient in gradients(stock).items():
            limit = (1e-4 if compiled else 1e-5) * gradient.abs().max().item() + 1e-8
            torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=limit, msg=name)
        assert original is None or all(p.grad is None for p in original.parameters())


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


def reference(model):
    from trl.experimental.utils import create_reference_model

    return create_reference_model(model).requires_grad_(True)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replicated(model):
    """What nn.DataParallel makes of every module: a new object with the same attributes."""
    replica = model._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(child) for name, child in model._modules.items()}
    return replica


WAYS = (copy.deepcopy, copy.copy, averaged, reference, saved_and_loaded, replicated)
# TRL's handler differs in what it holds.
COPIES = [*(("transformers", way) for way in WAYS), ("trl", copy.deepcopy), ("trl", saved_and_loaded)]


@pytest.mark.parametrize(("adapter", "way"), COPIES, ids=lambda x: getattr(x, "__name__", x))
def test_a_copy_computes_with_its_own_weights(way, adapter):
    original = patched(adapter)
    duplicate = way(original)
    # A shallow copy shares its weights.
    shares = way is copy.copy
    perturb(original, 1), perturb(duplicate, 2)
    assert_computes_with_its_own_weights(adapter, duplicate, None if shares else original)
    assert_computes_with_its_own_weights(adapter, original, None if shares else duplicate)
    # Once more does nothing, and a copy of the copy is as good.
    again = copy.deepcopy(patched(adapter, duplicate))
    assert_computes_with_its_own_weights(adapter, perturb(again, 3), duplicate)


def test_a_module_loaded_by_another_process_is_still_patched(tmp_path):
    """The other process has not imported the adapter before it unpickles."""
    model = apply_leanstep(causal_lm("llama")).train()
    torch.save(model, tmp_path / "model.pt")
    torch.save(batch(), tmp_path / "batch.pt")
    code = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False); "
        "out = model(**torch.load(sys.argv[2])); print(out.logits is None, out.loss.item())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, tmp_path / "model.pt", tmp_path / "batch.pt"]
    words = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert words[0] == "True"
    assert float(words[1]) == pytest.approx(stock_like(model)(**batch()).loss.item(), rel=1e-5)


def test_save_pretrained_writes_the_original_architecture(tmp_path):
    from transformers import AutoModelForCausalLM

    model = perturb(patched("transformers"), 1)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is type(causal_lm("llama")) is type(model)
    for mode in (True, False):
        outputs = loaded.train(mode)(**batch())
        assert torch.equal(outputs.logits, stock_like(model.train(mode))(**batch()).logits)
    assert_computes_with_its_own_weights("transformers", patched("transformers", loaded), model)


@pytest.mark.parametrize("adapter", ["transformers", "trl"])
def test_generate_gives_the_stock_tokens(adapter):
    model = copy.deepcopy(patched(adapter)).train()
    options = {"max_new_tokens": 5, "do_sample": False}
    ids = batch()["input_ids"]
    assert torch.equal(model.generate(ids, **options), stock_like(model).generate(ids, **options))
    with pytest.raises(ValueError, match="not used by the model"):
        model.generate(ids, nonsense=3, **options)


@pytest.mark.parametrize(
    ("adapter", "order"),
    [
        ("transformers", "compiled copy"),
        ("transformers", "copy of the compiled"),
        ("trl", "copy of the compiled"),
    ],
)
def test_a_compiled_model_computes_with_its_own_weights(adapter, order):
    torch._dynamo.reset()
    original = patched(adapter)
    if order == "compiled copy":
        compiled = torch.compile(copy.deepcopy(original), backend="aot_eager")
    else:
        original = torch.compile(original, backend="aot_eager")
        compiled = copy.deepcopy(original)
    perturb(original, 1), perturb(compiled, 2)
    assert_computes_with_its_own_weights(adapter, compiled, original, compiled=True)


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_before_and_after(order):
    from peft import LoraConfig, get_peft_model

    def adapted(model, apply):
        model = apply_leanstep(model) if apply and order == "before" else model
        torch.manual_seed(4)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
        model = apply_leanstep(model) if apply and order == "after" else model
        torch.manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        return model

    stock, original = adapted(causal_lm("llama"), False), adapted(causal_lm("llama"), True)
    duplicate = copy.deepcopy(original)
    perturb(original, 1)
    for mode in (True, False):
        found = []
        for model in (stock, duplicate):
            model.train(mode).zero_grad(set_to_none=True)
            outputs = model(**batch())
            outputs.loss.backward()
            trained = [p.grad for p in model.parameters() if p.requires_grad]
            found.append((outputs.loss.item(), trained))
            assert (outputs.logits is None) == (mode and model is duplicate)
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
        for a, b in zip(found[1][1], found[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-5 * b.abs().max().item() + 1e-8)
        assert all(p.grad is None for p in original.parameters())
    # Merged and unloaded, the base model is still patched.
    merged = duplicate.merge_and_unload().train()
    outputs = merged(**batch())
    assert outputs.logits is None
    assert outputs.loss.item() == pytest.approx(stock.train()(**batch()).loss.item(), rel=1e-4)


def sharded_rank(rank, world_size, order, own_head):
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for lean in (False, True):
        model = causal_lm("llama")
        # The replacement also survives a copy that is made before sharding.
        model = copy.deepcopy(apply_leanstep(model)) if lean and order == "before" else model
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if own_head:
            fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model = apply_leanstep(model) if lean and order == "after" else model
        results = []
        for mode in (True, True, False):
            model.train(mode).zero_grad()
            inputs = {name: x.roll(rank, 1) for name, x in batch().items()}
            outputs = model(**inputs)
            assert (outputs.logits is None) == (lean and mode)
            outputs.loss.backward()
            grads = {n: p.grad.full_tensor().numpy() for n, p in model.named_parameters()}
            results.append((outputs.loss.item(), grads))
            model.zero_grad()
        ids = batch()["input_ids"].roll(rank, 1)
        # The second rank has nothing to score, but takes part in the collectives.
        mask = torch.full_like(ids, 1 - rank)
        logp = model_logprobs(model, ids, mask) if lean else plain_logp(model(ids).logits, ids) * mask[:, 1:]
        (logp * torch.linspace(-1, 1, logp.shape[1])).sum().backward()
        grads = {n: p.grad.full_tensor().numpy() for n, p in model.named_parameters()}
        results.append((logp.sum().item(), grads))
        found.append(results)
    return found


@pytest.mark.parametrize(("order", "own_head"), [("before", False), ("after", False), ("after", True)])
def test_fsdp2_on_two_ranks(run_ranks, order, own_head):
    """Applied after sharding, the loss is compared in the first training forward."""
    for stock, lean in run_ranks(2, sharded_rank, order, own_head, timeout=120):
        for (theirs, expected), (ours, found) in zip(stock, lean, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
            for name, gradient in expected.items():
                scale = float(np.abs(gradient).max())
                np.testing.assert_allclose(
                    found[name], gradient, rtol=2e-3, atol=1e-5 * scale + 1e-8, err_msg=name
                )


@pytest.mark.parametrize("early", [False, True])
def test_a_forward_of_the_objects_own_runs_around_the_models(early):
    """As accelerate's device hooks set one; `early`: another model of the class is patched already."""
    calls = []

    def hooked(self, *args, **kwargs):
        calls.append(self)
        return inner(*args, **kwargs)

    if early:
        apply_leanstep(causal_lm("llama"))
    model = causal_lm("llama")
    inner = model.forward
    model.forward = hooked.__get__(model)
    apply_leanstep(model).train()
    calls.clear()
    assert model(**batch()).loss.item() == pytest.approx(stock_like(model)(**batch()).loss.item(), rel=1e-5)
    assert not calls
    logits = model.eval()(batch()["input_ids"]).logits
    assert calls == [model] and torch.equal(logits, stock_like(model)(batch()["input_ids"]).logits)


def test_a_subclass_that_calls_super_is_handled_where_it_defines_forward():
    class Doubled(type(causal_lm("llama"))):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            return type(outputs)(loss=outputs.loss, logits=outputs.logits * 2)

    apply_leanstep(causal_lm("llama"))
    model = Doubled(causal_lm("llama").config)
    stock = stock_like(model)
    apply_leanstep(model)
    assert torch.equal(model.eval()(**batch()).logits, 2 * stock.eval()(**batch()).logits)
    outputs = model.train()(**batch())
    assert outputs.logits is None
    assert outputs.loss.item() == pytest.approx(stock.train()(**batch()).loss.item(), rel=1e-5)
