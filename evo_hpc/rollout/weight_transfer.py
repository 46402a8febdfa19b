"""What runs inside vLLM's worker: weights replaced in place, prompt scores at a temperature."""

from __future__ import annotations

from typing import Any


class PolicyWorker:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`); its methods are called by `collective_rpc`."""

    model_runner: Any

    def load_policy(self, folder: str) -> None:
        """Load the safetensors of `folder` over the weights in memory, which keep their storage."""
        model = self.model_runner.get_model()
        self._pack_experts_again(model)
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        head = getattr(model, "lm_head", None)
        # On CPU the head multiplies by a packed copy of the weight. With tied embeddings vLLM 0.32 packs it once, at
        # start, and would go on sampling from the old head.
        if head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)

    @staticmethod
    def _pack_experts_again(model: Any) -> None:
        """On CPU experts multiply by packed weights, too; vLLM 0.32 packs them only where a layer has no kernel yet.

        On a reload it would copy plain weights over packed ones, silently where the sizes agree.
        """
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None and layer.w13_weight.device.type == "cpu":
                method.moe_kernel = None

    def set_score_temperature(self, temperature: float) -> None:
        """Divide logits by `temperature` in log-probabilities of prompts, which vLLM always reports at 1."""
        sampler = self.model_runner.sampler
        plain = type(sampler).compute_logprobs
        if temperature == 1.0:
            sampler.__dict__.pop("compute_logprobs", None)
        else:
            sampler.__dict__["compute_logprobs"] = lambda logits: plain(logits / temperature)
