"""Large payloads cross a slow link once; benchmarks/slow_links.py has more of them."""

import pytest

from tests.support.cluster.link_cost import cost_of_rollout, cost_of_weights

MOST_RATIO = 1.05


@pytest.mark.long
@pytest.mark.parametrize("cost_of", [cost_of_weights, cost_of_rollout])
def test_a_payload_crosses_a_slow_link_once(tun_wire_or_skip, cost_of):
    """20 MB take 8 s. 0.6.0 asked for weights again after 1, 3 and 7 s, and sent a rollout again after 5 s."""
    cost = cost_of(20_000_000, 20e6)
    print(cost)
    assert 1.0 <= cost.ratio <= MOST_RATIO
