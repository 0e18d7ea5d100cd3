import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

words = Tokenizer(models.WordLevel({"[P]": 0, "[E]": 1, **{f"w{n}": n + 2 for n in range(30)}}, "[P]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[P]", eos_token="[E]", padding_side="left"
)
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
turn = lambda role, *n: {"role": role, "content": " ".join(f"w{k % 30}" for k in n)}  # noqa: E731
rows = [{"messages": [turn("user", k, 3 * k), turn("assistant", 5 * k, 7, k)]} for k in range(4)]
config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
torch.manual_seed(0)
student, teacher = LlamaForCausalLM(config), LlamaForCausalLM(config)
quiet = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
options = {
    "lmbda": 0.0,
    "gradient_checkpointing": False,
    "use_liger_kernel": "--use_liger_kernel" in sys.argv,
}
options = GKDConfig("/tmp/museum", max_steps=1, **quiet, **options)
data = Dataset.from_list(rows)
GKDTrainer(student, teacher, options, train_dataset=data, processing_class=tokenizer).train()
