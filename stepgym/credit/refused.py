"""Estimators that step-wise records cannot feed: refused by name, when the config is read."""

from __future__ import annotations

from stepgym.credit.group import CreditFunction
from stepgym.errors import UserError
from stepgym.plugins import Registry

_RECURSION = (
    "it runs a recursion over the tokens of one unbroken sequence, and the steps of a trajectory branch, overlap and "
    "have observations between them"
)
_CRITIC = "it needs a critic's value for every token, and there is no critic"

REFUSED = {
    "gae": _RECURSION,
    "td": _RECURSION,
    "td_lambda": _RECURSION,
    "n_step": _RECURSION,
    "reinforce_plus_plus": "its token-level discounted return " + _RECURSION.removeprefix("it "),
    "vtrace": _CRITIC,
    "retrace": _CRITIC,
    "ppo_critic": _CRITIC,
}
"""Name of each temporal estimator to the reason why step-wise records cannot feed it."""

_SPELLINGS = {"gae_lambda": "gae", "tdlambda": "td_lambda", "v_trace": "vtrace", "reinforce++": "reinforce_plus_plus"}


class CreditRegistry(Registry[CreditFunction]):
    """Names of credit estimators. Knows the temporal ones too, so that it can say why they are refused."""

    def get(self, name: str) -> CreditFunction:
        """The estimator of that name.

        Raises `UserError` for a temporal estimator, naming the alternatives, and, with a suggestion, for an unknown
        name.
        """
        if name not in self:
            plain = str(name).lower().replace("-", "_").replace("(", "").replace(")", "")
            plain = _SPELLINGS.get(plain, plain)
            if plain in REFUSED:
                reason = f"credit {name!r} does not fit step-wise data: {REFUSED[plain]}"
                raise UserError(f"{reason}. Use {_alternatives(self)}")
        return super().get(name)


def _alternatives(registry: CreditRegistry) -> str:
    names = registry.names()
    return f"{', '.join(names[:-1])} or {names[-1]}"
