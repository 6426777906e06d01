"""A strategy's form is made from its own schema."""

import pytest
from headway_console.parameters import fields_of, values_of
from headway_scheduler.errors import InvalidField
from headway_scheduler.strategies.catalog import BUILT_IN


@pytest.mark.parametrize("strategy", BUILT_IN, ids=lambda each: each.name)
def test_what_the_form_shows_is_what_the_strategy_takes(strategy):
    fields = fields_of(strategy.parameters_type, {})
    assert [field.name for field in fields] == list(strategy.parameters_type.model_fields)
    for field in fields:
        assert field.description
        assert field.value == field.default
    sent = {field.input_name: field.value for field in fields}
    assert values_of(strategy.parameters_type, sent, {}) == {}, "what is the default goes on following it"
    everything = dict.fromkeys(strategy.parameters_type.model_fields)
    values = values_of(strategy.parameters_type, sent, everything)
    assert set(values) == set(everything)
    assert strategy.parameters_type.model_validate(values) == strategy.parameters_type()


def test_values_in_force_are_shown_and_limits_with_them():
    (adaptive,) = [each for each in BUILT_IN if each.name == "adaptive"]
    found = {field.name: field for field in fields_of(adaptive.parameters_type, {"window_ms": 150.5})}
    assert (found["window_ms"].value, found["window_ms"].default) == ("150.5", "200")
    assert (found["window_ms"].low, found["window_ms"].high, found["window_ms"].kind) == ("0", "60000", "number")


def test_no_number_is_told_by_name():
    (adaptive,) = [each for each in BUILT_IN if each.name == "adaptive"]
    with pytest.raises(InvalidField, match="window_ms"):
        values_of(adaptive.parameters_type, {"p.window_ms": "much"}, {})
    assert values_of(adaptive.parameters_type, {"p.window_ms": "", "p.other": "1"}, {}) == {}
