"""Ranks compare their plans before they need to agree on anything else."""

from __future__ import annotations

import pytest

from harts.data.exchange import ThreadExchange, run_in_threads
from harts.plan import CostModel, Plan, make_plan
from harts.plan.agreement import check_agreement
from harts.tree import tree_from_lcp

COST = CostModel(flops_per_token=1.0, flops_per_pair=0.0)


def plan_for(ranks: int, limit: int = 8) -> Plan:
    tree = tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2])
    return make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=ranks)


def traffic(exchange: ThreadExchange, plan: Plan) -> tuple[int, int]:
    check_agreement(plan, exchange)
    return exchange.num_calls, exchange.bytes_received // max(exchange.ranks - 1, 1)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_equal_plans_cost_one_reduction_of_64_bytes(ranks):
    counted = run_in_threads(ranks, lambda exchange: traffic(exchange, plan_for(ranks)))
    assert counted == [(1, 64 if ranks > 1 else 0)] * ranks


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_rank_names_the_one_that_differs(odd):
    messages = []

    def check(exchange: ThreadExchange) -> None:
        with pytest.raises(ValueError, match="2 different plans") as caught:
            check_agreement(plan_for(3, limit=9 if exchange.rank == odd else 8), exchange)
        messages.append(str(caught.value))

    run_in_threads(3, check)
    assert len(messages) == 3 and len(set(messages)) == 1
    assert f"{plan_for(3, limit=9).digest[:12]} on ranks {odd}" in messages[0]
    assert f"on ranks {', '.join(str(r) for r in range(3) if r != odd)}" in messages[0]


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(ValueError, match="for 3 ranks, but 2 run"):
        run_in_threads(2, lambda exchange: check_agreement(plan_for(3), exchange))
