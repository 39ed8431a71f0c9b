"""docs/algorithms.md: every snippet is a config that works, and the tables name all there is with its defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML

from stepgym.config import describe
from stepgym.credit import CREDITS
from stepgym.plugins import Registry
from stepgym.train.config import LearnerConfig
from stepgym.train.corrections import CORRECTIONS
from stepgym.train.losses import KLS, LOSSES
from stepgym.train.losses.reduction import Reduction
from stepgym.train.refill import RefillConfig, check_refill

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
TEXT = PAGE.read_text()
REGISTRIES: dict[str, Registry[Any]] = {"Credit": CREDITS, "Losses": LOSSES, "Corrections": CORRECTIONS}
NAMES = {heading: registry.names() for heading, registry in REGISTRIES.items()}  # before any test has added one
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIGS = [
    (re.findall(r"^\*\*(.+?)\*\*", TEXT[: block.start()], re.MULTILINE)[-1], YAML(typ="safe").load(block[1]))
    for block in BLOCK.finditer(TEXT)
]


def test_the_page_has_the_algorithms_people_ask_for() -> None:
    names = {"GRPO", "DAPO", "Dr. GRPO", "GSPO", "CISPO", "RLOO", "REINFORCE++", "MaxRL", "SAPO", "GiGPO"}
    assert names <= {name for name, _ in CONFIGS}


@pytest.mark.parametrize(("name", "recipe"), CONFIGS, ids=[name for name, _ in CONFIGS])
def test_a_published_algorithm_is_a_config(name: str, recipe: dict[str, Any]) -> None:
    assert set(recipe) <= {"algorithm", "refill"}, name
    config = LearnerConfig.model_validate(recipe["algorithm"])
    check_refill(RefillConfig.model_validate(recipe.get("refill", {})), config, samples=8)
    for field in ("credit", "loss", "correction"):
        assert callable(config.function(field))  # type: ignore[arg-type]


def rows_of(heading: str) -> dict[str, str]:
    """Rows of the table under a heading, by the name in their first cell."""
    section = TEXT.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0].partition("\n|---")[2]
    return {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", section, re.MULTILINE)}


@pytest.mark.parametrize("heading", REGISTRIES)
def test_the_tables_name_all_there_is_with_its_options_and_defaults(heading: str) -> None:
    rows, registry = rows_of(heading), REGISTRIES[heading]
    assert sorted(rows) == NAMES[heading]
    for name, row in rows.items():
        options = {field.name: field.default for field in describe(registry.get(name))}
        said = dict(re.findall(r"`(\w+): ([^`]+)`", row))
        assert sorted(said) == sorted(options), name
        for option, default in options.items():
            assert YAML(typ="safe").load(said[option]) == pytest.approx(default), f"{name}.{option}"


def test_the_kl_estimators_are_all_there() -> None:
    assert set(rows_of("KL")) == set(KLS)


def test_the_reductions_are_all_there() -> None:
    assert {*rows_of("Reductions"), "constant"} == set(get_args(Reduction))


def test_every_credit_loss_and_correction_cites_its_source() -> None:
    for heading in ("Credit", "Losses", "Corrections"):
        for name in NAMES[heading]:
            doc = inspect.getdoc(REGISTRIES[heading].get(name)) or ""
            assert "Source:" in doc, name
