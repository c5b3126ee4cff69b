"""Which processes are known to have ended."""

from omni_bus.core import deaths
from omni_bus.core.deaths import Deaths
from omni_bus.ids import Sender


def test_incarnation_that_died_is_told_from_one_that_left_and_from_its_successor():
    known = Deaths()
    known.note(Sender("llm.0", 1), is_settled=False)
    known.note(Sender("llm.1", 2), is_settled=True)

    assert Sender("llm.0", 1) in known
    assert known.has_cut_short(Sender("llm.0", 1))
    assert Sender("llm.1", 2) in known
    assert not known.has_cut_short(Sender("llm.1", 2))
    assert Sender("llm.0", 3) not in known
    assert not known.has_cut_short(Sender("llm.0", 3))


def test_only_the_last_ones_are_kept(monkeypatch):
    monkeypatch.setattr(deaths, "MAX_DEATHS", 2)
    known = Deaths()
    for incarnation in (1, 2, 1, 3):
        known.note(Sender("llm.0", incarnation), is_settled=False)

    assert [Sender("llm.0", n) in known for n in (1, 2, 3)] == [True, False, True]
