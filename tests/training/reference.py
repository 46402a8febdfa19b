"""GRPO and cross entropy on transformers and torch alone, one process: what the Megatron steps are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from evo_hpc.config import recipe
from evo_hpc.training.packing import Sample
from tests.training.tiny_models import by_expert


class Reference:
    """A transformers model with AdamW, weight decay on matrices only."""

    def __init__(self, folder: Path, config: recipe.Optimizer) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.config = config
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8,
        )  # fmt: skip

    def logprobs(self, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
        """log p of tokens 1.. and the entropy at the rows that predict them."""
        ids = torch.tensor([sample.token_ids])
        logp = torch.log_softmax(self.model(ids).logits[0, :-1] / temperature, -1)
        return logp.gather(-1, ids[0, 1:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def grpo_step(self, samples: Sequence[Sample], temperature: float, max_response_tokens: int = 1) -> dict[str, float]:
        c, losses, terms = self.config, [], []
        for sample in samples:
            mask = torch.tensor(sample.loss_mask[1:]).bool()
            logp, entropy = (values[mask] for values in self.logprobs(sample, temperature))
            old, ref, sampled = (None if values is None else torch.tensor(values[1:])[mask].to(logp.dtype)
                                 for values in (sample.old_logprobs, sample.ref_logprobs, sample.sampled_logprobs))
            loss, term = sequence_loss(logp, logp.detach() if old is None else old, ref, sampled, entropy, sample.advantage, c)
            losses.append(loss)
            terms.append(term)
        mean = torch.cat(terms, 1).mean(1)
        total = batch_loss(losses, c, max_response_tokens)
        norm = self._update(total)
        names = ("surrogate", "kl", "entropy", "clip_fraction_low", "clip_fraction_high")
        return {"loss": total.item(), **dict(zip(names, mean.tolist(), strict=True)), "grad_norm": norm}

    def supervised_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        logps = [self.logprobs(s, 1.0)[0][torch.tensor(s.loss_mask[1:]).bool()] for s in samples]
        loss = -torch.cat(logps).mean()
        return {"grad_norm": self._update(loss), "loss": loss.item()}

    def _update(self, loss: Tensor) -> float:
        self.adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.adam.step()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        return by_expert({name: p.detach() for name, p in self.model.named_parameters()})

    def gradients(self) -> dict[str, Tensor]:
        return by_expert({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})


def sequence_loss(
    logp: Tensor, old: Tensor, ref: Tensor | None, sampled: Tensor | None, entropy: Tensor, a: float, c: recipe.Optimizer
) -> tuple[Tensor, Tensor]:
    """Loss of each token of one sequence, and what is reported of each; the formulas as the papers have them, one sequence at a time."""
    difference = logp - old
    ratio = torch.exp(difference.mean()).expand(len(logp)) if c.ratio == "sequence" else torch.exp(difference)
    objective = torch.min(ratio * a, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * a)
    if c.dual_clip is not None and a < 0:
        objective = torch.max(objective, torch.full_like(objective, c.dual_clip * a))
    kl = torch.zeros_like(logp)
    if ref is not None:
        d = logp - ref
        kl = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[c.kl]
    weight = torch.ones_like(logp)
    if c.importance != "none":
        assert sampled is not None
        logs = old - sampled
        weight = torch.exp(logs.sum().expand(len(logs)) if c.importance_level == "sequence" else logs)
        assert c.importance == "truncated", "masked: the caller leaves the tokens out"
        weight = weight.clamp(max=c.importance_high)
    loss = -weight * objective - c.entropy_coef * entropy
    if c.kl_in == "loss":
        loss = loss + c.kl_coef * kl
    low, high = (ratio < 1 - c.clip_low) * float(a < 0), (ratio > 1 + c.clip_high) * float(a > 0)
    return loss, torch.stack([-objective, kl, entropy, low, high]).detach()


def batch_loss(losses: Sequence[Tensor], c: recipe.Optimizer, max_response_tokens: int) -> Tensor:
    """Of the losses of the tokens of each sequence."""
    losses = [each for each in losses if len(each)]
    if c.loss == "token_mean":
        return torch.cat(list(losses)).mean()
    if c.loss == "sequence_mean":
        return torch.stack([each.mean() for each in losses]).mean()
    return torch.stack([each.sum() / max_response_tokens for each in losses]).mean()


def off_policy(samples: Sequence[Sample], logprobs: Sequence[np.ndarray], spread: float, seed: int) -> list[Sample]:
    """The samples with old and reference log-probabilities around `logprobs`, so that ratio, clip and KL all act."""
    rng = np.random.default_rng(seed)

    def near(values: np.ndarray) -> np.ndarray:
        return (values + spread * rng.normal(size=len(values))).astype(np.float32)

    return [
        Sample(s.token_ids, s.loss_mask, s.advantage, near(lp), near(lp), near(lp))
        for s, lp in zip(samples, logprobs, strict=True)
    ]


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference over two state dicts with the same names."""
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)
