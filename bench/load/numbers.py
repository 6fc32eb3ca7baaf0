"""`Numbers`: one reading of a server's /metrics, which knows what has been looked at in it.

Must not know: what the metrics mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from octavo.bench.load.process import read


@dataclass
class Numbers:
    """One reading of /metrics. `samples` by name, without prefix, and labels, without those of the model; `looked_at` grows with use."""

    samples: dict[str, dict[tuple[tuple[str, str], ...], float]]
    kinds: dict[str, str]  # counter, gauge or histogram, by family
    looked_at: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, text: str) -> Numbers:
        """Read what Prometheus would read."""
        samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        kinds = {}
        for family in text_string_to_metric_families(text):
            kinds[_own(family.name)] = family.type
            for sample in family.samples:
                labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key not in ("model_name", "engine")))
                samples.setdefault(_own(sample.name), {})[labels] = sample.value
        return cls(samples, kinds)

    def __getitem__(self, name: str) -> float:
        """A metric without further labels, or the sum over them."""
        return sum(self.by_label(name).values())

    def by_label(self, name: str) -> dict[str, float]:
        """By the value of its one further label."""
        self.looked_at.add(name)
        return {"".join(value for _, value in labels): value for labels, value in self.samples[name].items()}

    def since(self, before: Numbers) -> Numbers:
        """What was counted from then on; gauges as they are now."""
        gauges = {name for name, kind in self.kinds.items() if kind == "gauge"}
        grown = {
            name: {labels: value - before.samples.get(name, {}).get(labels, 0.0) for labels, value in values.items()}
            for name, values in self.samples.items()
            if name not in gauges
        }
        return Numbers(self.samples | grown, self.kinds, self.looked_at)

    def fallen(self, before: Numbers) -> list[str]:
        """Counters that are lower than they were before."""
        grown = self.since(before)
        gauges = {name for name, kind in self.kinds.items() if kind == "gauge"}
        return [
            f"{name} fell by {-min(values.values()):g}"
            for name, values in grown.samples.items()
            if name not in gauges and min(values.values()) < 0
        ]


def _own(name: str) -> str:
    return name.partition(":")[2] or name


async def numbers(url: str) -> Numbers:
    """GET /metrics."""
    return Numbers.of((await read(url, "/metrics")).body.decode())
