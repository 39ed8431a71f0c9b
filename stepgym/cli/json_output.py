"""Reports as JSON that any reader takes: NaN and infinities, which JSON has not, are as `stepgym.record.json_text`."""

from __future__ import annotations

import json
from typing import Any

from stepgym.record.json_text import dump_json


def json_report(report: Any) -> str:
    """The JSON text of a report, two spaces to a level."""
    return json.dumps(json.loads(dump_json(report)), indent=2, ensure_ascii=False)
