"""The registry, verdicts and the features common to all domains."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_hpc.domains.base import DomainError, Verdict, get_domain, text_features


def test_unknown_domain_names_the_known_and_the_nearest() -> None:
    with pytest.raises(DomainError, match="'arithmetics': known are arithmetic; did you mean 'arithmetic'"):
        get_domain("arithmetics")
    with pytest.raises(DomainError, match=r"known are arithmetic$"):
        get_domain("zzz")


def test_verdict_has_components_or_an_error() -> None:
    with pytest.raises(ValueError, match="either components or an error"):
        Verdict({}, "")
    with pytest.raises(ValueError, match="either components or an error"):
        Verdict({"correct": 0.0}, "", error="sandbox died")
    with pytest.raises(ValueError, match="finite"):
        Verdict({"correct": float("nan")}, "")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], (0, 0, 0)),
        ([5], (0, 0, 1)),
        ([5, 5], (0, 0, 2)),
        ([1, 2, 3, 1, 2, 3], (4, 3, 1)),
        ([7] * 10, (8, 1, 10)),
        ([1, 4, 4, 4, 2, 4], (4, 4, 3)),
    ],
)
def test_text_features(ids: list[int], expected: tuple[int, int, int]) -> None:
    found = text_features(ids)
    assert (found["trigrams_total"], found["trigrams_unique"], found["longest_token_run"]) == expected


@given(st.lists(st.integers(0, 3), max_size=60))
def test_text_features_are_consistent(ids: list[int]) -> None:
    found = text_features(ids)
    assert found["trigrams_unique"] <= found["trigrams_total"] == max(0, len(ids) - 2)
    assert found == text_features(ids[::-1])
    assert text_features(ids + ids)["longest_token_run"] >= found["longest_token_run"]


def test_the_domain_side_never_imports_torch() -> None:
    code = (
        "import sys; from evo_hpc.domains.base import get_domain; get_domain('arithmetic');"
        "import evo_hpc.domains.arithmetic.policy, evo_hpc.domains.arithmetic.supervised, evo_hpc.domains.tokenizer;"
        "print(sorted({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")
