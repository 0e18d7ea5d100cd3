import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import ORPOConfig, ORPOTrainer

words = Tokenizer(models.WordLevel({"[P]": 0, "[E]": 1, **{f"w{n}": n + 2 for n in range(30)}}, "[P]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[P]", eos_token="[E]", bos_token="[E]")
say = lambda *n: " ".join(f"w{k % 30}" for k in n)  # noqa: E731
rows = [
    {"prompt": say(k, 3 * k), "chosen": say(5 * k, 7, k), "rejected": say(k + 9, 11 * k, 2)} for k in range(4)
]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
)
options = ORPOConfig(
    output_dir="/tmp/museum",
    max_steps=1,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    bf16=False,
)
model = LlamaForCausalLM(config)
ORPOTrainer(model, options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
