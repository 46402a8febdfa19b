"""Records that carry a digest of all their other fields, which shows a value changed by hand."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict

from evo_hpc.lineage.identity import digest


class Signed(BaseModel):
    """Base of such records."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = ""
    """Of every other field."""

    def signed(self) -> Self:
        """With its digest."""
        return self.model_copy(update={"digest": self._digest()})

    def intact(self) -> bool:
        """Whether the values are those that were written."""
        return self.digest == self._digest()

    def _digest(self) -> str:
        return digest(self.model_dump(mode="json", exclude={"digest"}))
