"""Which rule serves a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_bus.errors import BadInput, UnknownName
from omni_bus.resolution import Checkpoint, ModelRule, resolve


def checkpoint(model: str = "some/model", index: Any = None, **config: Any) -> Checkpoint:
    files = {"config.json": config or None, "model_index.json": index}
    return Checkpoint(model, files.get)


def rule(name: str, **what: Any) -> ModelRule:
    sets: dict[str, Any] = {key: frozenset(value) if isinstance(value, list) else value for key, value in what.items()}
    return ModelRule(name=name, config=name, reason="", stages=(), pipeline="p", **sets)


def chosen(found: Checkpoint, *rules: ModelRule, wanted: str | None = None) -> str:
    return resolve(found, rules, wanted).chosen.rule.name


EVERY_STEP = (
    rule("by-pattern", architectures=["*ForCausalLM"], priority=9),
    rule("by-class", diffusers_classes=["AudioPipeline"], priority=8),
    rule("by-architecture", architectures=["AForCausalLM"], priority=7),
    rule("by-type", model_types=["a"], priority=6),
    rule("by-name", names=["some/model"], priority=5),
    rule("asked-for"),
)
KNOWN = {"model_type": "a", "architectures": ["AForCausalLM"], "index": {"_class_name": "AudioPipeline"}}


def test_steps_come_in_their_order_whatever_the_priorities() -> None:
    left = list(EVERY_STEP)
    order = [chosen(checkpoint(**KNOWN), *left, wanted="asked-for")]
    while len(left) > 1:
        order.append(chosen(checkpoint(**KNOWN), *left))
        left = [each for each in left if each.name != order[-1]]

    assert order == ["asked-for", "by-name", "by-type", "by-architecture", "by-class", "by-pattern"]


def test_second_is_what_would_have_been_next() -> None:
    found = resolve(checkpoint(**KNOWN), EVERY_STEP)

    assert found.chosen.because == "its name is some/model"
    assert (found.others[0].rule.name, found.others[0].because) == ("by-type", "its model_type is a")


def test_priority_then_name_decides_within_a_step() -> None:
    rules = [rule(name, model_types=["a"], priority=priority) for name, priority in (("z", 1), ("b", 0), ("a", 0))]

    found = resolve(checkpoint(model_type="a"), rules)
    assert [match.rule.name for match in (found.chosen, *found.others)] == ["z", "a", "b"]


def test_first_architecture_counts_more() -> None:
    rules = rule("x", architectures=["X"], priority=9), rule("y", architectures=["Y"])

    assert chosen(checkpoint(architectures=["Y", "X"]), *rules) == "y"


def test_singular_architecture_is_one() -> None:
    assert chosen(checkpoint(architecture="X"), rule("x", architectures=["X"])) == "x"


@pytest.mark.parametrize("name", ["AudioPipeline", ["some.module", "AudioPipeline"]])
def test_modular_index_names_module_and_class(name: Any) -> None:
    assert chosen(checkpoint("other", index={"_class_name": name}), *EVERY_STEP) == "by-class"


def test_predicate_is_asked_only_after_a_match() -> None:
    asked: list[str] = []

    def said_yes(found: Checkpoint) -> bool:
        asked.append(found.model)
        return True

    rules = rule("other", architectures=["Y"], predicate=said_yes), rule("x", architectures=["X"])
    assert chosen(checkpoint(architectures=["X"]), *rules) == "x"
    assert asked == []
    assert chosen(checkpoint(architectures=["Y"]), *rules) == "other"
    assert asked == ["some/model"]


def test_predicate_that_says_no_or_fails_leaves_it_to_the_next() -> None:
    def fails(found: Checkpoint) -> bool:
        raise KeyError("vision")

    rules = (
        rule("no", architectures=["X"], predicate=lambda found: False, priority=2),
        rule("fails", architectures=["X"], predicate=fails, priority=1),
        rule("x", architectures=["X"]),
    )

    found = resolve(checkpoint(architectures=["X"]), rules)
    assert found.chosen.rule.name == "x"
    assert found.failed == ("fails matched, and its predicate raised KeyError: 'vision'",)


def test_part_of_a_name_is_no_match() -> None:
    with pytest.raises(BadInput):
        chosen(checkpoint("org/some/model-large", model_type="ab", architectures=["XX"]), *EVERY_STEP)


def test_unknown_one_is_told_what_it_is_and_what_is_known() -> None:
    no = rule("no", architectures=["Strange"], predicate=lambda found: False)
    with pytest.raises(BadInput) as caught:
        chosen(checkpoint("some/odd", model_type="odd", architectures=["Strange"]), *EVERY_STEP, no)

    message = caught.value.message
    assert message.startswith("model: no pipeline is known for 'some/odd' (model_type odd; architectures Strange)")
    assert "no matched, and its predicate said no" in message
    assert "by-type: a" in message


def test_files_that_say_nothing_are_told_so() -> None:
    with pytest.raises(BadInput, match=r"neither config\.json nor model_index\.json says what it is"):
        chosen(checkpoint("other"), *EVERY_STEP)


@pytest.mark.parametrize("text", ['{"model_type": 3, "architectures": [1, null]}', '{"architectures": {"a": 1}}'])
def test_configuration_of_other_types_says_nothing(text: str) -> None:
    with pytest.raises(BadInput, match="no pipeline is known"):
        chosen(checkpoint("other", **json.loads(text)), *EVERY_STEP)


def test_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(BadInput, match=r"model: config\.json of 'm' is no JSON object"):
        resolve(Checkpoint("m", lambda name: [1]), EVERY_STEP)


def test_unknown_wanted_one_lists_the_known() -> None:
    with pytest.raises(UnknownName, match=r"unknown pipeline 'by-tape'.*by-type"):
        chosen(checkpoint(), *EVERY_STEP, wanted="by-tape")
