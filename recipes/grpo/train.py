"""Reinforcement learning end to end, with the LM head on response rows only: `python -m recipes.grpo.train`.

A small GPT first imitates sloppy demonstrations, then learns from the reward: sample a group of completions
    per long
prompt, score them with code, normalize the rewards within each group, and take a few clipped policy-gradient
updates with an entropy bonus. Prompts are much longer than answers, so nearly all rows of the hidden states
never reach the head.

The task: read a long text, name words of its topic. The vocabulary has topics of `words_per_topic` words
    each; every
other word belongs to none. A text is drawn half from one topic and half from everything, and ends with the
ASK token. A good answer is `answer_words` different words of that topic; END cuts an answer short.
Demonstrations are sloppy (half of their words are off topic), so a model that imitates them well earns less
than half of the reward.

B sequences · L padded length · T tokens of all sequences · D width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from leanstep.heads import RowPlan, linear_logprobs, linear_policy_loss, plan_rows
from recipes.run import Run, start

END, ASK, FIRST_WORD = 0, 1, 2


@dataclass
class Settings:
    steps: int = 200
    seed: int = 0
    # The model.
    layers: int = 2
    width: int = 64
    heads: int = 4
    # The task.
    vocab: int = 4096
    topics: int = 8
    words_per_topic: int = 32
    answer_words: int = 8
    min_prompt: int = 64
    max_prompt: int = 112
    purity: float = 0.5
    # Imitation, for the first part of the steps.
    warm_fraction: float = 0.5
    warm_lr: float = 3e-3
    demonstrations: int = 32
    # Reinforcement: prompts per rank and step, completions of each, gradient steps per batch of completions.
    prompts: int = 6
    group: int = 8
    updates: int = 2
    select: str = "response"  # rows that reach the head; "all" gives the same loss and gradients
    lr: float = 1e-2
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coef: float = 0.003
    kl_coef: float = 0.0  # to the warm-started model
    temperature: float = 1.0
    evaluation_prompts: int = 32

    def __post_init__(self) -> None:
        if self.vocab <= FIRST_WORD + self.topics * self.words_per_topic:
            raise ValueError(f"vocab: expected more than the topics take, got {self.vocab}")
        if not 2 <= self.min_prompt <= self.max_prompt:
            raise ValueError(f"min_prompt: expected 2 .. max_prompt {self.max_prompt}, got {self.min_prompt}")
        if self.group < 2:
            raise ValueError(f"group: expected at least 2 completions to compare, got {self.group}")
        if self.select not in ("response", "all"):
            raise ValueError(f"select: expected response or all, got {self.select!r}")


PRESETS = {
    "tiny": {},  # about a minute on two cores
    "small": {
        "steps": 1000, "layers": 4, "width": 256, "vocab": 16384, "topics": 32, "min_prompt": 512,
        "max_prompt": 1024, "prompts": 16, "lr": 3e-3, "evaluation_prompts": 64,
    },
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        nn.init.zeros_(self.out.weight)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x_BLD)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLD + self.mlp(self.norm_mlp(x_BLD))


class GPT(nn.Module):
    """A plain GPT without its logits: those are the business of `leanstep`."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.token = nn.Embedding(s.vocab, s.width)
        self.position = nn.Embedding(s.max_prompt + s.answer_words + 1, s.width)
        self.blocks = nn.Sequential(*(Block(s.width, s.heads) for _ in range(s.layers)))
        self.norm = nn.RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        for table in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(table, std=s.width**-0.5)

    def hidden(self, sequences: list[Tensor]) -> Tensor:
        """Return [T, D] for the tokens of all sequences, concatenated."""
        device = self.token.weight.device
        padded_BL = pad_sequence(sequences, batch_first=True).to(device)
        length = padded_BL.shape[1]
        x_BLD = self.token(padded_BL) + self.position.weight[:length]
        x_BLD = self.norm(self.blocks(x_BLD))  # padding is on the right: causal attention never sees it
        rows = torch.cat([b * length + torch.arange(len(s)) for b, s in enumerate(sequences)])
        return x_BLD.flatten(0, 1).index_select(0, rows.to(device))


