"""BERT-large on one V100 as in transformers' guide of 2022: 4 x 512 tokens, AdamW by parameter."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification

# args: the techniques; published by nvidia-smi, here less its 1,343 MiB of context
PUBLISHED = {
    "source": "https://huggingface.co/docs/transformers/v4.21.0/en/perf_train_gpu_one",
    "date": "2022",
    "role": "development",
    "class": "transformer, eager",
    "device": "v100",
    "note": "nvidia-smi less the context; transformers 5 in place of 4.21",
    "rows": {
        "bert-large-plain": {"args": "plain", "reserved_gib": 13.287},
        "bert-large-accumulate": {"args": "accumulate", "reserved_gib": 7.166},
        "bert-large-checkpoint": {"args": "accumulate checkpoint", "reserved_gib": 5.305},
        "bert-large-fp16": {"args": "fp16", "reserved_gib": 12.301},
        "bert-large-all": {"args": "accumulate checkpoint fp16", "reserved_gib": 5.793},
    },
}
techniques = sys.argv[1:]
half, parts = "fp16" in techniques, 4 if "accumulate" in techniques else 1
config = BertConfig(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    attn_implementation="eager",
)
model = BertForSequenceClassification(config).to("cuda")  # type: ignore[arg-type]
if "checkpoint" in techniques:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)
scaler = torch.amp.GradScaler("cuda", enabled=half)
for _ in range(6):
    for _ in range(parts):
        ids = torch.randint(100, 30000, (4 // parts, 512)).cuda()
        labels = torch.randint(0, 2, (4 // parts,)).cuda()
        with torch.autocast("cuda", torch.float16, enabled=half):
            loss = model(input_ids=ids, labels=labels).loss / parts
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad(set_to_none=False)
