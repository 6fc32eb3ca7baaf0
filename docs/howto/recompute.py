"""Recompute every ratio of an ablation from its raw log, with the standard library alone: python recompute.py ABLATION_FOLDER

Nothing of Octavo is imported. Per repeat, a measure is made of requests.jsonl: one line a request, times in seconds after the run's start,
fields left out where they have their default. Percentiles are interpolated; a request without the value counts as infinite.
"""

import itertools
import json
import math
import re
import sys
from pathlib import Path


def answered(request):
    return request.get("finish_reason") in ("length", "stop") and not request.get("error")


def latencies(name, requests):
    """Seconds: one a request, infinite where it has none. Of ITL one a pause: tokens that came together have none between them."""
    found = []
    for r in requests:
        times = r.get("token_times", [])
        if name == "ITL":
            found += [b - a for a, b in itertools.pairwise(times) if b > a]
        elif name == "TTFT":
            found.append(times[0] - r["sent"] if times else math.inf)
        elif name == "E2E":
            found.append(times[-1] - r["sent"] if answered(r) else math.inf)
        elif name == "TPOT" and not (answered(r) and len(times) == 1):
            found.append((times[-1] - times[0]) / (len(times) - 1) if answered(r) else math.inf)
        elif name == "queue":
            found.append(r["first_scheduled"] - r["sent"] if "first_scheduled" in r else math.inf)
    return found


def percentile(values, percent):
    values, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return low if low == high else low + (high - low) * (place % 1)


def measure(text, run):
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    duration = max(r["ended"] for r in requests)
    name, kind = re.fullmatch(r"(.*?)(?: \[(.+)\])?", text).groups()
    requests = [r for r in requests if kind in (None, r.get("class_name", "default"))]
    good = [r for r in requests if answered(r)]
    output, prompts = sum(len(r["token_times"]) for r in good), sum(r["num_prompt_tokens"] for r in good)
    rates = {"output tok/s": output, "total tok/s": output + prompts, "req/s": len(good)}
    if name in rates:
        return rates[name] / duration
    latency, figure = name.split()
    values = latencies(latency, requests)
    if figure != "mean":
        return percentile(values, float(figure[1:]))
    finite = [value for value in values if value < math.inf]
    return sum(finite) / len(finite)


folder = Path(sys.argv[1])
ablation = json.loads((folder / "ablation.json").read_text())
for scenario, cells in ablation["cells"].items():
    for cell in (one for one in cells if one["parent"] and not one["left_out"]):
        mine, parents = (folder / "runs" / scenario / name for name in (cell["name"], cell["parent"]))
        repeats = [str(n) for n in range(ablation["spec"]["repeats"]) if (mine / str(n)).is_dir() and (parents / str(n)).is_dir()]
        for text in ablation["spec"]["compared"]:
            logs = [math.log(measure(text, mine / n) / measure(text, parents / n)) for n in repeats]
            print(scenario, cell["name"], cell["parent"], text, f"{math.exp(sum(logs) / len(logs)):.6f}", sep="\t")
