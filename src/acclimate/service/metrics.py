"""Numbers for Prometheus, under conventional names."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .worker import Batch, Worker

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_NATS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 7)


class Metrics:
    """The metrics of one server, in a registry of their own. `signals` are those that may ring."""

    def __init__(self, signals: Iterable[str] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("acclimate_requests", "Requests by status code.", ["code"], registry=registry)
        self.durations = Histogram(
            "acclimate_request_duration_seconds", "Time to answer a request.", buckets=_SECONDS, registry=registry
        )
        self.depth = Gauge("acclimate_queue_depth", "Images that wait, also to be decoded.", registry=registry)
        self.samples = Counter(
            "acclimate_samples", "Images by whether they were learned from, once decided.", ["kept"], registry=registry
        )
        self.batches = Counter("acclimate_batches", "Batches.", registry=registry)
        self.entropy = Histogram(
            "acclimate_entropy_nats", "Entropy of the predictions.", buckets=_NATS, registry=registry
        )
        self.distance = Gauge("acclimate_state_distance", "Distance from the source network.", registry=registry)
        self.age = Gauge("acclimate_state_age_seconds", "Time since the state was written.", registry=registry)
        self.alarms = Counter("acclimate_alarms", "Alarms of the guard by signal.", ["policy"], registry=registry)
        self.rollbacks = Counter("acclimate_rollbacks", "Rollbacks, also those asked for.", registry=registry)
        self.probe = Gauge(
            "acclimate_probe_disagreement_ratio",
            "Share of held-out images on which adapted and source network disagree.",
            registry=registry,
        )
        self.frozen = Gauge("acclimate_frozen", "Whether learning is frozen.", registry=registry)
        self.streams = Gauge("acclimate_streams", "Cameras with a state of their own.", registry=registry)
        for kept in ("true", "false"):  # a series that begins with 1 has no increase
            self.samples.labels(kept)
        for signal in signals:
            self.alarms.labels(signal)

    def count(self, batch: Batch) -> None:
        """Add a batch."""
        self.batches.inc()
        self.samples.labels("true").inc(sum(batch.kept))
        self.samples.labels("false").inc(len(batch.kept) - sum(batch.kept))
        for value in batch.answer.entropy.tolist():
            self.entropy.observe(value)
        if batch.after is None:
            return
        signals = batch.after.signals
        for alarm in batch.after.alarms_since(batch.before):
            self.alarms.labels(alarm.signal).inc()
        self.rollbacks.inc(max(0, batch.after.rollbacks - (batch.before.rollbacks if batch.before else 0)))
        if signals.distance is not None:
            self.distance.set(signals.distance)
        if signals.probe is not None:
            self.probe.set(signals.probe)

    def expose(self, worker: Worker, undecoded: int) -> bytes:
        """Return all metrics as text."""
        self.depth.set(worker.depth + undecoded)
        self.frozen.set(worker.frozen)
        self.streams.set(worker.known)
        self.age.set(float("nan") if worker.saved is None else time.time() - worker.saved)
        return generate_latest(self.registry)
