from __future__ import annotations

import pytest

from stepgym.errors import UserError
from stepgym.record.outcome import Fault, Outcome, OutcomePolicy, Treatment

# The table of DESIGN 4: outcome, fault, reward, train, retried, on_exhausted.
TABLE = [
    ("completed", "none", "keep", True, False, None),
    ("turn_limit", "agent", "keep", True, False, None),
    ("malformed_action", "agent", "lowest", True, False, None),
    ("response_truncated", "agent", "keep", True, False, None),
    ("context_overflow", "budget", None, False, False, "mask"),
    ("episode_timeout", "budget", None, False, False, "mask"),
    ("agent_error", "infrastructure", None, False, True, "drop"),
    ("env_error", "environment", None, False, True, "drop"),
    ("env_timeout", "environment", None, False, True, "drop"),
    ("engine_error", "infrastructure", None, False, True, "drop"),
    ("engine_timeout", "infrastructure", None, False, True, "drop"),
    ("cancelled", "infrastructure", None, False, False, "drop"),
]


@pytest.mark.parametrize(("name", "fault", "reward", "train", "retried", "on_exhausted"), TABLE)
def test_the_table_of_outcomes(name, fault, reward, train, retried, on_exhausted):
    outcome = Outcome(name)
    treatment = OutcomePolicy()[outcome]
    assert outcome.fault == fault
    assert outcome.scored == (fault in ("none", "agent", "budget"))
    assert (treatment.train, treatment.retries > 0) == (train, retried)
    assert reward is None or treatment.reward == reward
    assert on_exhausted is None or treatment.on_exhausted == on_exhausted


def test_the_table_is_complete():
    assert {row[0] for row in TABLE} == set(Outcome)
    assert {row[1] for row in TABLE} == set(Fault)


def test_a_policy_reads_back_what_it_says():
    policy = OutcomePolicy.from_config({"env_error": {"retries": 5}, "turn_limit": {"reward": -1.0}, "window": 10})
    assert policy[Outcome.ENV_ERROR] == Treatment(train=False, retries=5)
    assert policy[Outcome.TURN_LIMIT].reward == -1.0
    assert (policy.window, policy.max_infrastructure_share) == (10, 0.2)
    assert policy.max_dropped_share == 0.25
    assert OutcomePolicy.from_config(policy.to_dict()) == policy
    assert OutcomePolicy.from_config({"max_dropped_share": 0.9}).to_dict()["max_dropped_share"] == 0.9


def test_what_training_loses():
    policy = OutcomePolicy.from_config({"env_error": {"train": True}})
    assert policy.loses(Outcome.ENV_TIMEOUT)
    assert policy.loses(Outcome.ENGINE_ERROR)
    assert not policy.loses(Outcome.ENV_ERROR)
    assert not policy.loses(Outcome.CONTEXT_OVERFLOW)
    assert not policy.loses(Outcome.COMPLETED)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env_eror": {}}, "unknown outcome 'env_eror'"),
        ({"env_error": {"retry": 1}}, "unknown field"),
        ({"env_error": 3}, "expected a mapping"),
        ({"env_error": {"retries": -1}}, "0 or more"),
        ({"env_error": {"reward": "least"}}, "'keep', 'lowest' or a number"),
        ({"env_error": {"on_exhausted": "skip"}}, "'drop' or 'mask'"),
    ],
)
def test_bad_policies_are_one_line(config, message):
    with pytest.raises(UserError, match=message):
        OutcomePolicy.from_config(config)
