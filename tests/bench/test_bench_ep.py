"""The benchmark ep: its arithmetic, on made-up runs; its ranks, network and counts; and that its parts really run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flex_trainer import bench
from flex_trainer.bench import ep, ep_skew
from flex_trainer.bench.ep_equality import equality_figures
from flex_trainer.bench.ep_model import FLEX, NATIVE, SKEW, SPEED
from flex_trainer.bench.ep_ranks import RankResult, run_ranks, values_of
from flex_trainer.bench.network import two_hosts, why_no_hosts
from flex_trainer.bench.shapes import BenchShape
from flex_trainer.testing.ranks import RankPool
from flex_trainer.testing.tiny import tiny_model

pytestmark = pytest.mark.xdist_group("bench_ep")  # ranks are shared, and expensive to start

QUIET = Console(quiet=True)
MET = {
    "equality/worst_loss_error": 1e-7,
    "equality/worst_gradient_error": 1e-6,
    "equality/worst_quantize_gradient_error": 0.01,
    "equality/strategies_free_memory": True,
    "skew/cap_mib": 900.0,
    "skew/native_dies_on_rank_0": True,
    "skew/flex_finishes": True,
    "skew/loss_error": 1e-8,
    "skew/other_ranks_keep_all": True,
    "wire/dispatch_bytes_ratio": 0.5,
    "wire/step_ratio": 0.7,
    "wire/managed_step_ratio": 0.75,
    "loopback/managed_step_ratio": 1.0,
}


def small(shape: BenchShape) -> BenchShape:
    config = {**shape.config, "num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16}
    return replace(shape, config=config, batch_size=1, sequence_length=32)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


# Arithmetic


def test_what_is_met() -> None:
    assert ep._meets(MET) == {"1": True, "2": True, "3": True, "4": True}
    for key, value, requirement in (
        ("equality/worst_gradient_error", 2e-5, "1"),
        ("equality/worst_loss_error", 2e-5, "1"),
        ("equality/worst_quantize_gradient_error", 0.06, "1"),
        ("equality/strategies_free_memory", False, "1"),
        ("skew/native_dies_on_rank_0", False, "2"),
        ("skew/other_ranks_keep_all", False, "2"),
        ("skew/loss_error", 1e-4, "2"),
        ("wire/dispatch_bytes_ratio", 0.56, "3"),
        ("wire/step_ratio", 0.79, "3"),
        ("wire/managed_step_ratio", 0.79, "3"),
        ("loopback/managed_step_ratio", 1.04, "4"),
    ):
        meets = ep._meets({**MET, key: value})
        assert [number for number, is_met in meets.items() if not is_met] == [requirement], key


def test_a_run_that_dies_or_is_left_out_is_not_met() -> None:
    died = {**MET, "skew/flex_finishes": False, "skew/loss_error": None, "skew/other_ranks_keep_all": False}
    assert ep._meets(died)["2"] is False
    assert ep._meets({"wire/skipped": "network namespaces need root"}) == {}


def test_equality_takes_the_worst_of_ranks_and_families() -> None:
    def found(error: float, freed: int, name: str = "w") -> dict[str, Any]:
        return {"loss_error": error / 2, "gradient_error": error, "worst_parameter": name, "freed_bytes": freed}

    def cases(error: float, freed: int) -> dict[str, list[dict[str, Any]]]:
        return {
            "keep": [found(1e-7, 0), found(error, 0, "v")],
            "recompute": [found(1e-7, freed), found(1e-7, 0)],
            "quantize": [found(0.01, 5), found(0.02, 5)],
        }

    runs = {("ep 2", "a"): cases(3e-7, 8), ("ep 2", "b"): cases(6e-7, 8), ("ep 4", "a"): cases(2e-7, 8)}
    figures = equality_figures(runs)
    assert (figures["ep 2/keep"], figures["ep 4/keep"]) == (6e-7, 2e-7)
    assert (figures["worst_gradient_error"], figures["worst_quantize_gradient_error"]) == (6e-7, 0.02)
    assert figures["worst_loss_error"] == 0.01 and figures["num_cases"] == 9
    assert figures["strategies_free_memory"] is True
    assert figures["details"]["ep 2"]["b"]["keep"]["worst_parameter"] == "v"
    json.dumps(figures)
    assert equality_figures({("ep 2", "a"): cases(3e-7, 0)})["strategies_free_memory"] is False


def test_speed_is_that_of_the_slower_rank() -> None:
    def side(seconds: list[float], link: int, dispatch: int) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "cpu_seconds": seconds,
            "link_bytes": [link] * 3,
            "dispatch_bytes": dispatch,
            "freed_bytes": 0,
            "losses": [2.0, 1.0],
        }

    ranks = [
        {NATIVE: side([2.0, 9.0, 2.0], 300, 200), FLEX: side([1.0, 1.0, 9.0], 150, 100)},
        {NATIVE: side([2.5, 2.5, 2.5], 300, 200), FLEX: side([1.5, 1.5, 1.5], 150, 104)},
    ]
    ranks[1][FLEX]["losses"] = [2.0, 1.001]
    figures = ep._speed_figures(ranks)
    assert figures["step_s"] == {NATIVE: 2.5, FLEX: 1.5}
    assert figures["step_ratio"] == pytest.approx(0.6)
    assert (figures["link_bytes_ratio"], figures["dispatch_bytes_ratio"]) == (0.5, 0.51)
    assert figures["loss_error"] == pytest.approx(0.001)


def test_skew_is_compared_rank_by_rank() -> None:
    free = [{"losses": [2.0, 1.0]}, {"losses": [4.0, 2.0]}]

    def rank(losses: list[float], *freed: int) -> RankResult:
        records = [{"freed_bytes": {"recompute": num_bytes}, "is_profile": False} for num_bytes in freed]
        return RankResult({"losses": losses, "peak_bytes": 2**20, "records": records}, "", 2**20, "")

    figures = ep_skew._compared([rank([2.0, 1.0], 5, 5), rank([4.0, 2.002], 0, 0)], free, 2)
    assert figures["flex_finishes"] and figures["other_ranks_keep_all"]
    assert figures["loss_error"] == pytest.approx(0.001)
    figures = ep_skew._compared([rank([2.0, 1.0], 5, 5), rank([4.0, 2.0], 0, 1)], free, 2)
    assert figures["other_ranks_keep_all"] is False
    died = RankResult(None, "RuntimeError: can't allocate memory", 0, "")
    assert ep_skew._compared([died, rank([4.0, 2.0], 0)], free, 2)["flex_finishes"] is False


# Choices


def test_parts_and_ranks_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep, "measure_equality", lambda meshes, families, console: {"meshes": meshes})
    monkeypatch.setattr(ep, "measure_skew", lambda shape, num_steps, console: {"steps": num_steps})
    result = bench.run("ep", parts=["equality"], num_ranks=4)
    assert list(result["figures"]) == ["equality/meshes"]
    assert {mesh.num_ranks for mesh in result["figures"]["equality/meshes"]} == {4}
    assert bench.run("ep", quick=True, parts=["skew"])["figures"] == {"skew/steps": 2}
    with pytest.raises(ValueError, match="bench ep has no part 'wires'; did you mean 'wire'"):
        bench.run("ep", parts=["wires"])
    with pytest.raises(ValueError, match=r"no mesh of 3 ranks; it has some of \[2, 4\]"):
        bench.run("ep", num_ranks=3)
    with pytest.raises(ValueError, match="'step' runs as a whole; leave out parts"):
        bench.run("step", parts=["wire"])


# Ranks


@pytest.mark.ranks
def test_a_failing_rank_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flex_trainer.bench.ep_ranks._GRACE_S", 0.5)
    started = time.monotonic()
    results = run_ranks("tests.bench.ep_jobs:fail_on_rank_one", {}, 2)
    assert time.monotonic() - started < 50
    assert results[1].error == "ValueError: rank 1 has had enough"
    assert results[0].error == "ended with exit code -9" and results[0].value is None
    with pytest.raises(RuntimeError, match="a try failed: rank 0: ended with exit code -9"):
        values_of(results, "a try")


@pytest.mark.ranks
def test_ranks_that_take_too_long_are_ended() -> None:
    results = run_ranks("tests.bench.ep_jobs:sleep_for_a_minute", {}, 2, timeout_s=0.5)
    assert [result.error for result in results] == ["ended with exit code -9, out of time"] * 2


# Counting


@pytest.mark.ranks
def test_what_goes_to_others_is_counted(pool: RankPool) -> None:
    row_bytes = 3 * 4
    for found in pool.run("tests.bench.ep_jobs:send_rows"):
        assert found == {
            "plain": 5 * row_bytes,
            "functional, forward and backward": 10 * row_bytes,
            "even": 2 * 4,
            "pairwise": 5 * row_bytes,
        }


# Network

_REASON = why_no_hosts()
needs_hosts = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def python(call: str) -> list[str]:
    """The command that calls a function of `bench_ep_jobs`."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from tests.bench.ep_jobs import *; {call}"]


