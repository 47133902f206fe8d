"""Instruments: how one metric is declared, and what a worker then holds.

In: a declaration (unit, help, how to read it, labels). Out: a counter, gauge or histogram that
already carries the labels run, role and worker. Labels never hold ids of groups or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock, RLock
from typing import Any, Generic, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "rollstream_"
WORKER_LABELS = ("run", "role", "worker")


class Kind(StrEnum):
    """What Prometheus calls the type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Declaration of one metric.

    name: with prefix. unit: base unit, or what is counted. help: what it is. reading: what a
    value means to the person who looks. roles: whose series starts at 0 before anything has
    happened; empty for all. is_late: it starts with its first value instead. labels: beside run,
    role and worker. buckets: upper bounds.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    reading: str
    roles: tuple[str, ...] = ()
    is_late: bool = False
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class CountHistogram(Collector):
    """A histogram whose observations come as (value, how many), as with tokens of one age."""

    def __init__(self, spec: Spec, registry: CollectorRegistry, constants: dict[str, str]) -> None:
        self._spec = spec
        self._constants = constants
        self._bounds = (*spec.buckets, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._lock = Lock()
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` `count` times."""
        index = next(i for i, bound in enumerate(self._bounds) if value <= bound)
        with self._lock:
            self._counts[index] += count
            self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """For the registry: cumulative buckets and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip(self._bounds, counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        family = HistogramMetricFamily(self._spec.name, self._spec.help, labels=list(self._constants))
        family.add_metric(list(self._constants.values()), buckets=buckets, sum_value=total)
        yield family

    def describe(self) -> Iterable[Metric]:
        """For the registry: the name, without values."""
        return [HistogramMetricFamily(self._spec.name, self._spec.help)]


Plain = TypeVar("Plain", Counter, Gauge, Histogram)
Held = TypeVar("Held")
Roles = tuple[str, ...]
_Build = Callable[[Spec, CollectorRegistry, dict[str, str]], Held]


class Labelled(Generic[Plain]):
    """An instrument with labels of its own; the constant ones are set already."""

    def __init__(self, instrument: Plain, constants: dict[str, str]) -> None:
        self._instrument: Plain = instrument
        self._constants = constants

    def labels(self, **labels: str) -> Plain:
        """The series with these label values."""
        series: Plain = self._instrument.labels(**self._constants, **labels)
        return series


class MetricTable:
    """Base of a table: makes the declared instruments with the constant labels.

    Those of the worker's role exist from the start, so that a rate is 0 and not absent; the
    others appear when they are first used. A table may continue another one.
    """

    def __init__(self, registry: CollectorRegistry, constants: dict[str, str]) -> None:
        self.registry = registry
        self.constants = constants
        self.held: dict[str, Any] = {}
        self.lock = RLock()
        for declared in self._declared():
            spec = declared.spec
            if not spec.is_late and (not spec.roles or constants["role"] in spec.roles):
                declared.hold(self)

    @classmethod
    def specs(cls) -> list[Spec]:
        """What is declared, in the order it is written."""
        return [declared.spec for declared in cls._declared()]

    @classmethod
    def _declared(cls) -> list[Declared[Any]]:
        return [item for part in cls.__mro__ for item in vars(part).values() if isinstance(item, Declared)]


class Declared(Generic[Held]):
    """A metric as an attribute of a table; it is named after the attribute.

    starts: role -> values of its one label whose series are there before anything has happened.
    """

    spec: Spec

    def __init__(
        self, kind: Kind, build: _Build[Held], *, starts: Mapping[str, Iterable[str]] | None = None, **fields: Any
    ) -> None:
        self._kind = kind
        self._build = build
        self._starts = starts or {}
        self._fields = {**fields, "roles": fields.get("roles") or tuple(self._starts)}

    def __set_name__(self, owner: type[MetricTable], name: str) -> None:
        self.spec = Spec(name=PREFIX + name, kind=self._kind, **self._fields)

    @overload
    def __get__(self, table: None, owner: type[MetricTable]) -> Declared[Held]: ...
    @overload
    def __get__(self, table: MetricTable, owner: type[MetricTable]) -> Held: ...
    def __get__(self, table: MetricTable | None, owner: type[MetricTable]) -> Declared[Held] | Held:
        return self if table is None else self.hold(table)

    def hold(self, table: MetricTable) -> Held:
        """The instrument in this table, made if need be."""
        with table.lock:
            if self.spec.name not in table.held:
                table.held[self.spec.name] = made = self._build(self.spec, table.registry, table.constants)
                if isinstance(made, Labelled):
                    for value in self._starts.get(table.constants["role"], ()):
                        made.labels(**dict.fromkeys(self.spec.labels, value))
            held: Held = table.held[self.spec.name]
            return held


def _arguments(spec: Spec, registry: CollectorRegistry, constants: dict[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "name": spec.name,
        "documentation": spec.help,
        "labelnames": (*constants, *spec.labels),
        "registry": registry,
    }
    return {**arguments, "buckets": spec.buckets} if spec.buckets else arguments


def _plain(make: type[Plain]) -> _Build[Plain]:
    return lambda spec, registry, constants: make(**_arguments(spec, registry, constants)).labels(**constants)


def _labelled(make: type[Plain]) -> _Build[Labelled[Plain]]:
    return lambda spec, registry, constants: Labelled(make(**_arguments(spec, registry, constants)), constants)


def counter(unit: str, help: str, reading: str, *, roles: Roles = ()) -> Declared[Counter]:
    """A total that only rises."""
    return Declared(Kind.COUNTER, _plain(Counter), unit=unit, help=help, reading=reading, roles=roles)


def counters(
    *labels: str,
    unit: str,
    help: str,
    reading: str,
    roles: Roles = (),
    starts: Mapping[str, Iterable[str]] | None = None,
) -> Declared[Labelled[Counter]]:
    """One total for each combination of labels. starts: as in `Declared`, for a metric with one label."""
    fields: dict[str, Any] = {"unit": unit, "help": help, "reading": reading, "labels": labels, "roles": roles}
    return Declared(Kind.COUNTER, _labelled(Counter), starts=starts, **fields)


def gauge(unit: str, help: str, reading: str, *, roles: Roles = ()) -> Declared[Gauge]:
    """A value that rises and falls."""
    return Declared(Kind.GAUGE, _plain(Gauge), unit=unit, help=help, reading=reading, roles=roles)


def late_gauge(unit: str, help: str, reading: str, *, roles: Roles) -> Declared[Gauge]:
    """The same, of which 0 would be wrong before there is a value."""
    return Declared(Kind.GAUGE, _plain(Gauge), unit=unit, help=help, reading=reading, roles=roles, is_late=True)


def gauges(*labels: str, unit: str, help: str, reading: str, roles: Roles = ()) -> Declared[Labelled[Gauge]]:
    """One value for each combination of labels."""
    fields: dict[str, Any] = {"unit": unit, "help": help, "reading": reading, "labels": labels, "roles": roles}
    return Declared(Kind.GAUGE, _labelled(Gauge), **fields)


def info(*labels: str, help: str, reading: str) -> Declared[Labelled[Gauge]]:
    """Facts that are the labels of a series whose value is 1."""
    return Declared(Kind.GAUGE, _labelled(Gauge), unit="1", help=help, reading=reading, labels=labels)


def histogram(
    unit: str, help: str, reading: str, *, buckets: tuple[float, ...], roles: Roles = ()
) -> Declared[Histogram]:
    """A distribution of single observations."""
    return Declared(
        Kind.HISTOGRAM, _plain(Histogram), unit=unit, help=help, reading=reading, roles=roles, buckets=buckets
    )


def histograms(
    *labels: str, unit: str, help: str, reading: str, buckets: tuple[float, ...], roles: Roles = ()
) -> Declared[Labelled[Histogram]]:
    """One distribution for each combination of labels."""
    fields: dict[str, Any] = {"unit": unit, "help": help, "reading": reading, "labels": labels, "roles": roles}
    return Declared(Kind.HISTOGRAM, _labelled(Histogram), buckets=buckets, **fields)


def count_histogram(
    unit: str, help: str, reading: str, *, buckets: tuple[float, ...], roles: Roles = ()
) -> Declared[CountHistogram]:
    """A distribution of observations that come with a count."""
    return Declared(Kind.HISTOGRAM, CountHistogram, unit=unit, help=help, reading=reading, roles=roles, buckets=buckets)


def observe_each(instrument: Histogram, count: int, total: float) -> None:
    """Observe `count` values of which only the sum is known, as so many times their mean."""
    for _ in range(count):
        instrument.observe(total / count)
