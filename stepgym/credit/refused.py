"""Estimators that people ask for and that step-wise records cannot feed: refused by name, when the config is read."""

from __future__ import annotations

from stepgym.credit.group import CreditFunction
from stepgym.errors import UserError
from stepgym.plugins import Registry

_ONE_SEQUENCE = "it is a recursion over the tokens of one unbroken sequence with a critic, of which there is one form"
_RATIOS = "its ratios of policies stand inside a recursion over the tokens of one unbroken sequence"

REFUSED = {
    "td": f"{_ONE_SEQUENCE}: use gae with gae_lambda 0",
    "td_lambda": f"{_ONE_SEQUENCE}: use gae with gae_lambda",
    "n_step": f"{_ONE_SEQUENCE}: use gae with gae_lambda",
    "vtrace": f"{_RATIOS}: use gae, and `correction` for the ratios",
    "retrace": f"{_RATIOS}: use gae, and `correction` for the ratios",
}
"""Name of each temporal estimator to the reason why it is not here, and what is."""

_SPELLINGS = {
    "tdlambda": "td_lambda",
    "v_trace": "vtrace",
    "gaelambda": "gae",
    "gae_lambda": "gae",
    "ppo": "gae",
    "ppo_critic": "gae",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++_baseline": "reinforce_plus_plus_baseline",
    "drgrpo": "dr_grpo",
    "dr._grpo": "dr_grpo",
}


class CreditRegistry(Registry[CreditFunction]):
    """Names of credit estimators. Knows other spellings, and why some temporal ones are refused."""

    def get(self, name: str) -> CreditFunction:
        """The estimator of that name.

        Raises `UserError` for a temporal estimator that is not here, naming what is, and, with a suggestion, for an
        unknown name.
        """
        if name not in self:
            plain = str(name).lower().replace("-", "_").replace(" ", "_").replace("(", "").replace(")", "")
            plain = _SPELLINGS.get(plain, plain)
            if plain in REFUSED:
                raise UserError(f"credit {name!r} does not fit step-wise data: {REFUSED[plain]}")
            if plain in self:
                known = ", ".join(self.names())
                raise UserError(f"unknown {self.noun} {name!r}; did you mean {plain!r}? Known: {known}")
        return super().get(name)
