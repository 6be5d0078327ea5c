"""The table of a sandbox's states."""

from __future__ import annotations

import itertools

import pytest

from dsec.lifecycle import TABLE, Event, next_state
from dsec.spec.sandbox import State


def test_ended_stays_ended() -> None:
    for event in Event:
        assert next_state(State.ENDED, event) is State.ENDED


def test_what_the_table_lacks_is_an_error_that_names_both() -> None:
    for state, event in itertools.product(State, Event):
        if state is State.ENDED or (state, event) in TABLE:
            continue
        with pytest.raises(LookupError, match=f"{state}.*{event}"):
            next_state(state, event)


def test_only_clean_up_or_the_queue_leads_to_ended() -> None:
    for (state, event), after in TABLE.items():
        if after is State.ENDED:
            assert state is State.QUEUED or event is Event.CLEANED


def test_every_state_can_be_ended_and_can_reach_ended() -> None:
    for state in State:
        if state is State.ENDED:
            continue
        after = next_state(state, Event.END)
        assert after in (State.ENDING, State.ENDED)
        assert next_state(after, Event.CLEANED) is State.ENDED


def test_nothing_but_a_resume_leads_back() -> None:
    order = list(State)
    for (state, event), after in TABLE.items():
        if event is Event.RESUME:
            continue
        assert order.index(after) >= order.index(state)


def test_nothing_but_starting_and_resuming_runs() -> None:
    for (state, event), after in TABLE.items():
        if after is State.RUNNING:
            assert (state, event) in {(State.STARTING, Event.STARTED), (State.PAUSED, Event.RESUME)}
