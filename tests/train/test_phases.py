"""Time by phase, memory, and tokens per second."""

from __future__ import annotations

import resource
import threading
import time

import pytest

from stepgym.train.phases import PhaseTimes, memory_metrics, throughput_metrics


def test_time_is_counted_to_its_phase_and_its_iteration() -> None:
    times = PhaseTimes()
    times.add("warm_start", 100.0)
    times.begin_lap()
    times.add("rollout", 2.0)
    times.add("rollout", 0.5)
    times.add("update", 1.0)
    first = times.lap()
    times.add("update", 3.0)
    second = times.lap()
    assert (first["seconds/rollout"], first["seconds/update"]) == (2.5, 1.0)
    assert set(first) == {"seconds/rollout", "seconds/update", "iteration_s"}
    assert (second["seconds/update"], "seconds/rollout" in second) == (3.0, False)
    assert times.seconds == {"warm_start": 100.0, "rollout": 2.5, "update": 4.0}


def test_a_block_that_fails_is_counted_too_and_an_iteration_lasts_from_lap_to_lap() -> None:
    times = PhaseTimes()

    def fail() -> None:
        with times.phase("update"):
            time.sleep(0.02)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    row = times.lap()
    assert 0.02 <= row["seconds/update"] <= row["iteration_s"]
    assert times.lap()["iteration_s"] < row["iteration_s"]


def test_phases_may_end_in_several_threads() -> None:
    times = PhaseTimes()
    threads = [threading.Thread(target=lambda: [times.add("rollout", 1.0) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times.lap()["seconds/rollout"] == 2000.0


def test_resident_memory_is_told_in_gib() -> None:
    used = memory_metrics("cpu")
    assert set(used) == {"memory_rss_gib"}
    assert 0.01 < used["memory_rss_gib"] <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


def test_tokens_per_second_by_hand() -> None:
    row = {
        "episodes": 4.0,
        "episode_tokens_mean": 50.0,
        "seconds/rollout": 10.0,
        "seconds/update": 2.0,
        "iteration_s": 16.0,
        "tokens_steps": 900,
        "tokens_forward": 300,
    }
    assert throughput_metrics(row) == {
        "sampled_tokens_per_second": 12.5,
        "rollout_tokens_per_second": 20.0,
        "update_tokens_per_second": 450.0,
        "forward_tokens_per_second": 150.0,
        "sharing": 3.0,
    }
    assert throughput_metrics({"episodes": 0.0, "seconds/update": 1.0, "tokens_forward": 0}) == {}
