"""A TRL GRPOTrainer on a tiny random Qwen2: eight prompts' completions of sixteen tokens per step."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
words = ["<pad>", "<eos>"] + [f"w{i}" for i in range(510)]
core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left"
)
config = Qwen2Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model = Qwen2ForCausalLM(config)


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


prompts = Dataset.from_dict(
    {"prompt": [" ".join(f"w{(i * 7 + j) % 500}" for j in range(12)) for i in range(32)]}
)
args = GRPOConfig(
    output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=16, report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, bf16=False,
    disable_tqdm=True,
)  # fmt: skip
GRPOTrainer(
    model=model, reward_funcs=reward, args=args, train_dataset=prompts, processing_class=tokenizer
).train()
