"""Tiny random Qwen3 policies, and their log-probabilities by transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 32
MAX_MODEL_LEN = 400


@dataclass(frozen=True)
class TinyPolicy:
    """A model folder and the transformers model it was saved from."""

    folder: Path
    model: Qwen3ForCausalLM

    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """All log-probabilities `[len(token_ids), vocabulary]`: row i is the distribution of token i; row 0 is 0."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0].double() / temperature
        return torch.cat([torch.zeros(1, logits.shape[1]), torch.log_softmax(logits[:-1], -1)])

    def score(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each token; position 0 is 0."""
        rows = self.logprobs(token_ids, temperature)
        return rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def make_policy(folder: Path, seed: int, *, tied: bool = True, layers: int = 2) -> TinyPolicy:
    """Save a random policy to `folder`; `layers` sets its architecture, `seed` its weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # far enough from uniform that a wrong weight shows
    model.save_pretrained(folder)
    return TinyPolicy(folder, model)
