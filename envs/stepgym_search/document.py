"""What is found: one passage of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Document:
    """One passage, as a corpus has it and as a search found it.

    Attributes:
        id: Its name in the corpus.
        contents: The title in the first line (in quotation marks in wiki-18), the text in the others.
        score: How well it fits the query; what the number means is the retriever's affair.
    """

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        """The first line of the contents, as it is."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """All but the first line."""
        return self.contents.partition("\n")[2]

    def to_dict(self) -> dict[str, Any]:
        """The document as JSON, with its score."""
        return {"id": self.id, "contents": self.contents, "score": self.score}
