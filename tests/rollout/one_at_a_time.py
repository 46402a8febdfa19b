"""What stand-ins for the engine have in common: requests are taken in, and finished one a step."""

from __future__ import annotations

from collections.abc import Sequence

from evo_hpc.rollout.records import Completion, Request, Sampling


class OneAtATime:
    """Finishes its requests in the order in which they came; what each is answered with is the subclass's."""

    def __init__(self) -> None:
        self.running: list[Request] = []

    def answer(self, request: Request) -> Completion:
        raise NotImplementedError

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self.running += requests

    def step(self) -> list[Completion]:
        request, *self.running = self.running
        return [self.answer(request)]

    def drop(self, request_ids: Sequence[str]) -> None:
        self.running = [request for request in self.running if request.request_id not in request_ids]

    @property
    def unfinished(self) -> int:
        return len(self.running)
