"""The time-optimal planner comes in when it has paid for itself, and its plans then replace those of Algorithm 2."""

from __future__ import annotations

from flex_trainer.provision.planning_method import MethodChoice


def test_what_was_asked_for_is_used_at_once() -> None:
    for method in ("optimal", "bandwidth", "largest_first"):
        assert MethodChoice(method).method == method


def test_optimal_comes_in_once_it_pays() -> None:
    effort = MethodChoice("auto")
    assert effort.method == "bandwidth"
    effort.note_run(24.9)  # of which 4% are under the second that it takes at first
    assert effort.method == "bandwidth"
    effort.note_run(0.2)
    assert effort.method == "optimal"


def test_optimal_spends_no_more_than_it_is_expected_to_save() -> None:
    effort = MethodChoice("auto")
    spent = added = 0.0
    for number in range(400):
        effort.note_run(0.5)
        added += 0.5
        method = effort.method
        seconds = {"optimal": 1.5 if spent == 0 else 0.06, "bandwidth": 0.02}[method]
        effort.note_plan(method, seconds)
        spent += seconds if method == "optimal" else 0.0
        # The first one may take longer than guessed.
        assert spent <= max(0.04 * added, 1.5), number
    assert spent > 0.035 * added