def main(arguments: list[str] | None = None) -> None:
    s, run = start(__doc__, Settings, PRESETS, arguments, eval_every=20, save_every=50)
    torch.manual_seed(s.seed)
    model, reference = GPT(s).to(run.device), GPT(s).to(run.device).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm_steps = round(s.steps * s.warm_fraction)
    if (state := run.load()) is not None:
        model.load_state_dict(state["model"])
        reference.load_state_dict(state["reference"])
        optimizer.load_state_dict(state["optimizer"])
    if run.step == 0:
        run.evaluation(**evaluate(model, s))

    for step in run.steps():
        # Stateless draws: a function of seed, step and rank, so that a resumed run draws the same.
        draw = torch.Generator().manual_seed(s.seed * 1_000_003 + step * run.world_size + run.rank)
        if step < warm_steps:
            sequences = demonstrations(s, draw)
            # Everything after the first token is a "response": language modeling through the same rows.
            plan = plan_rows([len(x) for x in sequences], [len(x) - 1 for x in sequences], device=run.device)
            loss = -logprobs(model, sequences, plan, 1.0).mean()
            loss.backward()
            norm = update(model, optimizer, s.warm_lr, run)
            run.log(loss=loss, gradient_norm=norm, lr=s.warm_lr)
        else:
            if step == warm_steps:
                reference.load_state_dict(model.state_dict())
            lr = s.lr * (1 - 0.9 * (step - warm_steps) / max(s.steps - warm_steps, 1))
            batch = roll_out(model, reference, s, draw)
            metrics: dict[str, Any] = {}
            for _ in range(s.updates):
                loss, metrics = policy_loss(model, batch, s)
                loss.backward()
                metrics |= {"loss": loss, "gradient_norm": update(model, optimizer, lr, run)}
            metrics["reward"] = batch.rewards.mean()
            metrics["completion_length"] = sum(batch.plan.splits) / len(batch.plan.splits)
            run.log(**metrics, rows=batch.plan.T_local, selected_rows=batch.plan.num_rows, lr=lr)
        if run.eval_due:
            run.evaluation(**evaluate(model, s))
        if run.save_due:
            run.save(
                {
                    "model": model.state_dict(),
                    "reference": reference.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
            )


def logprobs(model: GPT, sequences: list[Tensor], plan: RowPlan, temperature: float) -> Tensor:
    """Return the log-probs of the plan's targets, without the [T, V] logits."""
    hidden, targets = model.hidden(sequences), plan.targets(torch.cat(sequences).to(model.head.weight.device))
    return linear_logprobs(hidden, model.head.weight, targets, rows=plan.rows, temperature=temperature).logp


class Rollout(NamedTuple):
    sequences: list[Tensor]  # prompt and completion
    plan: RowPlan  # which rows score the completions
    every_row: RowPlan
    rewards: Tensor  # [B]
    advantages: Tensor  # [T'], one per selected row
    old_logp: Tensor  # [T']
    reference_logp: Tensor | None  # [T']


@torch.no_grad()
def roll_out(model: GPT, reference: GPT, s: Settings, draw: torch.Generator) -> Rollout:
    """Sample and score a group of completions per prompt; take their log-probs under the current weights."""
    device = model.head.weight.device
    texts, topics = prompts(s, s.prompts, draw)
    completions = sample(
        model, [p for p in texts for _ in range(s.group)], s.answer_words, draw, s.temperature
    )
    rewards = torch.tensor([reward(s, c, topics[k // s.group]) for k, c in enumerate(completions)])
    grouped = rewards.view(-1, s.group)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    sequences = [torch.cat((texts[k // s.group], torch.tensor(c))) for k, c in enumerate(completions)]
    totals, answers = [len(x) for x in sequences], [len(c) for c in completions]
    plan = plan_rows(totals, answers, device=device)
    return Rollout(
        sequences,
        plan,
        plan_rows(totals, answers, select="all", device=device),
        rewards,
        advantages.flatten().repeat_interleave(torch.tensor(answers)).to(device),
        logprobs(model, sequences, plan, s.temperature),
        logprobs(reference, sequences, plan, s.temperature) if s.kl_coef > 0 else None,
    )


def policy_loss(model: GPT, batch: Rollout, s: Settings) -> tuple[Tensor, dict[str, Any]]:
    """Return the clipped loss and its metrics; `select` decides only how many rows the head computes."""
    plan, mask = batch.plan, None
    per_row = {"old_logp": batch.old_logp, "advantages": batch.advantages, "ref_logp": batch.reference_logp}
    lengths = list(plan.splits)
    if s.select == "all":
        # The same numbers on every row, with a mask where the others drop rows.
        mask = plan.scatter(torch.ones_like(batch.old_logp))
        per_row = {name: None if x is None else plan.scatter(x) for name, x in per_row.items()}
        plan, lengths = batch.every_row, [len(x) for x in batch.sequences]
    out = linear_policy_loss(
        model.hidden(batch.sequences),
        model.head.weight,
        plan.targets(torch.cat(batch.sequences).to(model.head.weight.device)),
        **per_row,  # type: ignore[arg-type]
        mask=mask,
        sequence_lengths=lengths,
        rows=plan.rows,
        clip_low=s.clip_low,
        clip_high=s.clip_high,
        entropy_coef=s.entropy_coef,
        kl_coef=s.kl_coef,
        normalizer="sequence_mean",
        temperature=s.temperature,
    )
    return out.loss, dict(out.metrics)


def update(model: GPT, optimizer: torch.optim.Optimizer, lr: float, run: Run) -> Tensor:
    """Take one step at `lr` with gradients averaged over ranks and clipped; return their norm."""
    if run.world_size > 1:
        for gradient in [p.grad for p in model.parameters() if p.grad is not None]:
            dist.all_reduce(gradient)
            gradient /= run.world_size
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm


@torch.no_grad()
def evaluate(model: GPT, s: Settings) -> dict[str, float]:
    """Return the mean reward on fixed prompts, sampled and greedy."""
    draw = torch.Generator().manual_seed(987_654)
    texts, topics = prompts(s, s.evaluation_prompts, draw)
    scores = {}
    for name, temperature in (("reward", 1.0), ("greedy_reward", 0.0)):
        completions = sample(model, texts, s.answer_words, draw, temperature)
        scores[name] = sum(map(reward, [s] * len(texts), completions, topics)) / len(texts)
    return scores


@torch.no_grad()
def sample(
    model: GPT, texts: list[Tensor], max_new: int, draw: torch.Generator, temperature: float
) -> list[list[int]]:
    """Return a completion per text, up to and with its END; temperature 0 takes the likeliest token.

    Every token runs the sequences again: the model has no cache, and the recipe's are short.
    """
    sequences, done = list(texts), torch.zeros(len(texts), dtype=torch.bool)
    for _ in range(max_new):
        last = torch.tensor([len(x) for x in sequences]).cumsum(0) - 1
        hidden = model.hidden(sequences)
        logits = model.head(hidden.index_select(0, last.to(hidden.device))).float().cpu()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw)[:, 0]
        else:
            token = logits.argmax(-1)
        token = token.where(~done, END)
        sequences = [torch.cat((x, t[None])) for x, t in zip(sequences, token, strict=True)]
        done |= token == END
    answers = [x[len(text) :].tolist() for x, text in zip(sequences, texts, strict=True)]
    return [a[: a.index(END) + 1] if END in a else a for a in answers]


def topic_words(s: Settings, topic: int, count: int, draw: torch.Generator) -> Tensor:
    """Return `count` words, a share `purity` of them of the topic."""
    first = FIRST_WORD + topic * s.words_per_topic
    ours = first + torch.randint(0, s.words_per_topic, (count,), generator=draw)
    any_words = FIRST_WORD + torch.randint(0, s.vocab - FIRST_WORD, (count,), generator=draw)
    return ours.where(torch.rand(count, generator=draw) < s.purity, any_words)


def prompts(s: Settings, count: int, draw: torch.Generator) -> tuple[list[Tensor], list[int]]:
    """Return `count` texts of different lengths and their topics."""
    topics = torch.randint(0, s.topics, (count,), generator=draw).tolist()
    lengths = torch.randint(s.min_prompt, s.max_prompt + 1, (count,), generator=draw).tolist()
    ask = torch.tensor([ASK])
    words = (topic_words(s, t, n - 1, draw) for t, n in zip(topics, lengths, strict=True))
    return [torch.cat((text, ask)) for text in words], topics


def demonstrations(s: Settings, draw: torch.Generator) -> list[Tensor]:
    """Return texts with sloppy answers."""
    texts, topics = prompts(s, s.demonstrations, draw)
    answers = (topic_words(s, topic, s.answer_words, draw) for topic in topics)
    return [torch.cat((x, a, torch.tensor([END]))) for x, a in zip(texts, answers, strict=True)]


def reward(s: Settings, completion: list[int], topic: int) -> float:
    """Return the share, 0 .. 1, of different on-topic words among the first `answer_words`."""
    first = FIRST_WORD + topic * s.words_per_topic
    named = {w for w in completion[: s.answer_words] if first <= w < first + s.words_per_topic}
    return len(named) / s.answer_words


if __name__ == "__main__":
    main()
