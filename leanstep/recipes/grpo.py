"""`leanstep train grpo`: reinforcement learning end to end, with the LM head computed on response rows only.

A small GPT first imitates sloppy demonstrations, then learns from the reward: sample a group of completions
per long prompt, score them with code, normalise the rewards within each group, and take a few clipped
policy-gradient updates with an entropy bonus. Prompts are much longer than answers, so nearly all rows of the
hidden states never reach the head.

    recipe = build("tiny", seed=0)
    run(recipe, Path("out"))                 # reward curve in out/metrics.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.gpt import GPT, GPTConfig
from leanstep.logprob import (
    PolicyBatch,
    PolicyObjective,
    VocabShards,
    linear_logprobs,
    linear_policy_loss,
)
from leanstep.logprob.rows import RowPlan, plan_rows
from leanstep.recipes.checkpoint import load_optimizer
from leanstep.recipes.distributed import World
from leanstep.recipes.metrics import Metrics
from leanstep.recipes.settings import LARGE, check_settings, from_preset, setting
from leanstep.recipes.tasks import END, TopicTask, WarmStarted
from leanstep.recipes.training_loop import Cadence, Diverged


@dataclass(frozen=True)
class GrpoSettings:
    """Everything that decides a run.

    Args:
        layers, width, heads: of the GPT.
        demonstrations: sequences per warm-start step. warm_fraction: part of the steps spent on it.
        prompts, group: prompts per rank and step, and completions of each.
        updates: gradient steps per batch of completions.
        select: rows that reach the head: the "response" or "all".
        clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high].
        entropy_coef: weight of the entropy bonus. kl_coef: of the KL to the warm-started model; 0 = none.
    """

    layers: int = setting(2, least=1, most=1024)
    width: int = setting(64, least=8, most=LARGE)
    heads: int = setting(4, least=1, most=LARGE)
    demonstrations: int = setting(32, least=1, most=LARGE)
    warm_fraction: float = setting(0.5, least=0, below=1)
    prompts: int = setting(6, least=1, most=LARGE)
    group: int = setting(8, least=2, most=LARGE)
    updates: int = setting(2, least=1, most=LARGE)
    select: str = setting("response", choices=("all", "response"))
    warm_lr: float = setting(3e-3, above=0)
    lr: float = setting(1e-2, above=0)
    clip_low: float = setting(0.2, least=0, most=1)
    clip_high: float = setting(0.28, least=0)
    entropy_coef: float = setting(0.003)
    kl_coef: float = setting(0.0, least=0)
    temperature: float = setting(1.0, above=0)
    evaluation_prompts: int = setting(32, least=1, most=LARGE)

    def __post_init__(self) -> None:
        check_settings(self)


SETTINGS = GrpoSettings
PRESETS: dict[str, str] = {
    "tiny": "64-wide GPT, 4,096 words, 48 completions per step: minutes on two cores",
    "small": "256-wide GPT, 16,384 words, 128 completions per step: for one GPU",
}
_SIZES: dict[str, tuple[GrpoSettings, TopicTask, int]] = {
    "tiny": (GrpoSettings(), TopicTask(), 200),
    "small": (
        GrpoSettings(layers=4, width=256, prompts=16, lr=3e-3, evaluation_prompts=64),
        TopicTask(vocab=16384, min_prompt=512, max_prompt=1024, topics=32),
        1000,
    ),
}


def build(
    preset: str, *, seed: int = 0, steps: int | None = None, world: World | None = None, **overrides: Any
) -> Grpo:
    """The recipe of a preset; `overrides` replaces fields of its `GrpoSettings`."""
    settings, task, steps = from_preset(_SIZES, preset, steps, overrides)
    return Grpo(settings, task, seed=seed, steps=steps, preset=preset, world=world or World())


@dataclass(frozen=True)
class Rollout:
    """Completions with everything an update needs.

    `tokens` [T]: prompts and completions, concatenated; `bounds` [B + 1] int32 where each begins; `plan` says
    which rows are scored (`every_row` keeps them all, for comparison); `advantages` [B] per sequence and
    `old_logp` [T'] per row are constants.
    """

    tokens: Tensor
    bounds: Tensor
    plan: RowPlan
    every_row: RowPlan
    advantages: Tensor
    old_logp: Tensor
    reference_logp: Tensor | None
    rewards: Tensor
    lengths: Tensor


class Grpo(WarmStarted):
    """The recipe; see `leanstep.recipes.training_loop` for the contract."""

    name = "grpo"
    cadence = Cadence(log=10, evaluate=20, save=50)
    options: GrpoSettings
    task: TopicTask

    def __init__(
        self, settings: GrpoSettings, task: TopicTask, *, seed: int, steps: int, preset: str, world: World
    ) -> None:
        super().__init__(settings, task, seed=seed, steps=steps, preset=preset, world=world)
        config = GPTConfig.preset(
            "plain",
            vocab_size=task.vocab,
            num_layers=settings.layers,
            model_dim=settings.width,
            num_heads=settings.heads,
            head_dim=settings.width // settings.heads,
            mlp_hidden=4 * settings.width,
            long_window_layers=tuple(range(settings.layers)),
        )
        self.model = GPT(config, generator=torch.Generator().manual_seed(seed)).to(world.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.reference: GPT | None = None
        if settings.kl_coef > 0:
            self.reference = GPT(config).to(world.device).requires_grad_(False)

    def step(self, i: int) -> Metrics:
        return self._warm_step() if i < self.warm_steps else self._policy_step(i)

    def _warm_step(self) -> Metrics:
        sequences = self.task.demonstrations(self.options.demonstrations, self.generator)
        lengths = [len(s) for s in sequences]
        # Everything after the first token is a "response": plain language modelling through the same rows.
        plan = plan_rows(lengths, [n - 1 for n in lengths], device=self.world.device)
        tokens, bounds = self._pack(sequences)
        hidden = self.model.hidden(tokens, bounds)
        out = linear_logprobs(
            hidden,
            self.model.head_weight(),
            plan.targets(tokens),
            rows=plan.rows,
            shards=VocabShards(total=self.task.vocab),
        )
        loss = -out.logp.mean()
        loss.backward()
        norm = self.update(self.optimizer, self.options.warm_lr)
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())
        return {"loss": loss, "gradient_norm": norm, "tokens": len(tokens), "lr": self.options.warm_lr}

    def _policy_step(self, i: int) -> Metrics:
        progress = (i - self.warm_steps) / max(self.num_steps - self.warm_steps, 1)
        lr = self.options.lr * (1 - 0.9 * progress)
        rollout = self.roll_out()
        metrics: dict[str, Any] = {}
        for _ in range(self.options.updates):
            metrics = self.loss_and_gradients(rollout, self.options.select)
            metrics["gradient_norm"] = self.update(self.optimizer, lr)
        return {
            **metrics,
            "reward": rollout.rewards.mean(),
            "completion_length": rollout.lengths.float().mean(),
            "rows": float(rollout.plan.T_local),
            "kept_rows": float(rollout.plan.num_rows),
            "tokens": len(rollout.tokens),
            "lr": lr,
        }

    def roll_out(self) -> Rollout:
        """Sample completions, score them, and take their log-probs under the current weights."""
        prompts, topics = self.task.prompts(self.options.prompts, self.generator)
        group = self.options.group
        completions = sample(
            self.model,
            [p for p in prompts for _ in range(group)],
            self.task.answer_words,
            self.generator,
            temperature=self.options.temperature,
        )
        answers = [_until_end(row) for row in completions.tolist()]
        rewards = torch.tensor([self.task.reward(a, topics[k // group]) for k, a in enumerate(answers)])
        grouped = rewards.view(-1, group)
        centred = grouped - grouped.mean(1, keepdim=True)
        advantages = (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
        sequences = [torch.cat((prompts[k // group], torch.tensor(a))) for k, a in enumerate(answers)]
        return self.make_rollout(sequences, [len(a) for a in answers], advantages, rewards)

    def make_rollout(
        self, sequences: list[Tensor], answer_lengths: list[int], advantages: Tensor, rewards: Tensor
    ) -> Rollout:
        device = self.world.device
        totals = [len(s) for s in sequences]
        plan = plan_rows(totals, answer_lengths, device=device)
        tokens, bounds = self._pack(sequences)
        return Rollout(
            tokens=tokens,
            bounds=bounds,
            plan=plan,
            every_row=plan_rows(totals, answer_lengths, select="all", device=device),
            advantages=advantages.to(device),
            old_logp=self._constant_logprobs(self.model, tokens, bounds, plan),
            reference_logp=None
            if self.reference is None
            else self._constant_logprobs(self.reference, tokens, bounds, plan),
            rewards=rewards.to(device),
            lengths=torch.tensor(answer_lengths, device=device),
        )

    @torch.no_grad()
    def _constant_logprobs(self, model: GPT, tokens: Tensor, bounds: Tensor, plan: RowPlan) -> Tensor:
        return linear_logprobs(
            model.hidden(tokens, bounds),
            model.head_weight(),
            plan.targets(tokens),
            rows=plan.rows,
            temperature=self.options.temperature,
            shards=VocabShards(total=self.task.vocab),
        ).logp

    def loss_and_gradients(self, rollout: Rollout, select: str) -> dict[str, Any]:
        """One policy loss and its backward pass; `select` decides only how many rows the head computes."""
        objective = PolicyObjective(
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
            entropy_coef=self.options.entropy_coef,
            kl_coef=self.options.kl_coef,
        )
        chosen = rollout.plan
        advantages = rollout.advantages.repeat_interleave(rollout.lengths, output_size=chosen.num_rows)
        per_row = {"old_logp": rollout.old_logp, "advantages": advantages, "ref_logp": rollout.reference_logp}
        lengths, mask = list(chosen.splits), None
        if select == "all":
            # The same numbers on every row of the batch, with a mask where the others drop rows.
            mask = chosen.scatter(torch.ones_like(rollout.old_logp))
            per_row = {name: None if x is None else chosen.scatter(x) for name, x in per_row.items()}
            lengths = rollout.bounds.diff().tolist()
            chosen = rollout.every_row
        out = linear_policy_loss(
            self.model.hidden(rollout.tokens, rollout.bounds),
            self.model.head_weight(),
            chosen.targets(rollout.tokens),
            PolicyBatch(**per_row, mask=mask, sequence_lengths=lengths),  # type: ignore[arg-type]
            rows=chosen.rows,
            objective=objective,
            normalizer="sequence_mean",
            temperature=self.options.temperature,
            shards=VocabShards(total=self.task.vocab),
        )
        out.loss.backward()
        return {"loss": out.loss.detach(), **out.metrics}

    def _pack(self, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pack(sequences, self.world.device)

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float]:
        """Mean reward on fixed prompts, sampled and greedy. `val_loss` is what is missing to 1."""
        generator = torch.Generator().manual_seed(987_654)
        prompts, topics = self.task.prompts(self.options.evaluation_prompts, generator)
        scores = {}
        for name, temperature in (("reward", 1.0), ("greedy_reward", 0.0)):
            rows = sample(self.model, prompts, self.task.answer_words, generator, temperature=temperature)
            earned = [self.task.reward(_until_end(r), t) for r, t in zip(rows.tolist(), topics, strict=True)]
            scores[name] = sum(earned) / len(earned)
        return {**scores, "val_loss": 1 - scores["reward"]}

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "generators": self.world.gather(self.generator.get_state()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        generators = state["generators"]
        self.generator.set_state(generators[self.world.rank % len(generators)])


def pack(sequences: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """One stream of tokens and the bounds of its documents."""
    lengths = torch.tensor([0, *(len(s) for s in sequences)])
    return torch.cat(sequences).to(device), lengths.cumsum(0).to(torch.int32)


@torch.no_grad()
def sample(
    model: GPT, prompts: list[Tensor], max_new: int, generator: torch.Generator, *, temperature: float = 1.0
) -> Tensor:
    """[B, max_new] sampled tokens on the CPU, filled up with END; temperature 0 takes the likeliest.

    Every token runs the packed sequences again: the model has no cache, and the recipe's are short.
    """
    device = next(model.parameters()).device
    new = torch.full((len(prompts), max_new), END)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for position in range(max_new):
        sequences = [torch.cat((p, n)) for p, n in zip(prompts, new[:, :position], strict=True)]
        tokens, bounds = pack(sequences, device)
        last = model.hidden(tokens, bounds).index_select(0, (bounds[1:] - 1).long().to(device))
        logits = model.logits(last)[:, : model.config.vocab_size].float().cpu()
        if temperature > 0:
            probabilities = (logits / temperature).softmax(-1)
            if not bool(probabilities.isfinite().all()):
                raise Diverged("the policy's logits are not finite: no token can be sampled")
            token = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        new[:, position] = torch.where(done, END, token)
        done |= new[:, position] == END
    return new


def _until_end(row: list[int]) -> list[int]:
    """A completion with its END, when it has one."""
    return row[: row.index(END) + 1] if END in row else row
