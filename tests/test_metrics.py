"""The table of metrics and the instruments made from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.instruments import Kind, Spec, observe_each
from pipeline.metrics import Metrics
from pipeline.queues.ledger import DropReason
from pipeline.rates import Rates
from pipeline.run.metric_table import all_specs, render_table
from pipeline.run.time_sheet import Doing, TimeSheet

ROOT = Path(__file__).parent.parent
ALL: list[Spec] = [spec for spec, _ in all_specs()]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"rollstream_{name}", {"run": "r", "role": "trainer", "worker": "w", **labels})


def test_every_metric_has_a_unit_a_meaning_and_a_way_to_read_it() -> None:
    assert len({spec.name for spec in ALL}) == len(ALL)
    for spec in ALL:
        assert spec.name.startswith("rollstream_")
        assert ":" not in spec.name
        assert spec.unit, spec.name
        assert spec.help.endswith("."), spec.name
        assert spec.reading, spec.name
        assert (spec.kind is Kind.COUNTER) == spec.name.endswith("_total"), spec.name


def test_the_table_of_metrics_in_the_documentation_is_complete() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert render_table() in text, "put there what `python -m pipeline.run.metric_table` prints"


def test_no_label_can_hold_an_id() -> None:
    known = {"age", "cause", "cut", "function", "host", "outcome", "reason", "role", "share"}
    known |= {"stage", "state", "stream", "version"}
    assert {label for spec in ALL for label in spec.labels} <= known


def test_series_carry_run_role_and_worker() -> None:
    metrics = Metrics("r", "trainer", "w")
    metrics.groups_in_total.inc(2)
    metrics.dropped_total.labels(reason="stale").inc()
    assert value(metrics.registry, "groups_in_total") == 2
    assert value(metrics.registry, "dropped_total", reason="stale") == 1


def test_a_role_starts_with_its_own_series_at_zero_and_without_those_of_others() -> None:
    names = {
        role: {family.name for family in Metrics("r", role, "w").registry.collect()}
        for role in ("generator", "scorer", "trainer")
    }
    assert "rollstream_weight_pause_seconds" in names["generator"]
    assert "rollstream_step" in names["trainer"]
    assert "rollstream_step" not in names["scorer"] | names["generator"]


def test_what_may_happen_is_counted_from_zero_so_that_the_first_time_shows() -> None:
    metrics = Metrics("r", "trainer", "w")
    for reason in DropReason:
        assert value(metrics.registry, "dropped_total", reason=reason.value) == 0
        assert value(metrics.registry, "tokens_wasted_total", reason=reason.value) == 0
    assert value(metrics.registry, "dead_letters_total", stage="scored") == 0
    assert value(metrics.registry, "dead_letters_total", stage="prompts") is None
    assert value(metrics.registry, "idle_seconds_total", cause="no_input") == 0


def test_a_value_of_which_zero_would_be_wrong_appears_when_it_is_known() -> None:
    metrics = Metrics("r", "trainer", "w")
    assert value(metrics.registry, "mismatch_kl") is None
    metrics.mismatch_kl.set(0.01)
    assert value(metrics.registry, "mismatch_kl") == 0.01


def test_a_sum_over_several_is_observed_as_so_many_means() -> None:
    metrics = Metrics("r", "trainer", "w")
    observe_each(metrics.weight_send_seconds, 0, 0.0)
    assert value(metrics.registry, "weight_send_seconds_count") == 0
    observe_each(metrics.weight_send_seconds, 4, 2.0)
    assert value(metrics.registry, "weight_send_seconds_count") == 4
    assert value(metrics.registry, "weight_send_seconds_sum") == 2.0


def test_a_metric_of_another_role_appears_when_it_is_used() -> None:
    metrics = Metrics("r", "scorer", "w")
    metrics.step.set(3)
    assert metrics.registry.get_sample_value("rollstream_step", {"run": "r", "role": "scorer", "worker": "w"}) == 3


def test_two_workers_in_one_process_keep_their_metrics_apart() -> None:
    first, second = Metrics("r", "trainer", "w"), Metrics("r", "trainer", "w")
    first.groups_in_total.inc()
    assert value(second.registry, "groups_in_total") == 0


def test_staleness_is_counted_by_the_token() -> None:
    metrics = Metrics("r", "trainer", "w")
    metrics.observe_staleness(np.array([0, 0, 1, 1, 1, 5]))
    assert value(metrics.registry, "staleness_versions_count") == 6
    assert value(metrics.registry, "staleness_versions_sum") == 8
    assert value(metrics.registry, "staleness_versions_bucket", le="0.0") == 2
    assert value(metrics.registry, "staleness_versions_bucket", le="1.0") == 5
    assert value(metrics.registry, "staleness_versions_bucket", le="4.0") == 5
    assert value(metrics.registry, "staleness_versions_bucket", le="+Inf") == 6


def test_what_is_served_is_valid_for_prometheus() -> None:
    metrics = Metrics("r", "trainer", "w")
    metrics.reward_value.labels(function="f").observe(0.5)
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    assert "rollstream_reward_value" in {family.name for family in families}


def test_rates_are_differences_over_time() -> None:
    metrics, now = Metrics("r", "generator", "w"), [100.0]
    rates = Rates(metrics, clock=lambda: now[0])
    metrics.groups_out_total.inc(10)
    metrics.tokens_out_total.inc(4000)
    metrics.idle_seconds_total.labels(cause="no_input").inc(1)
    metrics.idle_seconds_total.labels(cause="stale_weights").inc(2)
    now[0] = 110.0
    said = rates.measure()
    assert (said["groups_per_s"], said["tokens_per_s"]) == (1.0, 400.0)
    assert (said["idle_ratio"], said["idle_cause"]) == (0.3, "stale_weights")
    assert said["progress_age_s"] == 0


def test_rates_of_steps_that_take_longer_than_the_window_do_not_jump() -> None:
    metrics, now = Metrics("r", "trainer", "w"), [0.0]
    rates = Rates(metrics, clock=lambda: now[0])
    said = []
    for number in range(1, 500):
        now[0] = 2.0 * number
        if number % 45 == 0:
            metrics.groups_out_total.inc(90)
            metrics.tokens_out_total.inc(9000)
        said.append(rates.measure()["tokens_per_s"])
    assert set(said[45:]) == {100.0}


def test_waits_of_a_trainer_between_two_steps_do_not_move_its_window() -> None:
    metrics, now = Metrics("r", "trainer", "w"), [0.0]
    rates, said = Rates(metrics, clock=lambda: now[0]), []
    for number in range(1, 500):
        now[0] = 2.0 * number
        metrics.idle_seconds_total.labels(cause="no_input").inc(0.5)
        if number % 45 == 0:
            metrics.tokens_out_total.inc(9000)
        said.append(rates.measure())
    assert {item["tokens_per_s"] for item in said[45:]} == {100.0}
    assert {item["idle_ratio"] for item in said[45:]} == {0.25}


def test_the_time_of_a_trainer_is_counted_while_it_passes() -> None:
    metrics, now = Metrics("r", "trainer", "w"), [0.0]
    sheet = TimeSheet(metrics, clock=lambda: now[0])
    now[0] = 5.0
    sheet.turn_to(Doing.WAIT_FOR_GROUPS)
    now[0] = 7.0
    sheet.tick()
    assert value(metrics.registry, "idle_seconds_total", cause="no_input") == 2.0
    now[0] = 8.0
    sheet.turn_to(Doing.STEP)
    now[0] = 108.0
    sheet.tick()
    now[0] = 110.0
    sheet.turn_to(None)
    now[0] = 120.0
    sheet.tick()
    assert value(metrics.registry, "idle_seconds_total", cause="no_input") == 3.0
    assert value(metrics.registry, "busy_seconds_total") == 102.0


def test_rates_fall_when_a_step_is_long_overdue() -> None:
    metrics, now = Metrics("r", "trainer", "w"), [0.0]
    rates = Rates(metrics, clock=lambda: now[0])
    for now[0] in (10.0, 20.0):
        metrics.tokens_out_total.inc(1000)
        said = [rates.measure()["tokens_per_s"]]
    for now[0] in (70.0, 90.0, 900.0):
        said.append(rates.measure()["tokens_per_s"])
    assert said == [100.0, 100.0, 12.5, 1.1]


def test_progress_ages_while_nothing_moves() -> None:
    metrics, now = Metrics("r", "generator", "w"), [100.0]
    rates = Rates(metrics, clock=lambda: now[0])
    for now[0] in (130.0, 160.0, 190.0):
        said = rates.measure()
    assert said["progress_age_s"] == 90
    assert said["groups_per_s"] == 0


def test_tokens_of_a_group_in_work_are_progress() -> None:
    metrics, now = Metrics("run", "generator", "generator-1"), [0.0]
    rates = Rates(metrics, clock=lambda: now[0])
    for now[0], tokens in ((30.0, 100), (60.0, 200), (90.0, 200)):
        said = rates.measure(tokens)
    assert said["progress_age_s"] == 30.0
