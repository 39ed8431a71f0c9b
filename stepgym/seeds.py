"""Seeds that depend on what they are for, never on the order in which things happen to run."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) from the parts that identify its use, as in `derive_seed(run_seed, "train", 3, task_id)`.

    The parts are joined by their `str` with a separator that no part may hold, then hashed with SHA-256, so equal
    parts give equal seeds on every machine and neighbouring parts give unrelated ones.
    """
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
