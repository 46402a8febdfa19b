"""GRPO and cross entropy on transformers and torch alone, one process: what the Megatron steps are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from evo_hpc.config import recipe
from evo_hpc.training.packing import Sample


class Reference:
    """A transformers model with AdamW, weight decay on matrices only."""

    def __init__(self, folder: Path, config: recipe.Optimizer) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
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

    def grpo_step(self, samples: Sequence[Sample], temperature: float) -> dict[str, float]:
        c, terms = self.config, []
        for sample in samples:
            logp, entropy = self.logprobs(sample, temperature)
            old = logp.detach() if sample.old_logprobs is None else torch.tensor(sample.old_logprobs[1:])
            ratio, a = torch.exp(logp - old), sample.advantage
            surrogate = -torch.min(ratio * a, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * a)
            kl = torch.zeros_like(logp)
            if sample.ref_logprobs is not None:
                d = torch.tensor(sample.ref_logprobs[1:]) - logp
                kl = torch.exp(d) - d - 1
            low, high = (ratio < 1 - c.clip_low) * float(a < 0), (ratio > 1 + c.clip_high) * float(a > 0)
            mask = torch.tensor(sample.loss_mask[1:]).bool()
            terms.append(torch.stack([surrogate + c.kl_coef * kl, surrogate, kl, entropy, low, high])[:, mask])
        mean = torch.cat(terms, 1).mean(1)
        norm = self._update(mean[0])
        names = ("loss", "surrogate", "kl", "entropy", "clip_fraction_low", "clip_fraction_high")
        return {**dict(zip(names, mean.tolist(), strict=True)), "grad_norm": norm}

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
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def off_policy(samples: Sequence[Sample], logprobs: Sequence[np.ndarray], spread: float, seed: int) -> list[Sample]:
    """The samples with old and reference log-probabilities around `logprobs`, so that ratio, clip and KL all act."""
    rng = np.random.default_rng(seed)

    def near(values: np.ndarray) -> np.ndarray:
        return (values + spread * rng.normal(size=len(values))).astype(np.float32)

    return [
        Sample(s.token_ids, s.loss_mask, s.advantage, near(lp), near(lp))
        for s, lp in zip(samples, logprobs, strict=True)
    ]


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference over two state dicts with the same names."""
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)