@pytest.mark.network
@needs_hosts
def test_a_link_is_as_slow_as_asked_and_goes_away() -> None:
    num_bytes = 2 * 10**6
    with two_hosts("80mbit") as (here, there):
        receive = [*there.prefix, *python(f"receive({there.address!r})")]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            send = [*here.prefix, *python(f"send({there.address!r}, {here.interface!r}, {num_bytes})")]
            done = subprocess.run(send, capture_output=True, text=True, check=True)
        seconds, link_bytes = map(float, done.stdout.split())
        assert receiver.returncode == 0
    # All but the first burst goes at the speed of the link.
    assert seconds > (num_bytes - 100_000) * 8 / 80e6
    assert num_bytes < link_bytes < 1.2 * num_bytes
    assert not Path("/run/netns", here.namespace).exists() and not Path("/run/netns", there.namespace).exists()


@pytest.mark.network
@needs_hosts
def test_hosts_go_away_after_an_error_and_those_of_dead_processes_too() -> None:
    # A process that has ended for sure: its number is above the highest there can be.
    dead = f"flexnet{int(Path('/proc/sys/kernel/pid_max').read_text()) + 1}a"
    subprocess.run(["ip", "netns", "add", dead], check=True)
    with pytest.raises(ValueError, match="enough"), two_hosts("1gbit") as hosts:
        assert not Path("/run/netns", dead).exists()
        assert all(Path("/run/netns", host.namespace).exists() for host in hosts)
        raise ValueError("enough")
    assert not any(Path("/run/netns", host.namespace).exists() for host in hosts)


