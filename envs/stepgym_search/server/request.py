"""What a client of `/retrieve` sends."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


class RetrieveRequest(BaseModel):
    """A request, of the original's form (`queries`) or of SkyRL's (`query`). Types are taken strictly."""

    model_config = ConfigDict(strict=True, extra="ignore")

    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = None
    return_scores: bool = False

    @model_validator(mode="after")
    def _one_form(self) -> RetrieveRequest:
        if (self.queries is None) == (self.query is None):
            raise ValueError("send either 'queries', a list of texts, or 'query', one text")
        return self

    @property
    def all_queries(self) -> list[str]:
        """The queries in either form."""
        return self.queries if self.queries is not None else [self.query or ""]
