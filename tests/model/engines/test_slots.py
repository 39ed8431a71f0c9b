from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.model.engines.slots import Segment, SlotBatch, SlotCache, SlotTable, _block_bounds
from stepgym.model.engines.stop_strings import StopStrings
from stepgym.model.tiny import build_tiny_tokenizer

torch.set_num_threads(1)

ids = st.lists(st.integers(0, 2), min_size=1, max_size=60).map(lambda x: np.array(x, dtype=np.int32))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ids, st.integers(0, 3), st.booleans()), min_size=1, max_size=25), st.booleans())
def test_what_is_reused_is_a_prefix_that_was_computed(requests, copies):
    table = SlotTable(4)
    held = [np.zeros(0, dtype=np.int32)] * 4  # what an ideal cache would hold
    active: list[int] = []
    for prompt, finish, keep in requests:
        claim = table.claim(prompt, copies=copies)
        if claim is None:
            assert len(active) == 4
        else:
            slot, reused, source = claim
            assert slot not in active
            assert 0 <= reused < len(prompt)
            assert np.array_equal(held[slot if source is None else source][:reused], prompt[:reused])
            if not copies:
                assert source is None
                assert reused in (0, len(held[slot]))
            held[slot] = prompt
            table.filled[slot] = len(prompt)
            active.append(slot)
        for _ in range(min(finish, len(active))):
            slot = active.pop(0)
            table.release(slot, keep=keep)
            if not keep:
                held[slot] = np.zeros(0, dtype=np.int32)


def test_cleared_slots_are_not_reused_not_even_those_that_were_running():
    table = SlotTable(3)
    prompt = np.arange(40, dtype=np.int32)
    running, _, _ = table.claim(prompt, copies=True)
    table.filled[running] = 40
    assert table.longest_prefix(prompt) == 39
    table.clear()
    assert table.longest_prefix(prompt) == 0
    assert table.filled[running] == 0  # it is computed again
    assert table.ids[running, :40].tolist() == prompt.tolist()
    assert table.claim(prompt, copies=True)[1:] == (0, None)


def naive(query, keys, values, scaling, window, softcap):
    """Attention of [heads, new, width] over [key heads, all, width], in double precision."""
    repeats = query.shape[0] // keys.shape[0]
    q, k, v = query.double(), keys.double().repeat_interleave(repeats, 0), values.double().repeat_interleave(repeats, 0)
    scores = q @ k.transpose(1, 2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    there = torch.arange(k.shape[1])
    visible = (there <= own) & (there > own - (window or 10**9))
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), -1) @ v


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=9),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.sampled_from([None, 3]),
    st.sampled_from([None, 2.0]),
    st.randoms(use_true_random=False),
)
def test_attention_over_slots_is_attention(rows, heads, window, softcap, random):
    torch.manual_seed(random.randrange(2**31))
    cache = SlotCache(12, torch.device("cpu"))
    slots = sorted(random.sample(range(12), len(rows)))
    total = sum(new for _, new in rows)
    keys = {s: torch.randn(heads[1], old + new, 8) for s, (old, new) in zip(slots, rows, strict=True)}
    values = {s: torch.randn(heads[1], old + new, 6) for s, (old, new) in zip(slots, rows, strict=True)}
    for slot, (old, _) in zip(slots, rows, strict=True):
        index = (slot * heads[1] + torch.arange(heads[1])) * cache.capacity + torch.arange(old)[:, None]
        cache.write(0, keys[slot][:, :old].transpose(0, 1), values[slot][:, :old].transpose(0, 1), index.flatten())
    held = dict(zip(slots, (old for old, _ in rows), strict=True))
    cache.grow(300, [held.get(s, 0) for s in range(12)])
    single = [(s, old) for s, (old, new) in zip(slots, rows, strict=True) if new == 1]
    several = [(s, old, new) for s, (old, new) in zip(slots, rows, strict=True) if new > 1]
    order = [(s, old, 1) for s, old in single] + several
    batch = SlotBatch(
        cache,
        (np.array([s for s, _ in single], dtype=np.int64), np.array([o for _, o in single], dtype=np.int64)),
        [Segment(s, old, np.zeros(new, dtype=np.int32)) for s, old, new in several],
    )
    query = torch.randn(1, heads[0], total, 8)
    key = torch.cat([keys[s][:, old : old + new] for s, old, new in order], 1)[None]
    value = torch.cat([values[s][:, old : old + new] for s, old, new in order], 1)[None]
    out = batch.attend(0, query, key, value, scaling=0.3, window=window, softcap=softcap)
    assert out.shape == (1, total, heads[0], 6)
    at = 0
    for slot, _, new in order:
        expected = naive(query[0, :, at : at + new], keys[slot], values[slot], 0.3, window, softcap)
        np.testing.assert_allclose(out[0, at : at + new].transpose(0, 1).numpy(), expected.numpy(), atol=1e-5)
        at += new


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2000)), max_size=60, unique_by=lambda x: x[0]))
def test_blocks_cover_every_row_once_and_in_order(rows):
    rows.sort()
    slots, lengths = (np.array([r[i] for r in rows], dtype=np.int64) for i in (0, 1))
    bounds = _block_bounds(slots, lengths)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(len(rows)))
    assert all(start < stop for start, stop in bounds)


TOKENIZER = build_tiny_tokenizer(["alpha beta </sql> é 日本 >"] * 9, special_tokens=["</sql>"])


@settings(max_examples=150, deadline=None)
@given(st.text("ab</sqlé日>😀 \n", max_size=20), st.lists(st.text("a</sqlé日>😀 ", min_size=1, max_size=5), max_size=3))
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop):
    stops = StopStrings(TOKENIZER, len(TOKENIZER) + 5)
    table = stops.may_complete(stop)
    tokens = np.array(TOKENIZER.encode(text), dtype=np.int32)
    for end in range(1, len(tokens) + 1):
        found = bool(table[tokens[end - 1]]) and stops.completed(tokens[:end], stop)
        there = any(part in TOKENIZER.decode(tokens[:end]) for part in stop)
        assert found == there
        if there:
            break
