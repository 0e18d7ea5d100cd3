"""The speedrun GPT, flattened onto parameter banks, with its data.

    config = GPTConfig.preset("tiny")                # "record-74", "tiny", "plain", "vectors"; **overrides
    model = GPT(config, generator=torch.Generator().manual_seed(0))         # run="compiled": torch.compile

    loss = model(inputs, targets, cu_seqlens, mtp=(1.0, 0.5))      # summed; inputs, targets: [T] integers
    mean = model.mean_loss(inputs, targets, cu_seqlens)            # evaluation: mean, no gradient

    hidden = model.hidden(inputs, cu_seqlens)        # [T, D] final normalised states
    weight = model.head_weight()                     # [V, D]; logits = model.logits(hidden)
    tokens = model.generate(prompt, max_new_tokens, generator=g, temperature=1.0)    # prompt [T] or [B, T]

    model.set_windows(short, long)                   # in blocks, with YaRN; yarn=False for a final window
    model.schedule_state(); model.load_schedule_state(state)       # JSON-able: windows, YaRN, tied flag
    model.tied; model.tie_gradients(); model.copy_tied(); model.untie()

    weights = unbind_bank(bank)                      # every matrix of [..., rows, cols]; one stack backward

Parameters are named as in the optimizer table of the record: embed, lm_head, bigram_embed, value_embeds,
attn_bank, mlp_bank, attn_gate_bank, ve_gate_bank, smear_gate, skip_gate, post_lambdas, resid_lambdas,
x0_lambdas, bigram_lambdas, scalars. A switched-off feature has no parameter. `model.bank_views()` gives the
banks as stacks of matrices. `ReferenceGPT` is the same model as ordinary modules: same parameters and
methods.

    loader = DocumentLoader(paths, num_tokens, max_seq_len, bos=bos, rank=0, world_size=1, cycle=True)
    batch = loader.next_batch()                      # .inputs, .targets, .cu_seqlens, on the CPU
    loader.resize(num_tokens, max_seq_len)           # from the next batch on
    loader.state_dict(); loader.load_state_dict(state)             # JSON-able
    for batch in validation_batches(paths, num_tokens, total_tokens, bos=bos): ...
    corpus = standard_library_corpus(vocab_size=512) # .train_paths, .validation_paths, .bos, .tokenizer()
"""

from leanstep.gpt.banks import bigram_hash, unbind_bank
from leanstep.gpt.config import GPTConfig
from leanstep.gpt.corpus import Corpus, standard_library_corpus
from leanstep.gpt.data import Batch, DocumentLoader, read_shard, validation_batches, write_shard
from leanstep.gpt.model import GPT, build_model
from leanstep.gpt.reference import ReferenceGPT

__all__ = [
    "GPT",
    "Batch",
    "Corpus",
    "DocumentLoader",
    "GPTConfig",
    "ReferenceGPT",
    "bigram_hash",
    "build_model",
    "read_shard",
    "standard_library_corpus",
    "unbind_bank",
    "validation_batches",
    "write_shard",
]
