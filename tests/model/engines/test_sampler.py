from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.model.engines.sampler import UniformStream, _restricted, draw
from stepgym.record.step import Sampling

torch.set_num_threads(1)

NOTHING = np.zeros(0, dtype=np.int32)
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def allowed(sampling, logits=LOGITS, prompt=NOTHING, response=NOTHING, scale=1.0):
    logprobs = _restricted(logits, torch.tensor(scale), sampling, np.asarray(prompt), np.asarray(response))
    assert abs(float(logprobs.exp().sum()) - 1) < 1e-6
    return logprobs.exp().tolist()


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_truncation_worked_by_hand():
    # softmax of 2, 1, 0, -1 is 0.6439, 0.2369, 0.0871, 0.0321
    p = torch.softmax(LOGITS, -1).tolist()
    close(allowed(Sampling(top_k=2)), [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0])
    close(allowed(Sampling(top_p=0.65)), [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0])
    close(allowed(Sampling(top_p=0.64)), [1, 0, 0, 0])
    close(allowed(Sampling(min_p=0.3)), [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0])
    close(allowed(Sampling(top_k=99)), p)
    # top-p counts within what top-k left: 0.6439 / 0.9679 = 0.665, with the second 0.910
    three = p[0] + p[1] + p[2]
    assert p[0] / three < 0.7 < (p[0] + p[1]) / three
    close(allowed(Sampling(top_k=3, top_p=0.7)), [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0])


def test_penalties_worked_by_hand():
    prompt, response = [0], [3, 3]
    repeated = torch.softmax(torch.tensor([1.0, 1.0, 0.0, -2.0]), -1).tolist()
    close(allowed(Sampling(repetition_penalty=2.0), prompt=prompt, response=response), repeated)
    present = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.5]), -1).tolist()
    close(allowed(Sampling(presence_penalty=0.5), prompt=prompt, response=response), present)
    frequent = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -2.0]), -1).tolist()
    close(allowed(Sampling(frequency_penalty=0.5), prompt=prompt, response=response), frequent)
    cold = torch.softmax(torch.tensor([4.0, 2.0, 0.0, -3.0]), -1).tolist()
    close(allowed(Sampling(presence_penalty=0.5), prompt=prompt, response=response, scale=0.5), cold)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
)
def test_the_token_is_where_the_cumulative_distribution_passes_the_uniform_number(values, uniform, temperature):
    logits = torch.tensor([values], dtype=torch.float32)
    tokens, logprobs = draw(logits, torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64))
    token = int(tokens[0])
    expected = torch.log_softmax(logits[0].double() / (temperature or 1.0), -1)
    assert abs(float(logprobs[0]) - float(expected[token])) < 1e-4
    if temperature == 0:
        assert logits[0, token] == logits.max()
    else:
        cumulative = expected.exp().cumsum(0)
        below = float(cumulative[token - 1]) if token else 0.0
        assert below - 1e-5 <= uniform <= float(cumulative[token]) + 1e-5
        assert expected.exp()[token] > 0


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2] = 0.0
    for uniform in (0.0, 0.5, 1 - 2**-53):
        tokens, logprobs = draw(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
        assert (int(tokens[0]), float(logprobs[0])) == (2, 0.0)


def test_uniform_numbers_depend_on_the_seed_and_the_position_only():
    one, other = UniformStream(5), UniformStream(5)
    assert np.array_equal(np.concatenate([one.next(3), one.next(61)]), other.next(64))
    assert not np.array_equal(UniformStream(6).next(8), UniformStream(5).next(8))
    assert len({UniformStream(seed).next(1)[0] for seed in range(1000)}) == 1000
