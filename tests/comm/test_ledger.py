"""The ledger: what is added is what is there, however it is asked for."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.comm.context import Context, Round
from gossamer.comm.ledger import Entry, Ledger
from gossamer.sim.compute import Timing
from gossamer.sim.network import Network
from gossamer.testing import run_workers

Message = tuple[int, str, int, int, int]
MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["mix1", "mix2", "outer"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 1000),
    ),
    max_size=30,
)


def ledger_of(messages: list[Message]) -> Ledger:
    ledger = Ledger()
    for message in messages:
        ledger.add(*message)
    return ledger


@given(MESSAGES)
def test_every_total_is_the_sum_of_the_messages_that_match(messages: list[Message]) -> None:
    ledger = ledger_of(messages)
    assert ledger.total() == sum(m[4] for m in messages)
    for value in (0, 1, 2):
        assert ledger.total(round_index=value) == sum(m[4] for m in messages if m[0] == value)
        assert ledger.total(sender=value) == sum(m[4] for m in messages if m[2] == value)
        assert ledger.total(receiver=value) == sum(m[4] for m in messages if m[3] == value)
        assert ledger.total(kind="mix1", sender=value, receiver=0, round_index=1) == sum(
            m[4] for m in messages if m[:4] == (1, "mix1", value, 0)
        )
        assert ledger.of_sender(value) == [e for e in ledger.entries() if e.sender == value]
    kinds = sorted({m[1] for m in messages})
    assert list(ledger.by_kind().items()) == [(kind, ledger.total(kind=kind)) for kind in kinds]
    assert sum(entry.num_messages for entry in ledger.entries()) == len(messages)


@given(MESSAGES, st.randoms(use_true_random=False))
def test_entries_do_not_depend_on_the_order_of_messages(
    messages: list[Message], shuffle: Random
) -> None:
    shuffled = list(messages)
    shuffle.shuffle(shuffled)
    assert ledger_of(shuffled).entries() == ledger_of(messages).entries()


@given(MESSAGES, MESSAGES)
def test_a_loaded_ledger_goes_on_counting(before: list[Message], after: list[Message]) -> None:
    ledger = Ledger()
    ledger.load(ledger_of(before).entries())
    for message in after:
        ledger.add(*message)
    assert ledger.entries() == ledger_of(before + after).entries()


def test_bytes_count_when_sent_though_they_are_lost() -> None:
    async def work(ctx: Context, round_: Round) -> None:
        if ctx.worker == 0:
            ctx.send(1, round_.tag("a"), torch.zeros(10))
            ctx.send(1, round_.tag("a", step=1), torch.zeros(5))
            ctx.send(1, round_.tag("b"), torch.zeros(3, dtype=torch.bfloat16), exact=True)

    network = Network(failure_probability=0.99, failure_unit="transfer")
    ledger = run_workers(2, work, network=network).ledger
    assert ledger.entries() == [Entry(0, "a", 0, 1, 60, 2), Entry(0, "b", 0, 1, 6, 1)]


def test_a_small_model_is_charged_as_the_large_one_but_for_exact_messages() -> None:
    """A million parameters of two bytes stand for four: 4 values weigh 2 MB, 2 half."""

    async def work(ctx: Context, round_: Round) -> None:
        for length in (4, 2):
            ctx.send(1 - ctx.worker, round_.tag("model", step=length), torch.zeros(length))
        ctx.send(1 - ctx.worker, round_.tag("control"), torch.zeros(4), exact=True)

    timing = Timing(parameters="1M", payload_dtype="bf16")  # type: ignore[arg-type]
    ledger = run_workers(2, work, timing=timing).ledger
    assert ledger.by_kind() == {"control": 2 * 16, "model": 2 * 3_000_000}
