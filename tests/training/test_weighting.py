"""How much tokens count: by hand, and whatever the split."""

from __future__ import annotations

import numpy as np
import pytest

from evo_hpc.config import recipe
from evo_hpc.training.packing import Sample
from evo_hpc.training.weighting import corrected, normalised


def sample(ratios, mask=None):
    """A sample with these p_trainer / p_engine behind a prompt of one token."""
    mask = [0, *(mask or [1] * len(ratios))]
    logs = np.log(np.array([1.0, *ratios]))
    return Sample(list(range(len(mask))), mask, 1.0, old_logprobs=logs - 3, sampled_logprobs=np.full(len(mask), -3.0))


def options(**more):
    return recipe.Optimizer(**{"importance": "truncated", "importance_high": 2.0, "importance_low": 0.5, **more})


def test_without_a_correction_nothing_changes():
    samples = [sample([3.0])]
    assert corrected(samples, options(importance="none")) == (samples, {})
    assert corrected([], options()) == ([], {})


def test_truncated_by_token():
    (found,), told = corrected([sample([0.1, 1.0, 5.0, 9.0], [1, 1, 1, 0])], options())
    np.testing.assert_allclose(found.weights, [0.0, 0.1, 1.0, 2.0, 0.0])
    assert found.loss_mask == [0, 1, 1, 1, 0]
    assert told["importance_mean"] == pytest.approx(6.1 / 3) and told["importance_max"] == pytest.approx(5.0)
    assert told["importance_outside"] == pytest.approx(1 / 3)
    assert told["importance_ess"] == pytest.approx(6.1**2 / (0.01 + 1 + 25) / 3)


def test_masked_tokens_leave_the_batch():
    (found,), told = corrected([sample([0.1, 0.6, 1.9, 5.0])], options(importance="masked"))
    assert found.loss_mask == [0, 0, 1, 1, 0] and told["importance_outside"] == 0.5
    np.testing.assert_allclose(found.weights, [0.0, 0.0, 0.6, 1.9, 0.0])


def test_of_a_sequence_the_product_counts():
    config = options(importance_level="sequence")
    (found,), _ = corrected([sample([0.5, 3.0, 7.0], [1, 1, 0])], config)
    np.testing.assert_allclose(found.weights, [0.0, 1.5, 1.5, 0.0])
    (out,), told = corrected([sample([2.0, 2.0])], config.model_copy(update={"importance": "masked"}))
    assert out.loss_mask == [0, 0, 0] and told["importance_outside"] == 1.0


def test_weights_too_large_for_a_float_are_bounded():
    far = Sample([0, 1], [0, 1], 1.0, old_logprobs=np.array([0.0, 0.0]), sampled_logprobs=np.array([0.0, -1e4]))
    (found,), told = corrected([far], options())
    assert found.weights[1] == 2.0 and np.isfinite(told["importance_max"])


@pytest.mark.parametrize("loss, scales", [("token_mean", [1, 1, 1]), ("sequence_mean", [4 / (2 * 1), 4 / (2 * 3), 1]), ("constant", [4 / (2 * 10)] * 2 + [1])])
def test_scales_by_hand(loss, scales):
    samples = [sample([1.0]), sample([1.0, 1.0, 1.0]), sample([1.0], [0])]
    assert [s.scale for s in normalised(samples, recipe.Optimizer(loss=loss), max_response_tokens=10)] == pytest.approx(scales)