@pytest.mark.network
@needs_hosts
def test_a_rate_that_is_none_is_told() -> None:
    with pytest.raises(ValueError, match="rate='warp9' must be a number and one of"), two_hosts("warp9"):
        pass


def test_why_there_are_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flex_trainer.bench.network.os.geteuid", lambda: 1000)
    monkeypatch.setattr("flex_trainer.bench.network.shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("flex_trainer.bench.network.sys.platform", "linux")
    assert why_no_hosts() == "network namespaces need root"
    assert ep.measure_wire(SPEED, 1, QUIET) == {"skipped": "network namespaces need root"}
    monkeypatch.setattr("flex_trainer.bench.network.shutil.which", lambda tool: None)
    assert why_no_hosts() == "network namespaces need iproute2; not found: ip, tc"
    monkeypatch.setattr("flex_trainer.bench.network.sys.platform", "darwin")
    assert why_no_hosts() == "network namespaces need Linux; this is darwin"


# The parts, as small as they get


@pytest.mark.ranks
@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_equality_runs(pool: RankPool, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    cases = ["plain", "recompute", "differ"]
    job = "flex_trainer.bench.ep_equality_rank:compare"
    first, second = pool.run(job, path=str(tmp_path), mesh=[2, 2, 1], cases=cases)
    for found in (first, second):
        assert list(found) == cases
        assert all(one["loss_error"] < 1e-6 and one["gradient_error"] < 1e-5 for one in found.values())
    assert first["recompute"]["freed_bytes"] > 0 and second["recompute"]["freed_bytes"] > 0
    assert first["differ"]["freed_bytes"] > 0 == second["differ"]["freed_bytes"]


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_both_implementations_run_in_turns() -> None:
    figures = ep._in_turns(small(SPEED), 1, QUIET, is_managed=True, has_link=False)
    assert figures["loss_error"] < 1e-5
    assert 0 < figures["dispatch_bytes_ratio"] < 0.75  # small rows: ids and weights weigh more
    assert figures["link_bytes_ratio"] < 1 and figures["step_ratio"] > 0
    assert (figures["num_steps"], figures["freed_bytes"]) == (1, 0)


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_all_tokens_go_to_rank_0(tmp_path: Path) -> None:
    from flex_trainer.bench.ep_model import write_model

    shape = small(SKEW)
    path = write_model(shape, tmp_path, favoured_experts=8)
    ranks = values_of(ep_skew._run(path, shape, 2, FLEX, None), "flex without a cap")
    assert all(len(rank["losses"]) == 2 and rank["share_to_rank_0"] == 1.0 for rank in ranks)
    assert all(len(rank["records"]) == 2 for rank in ranks)
