"""Expressions that boards have in common.

In: names of metrics. Out: PromQL with the variables of a board. Series of the exporter are taken
`max by`, so that two exporters of one run show nothing twice.
"""

from __future__ import annotations

RATE = "$__rate_interval"
RUN = 'run="$run"'
ANY = f'{RUN}, role=~"$role", worker=~"$worker"'


def of_role(role: str) -> str:
    """Labels of the chosen workers of one role."""
    return f'{RUN}, role="{role}", worker=~"$worker"'


GENERATORS, SCORERS, TRAINER = map(of_role, ("generator", "scorer", "trainer"))
MODELS = f'{RUN}, role=~"teacher|judge", worker=~"$worker"'


def rate(name: str, labels: str) -> str:
    """Per second, of every series."""
    return f"rate(rollstream_{name}{{{labels}}}[{RATE}])"


def total(name: str, labels: str, *by: str) -> str:
    """Per second, summed. by: labels that stay."""
    return f"sum{_by(by)}({rate(name, labels)})"


def mean(name: str, labels: str, *by: str) -> str:
    """Per second, of the average worker."""
    return f"avg{_by(by)}({rate(name, labels)})"


def run_value(name: str, labels: str = RUN, *by: str) -> str:
    """A gauge of the exporter, or of the one trainer."""
    return f"max{_by(by)}(rollstream_{name}{{{labels}}})"


def quantile(share: float, name: str, labels: str, *by: str) -> str:
    """Of a histogram, over all chosen workers."""
    return f"histogram_quantile({share}, {total(f'{name}_bucket', labels, 'le', *by)})"


def average(name: str, labels: str, *by: str) -> str:
    """Mean of a histogram; nothing where nothing was observed."""
    return f"{total(f'{name}_sum', labels, *by)} / ({total(f'{name}_count', labels, *by)} > 0)"


def mean_reward(labels: str, *by: str) -> str:
    """Of what reward functions gave, which may be negative."""
    given = f"sum{_by(by)}(delta(rollstream_reward_accumulated{{{labels}}}[{RATE}]))"
    times = f"sum{_by(by)}(increase(rollstream_reward_value_count{{{labels}}}[{RATE}]))"
    return f"{given} / ({times} > 0)"


def buckets(name: str, labels: str) -> str:
    """For a heat map."""
    return f"sum by (le) (increase(rollstream_{name}_bucket{{{labels}}}[{RATE}]))"


def stream(name: str, which: str) -> str:
    """A gauge of one stream."""
    return run_value(name, f'{RUN}, stream="{which}"')


def alive(role: str) -> str:
    """Workers of a role that are there."""
    return f'sum(max by (state) (rollstream_workers{{{RUN}, role="{role}", state!="lost"}}))'


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""
