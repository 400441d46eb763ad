"""How many bytes do weights and rollouts cost on slow links, as a multiple of their size?

    sudo .venv/bin/python -m benchmarks.slow_links --megabytes 20 100

One worker at the other end of a real tcp link that is limited to 20, 50 and 200 Mb/s, with 5 ms of delay each way. What
is counted is said in tests/support/cluster/link_cost.py. A ratio above 1.05 is a defect: the exit code says so.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.cluster.link_cost import Cost, cost_of_rollout, cost_of_weights
from tests.support.cluster.tun_wire import NoWire

MOST_RATIO = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 50.0, 200.0], help="Mb/s")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[20.0, 50.0, 100.0])
    arguments = parser.parse_args()
    print(f"{'':10}{'MB':>6}{'Mb/s':>7}{'bytes/payload':>15}{'seconds':>9}{'at best':>9}{'dropped packets':>17}")
    costs: list[Cost] = []
    for label, cost_of in (("weights", cost_of_weights), ("rollout", cost_of_rollout)):
        for megabytes in arguments.megabytes:
            for rate in arguments.rates:
                try:
                    cost = cost_of(int(megabytes * 1e6), rate * 1e6, timeout_s=60.0 + 40 * megabytes / rate)
                except NoWire as error:
                    sys.exit(f"slow links cannot be made here: {error}")
                costs.append(cost)
                best_s = cost.payload_bytes * 8 / (rate * 1e6)
                print(
                    f"{label:10}{cost.payload_bytes / 1e6:6.0f}{rate:7.0f}{cost.ratio:15.3f}{cost.seconds:9.1f}"
                    f"{best_s:9.1f}{cost.num_dropped:17}",
                    flush=True,
                )
    if any(cost.ratio > MOST_RATIO for cost in costs):
        sys.exit(f"more than {MOST_RATIO} x the payload")


if __name__ == "__main__":
    main()
