"""Config files that cannot be used: each is one clear line, whatever is in the file, and never another exception.

The reading of real configs is held against transformers in test_hf_oracles and test_hf_perturb.
"""

import json
import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import QUICK

from tfcost import analyze, load
from tfcost.errors import ConfigError, InputError
from tfcost.hf import from_hf


def refused(path) -> str:
    """The message with which a file is refused: one printable line that names it."""
    with pytest.raises(InputError) as caught:
        load(path)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 600
    return text


def refused_text(tmp_path, content: str | bytes) -> str:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return refused(path)


GPT2 = '"model_type": "gpt2"'


# --- Not a config at all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [
    "", " ", "\n", "{", "}", "{,}", '{"a"}', '{"a": }', "{'model_type': 'gpt2'}", '{"model_type": "gpt2",}',
    '{"model_type": "gpt2"} {"model_type": "gpt2"}', "model_type: gpt2", "<html></html>", '{"a": 01}', '{"a": +1}',
    '{"a": .5}', '{"a": 0x10}', '{"a": 1_000}', '{"a": "\t"}', "// c\n{}", '{"a": undefined}', '{"a": True}',
    '{"a": None}', "nul", '"', "[", "[1,",
])  # fmt: skip
def test_what_is_not_json_is_said_with_its_place(tmp_path, content):
    text = refused_text(tmp_path, content)
    assert "config.json: not valid JSON" in text
    assert "line" in text
    assert "column" in text


WHOLE = json.dumps({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "id2label": {"0": "no", "1": "yes"}}, indent=2)


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_truncated_config_is_refused_at_every_length(tmp_path, length):
    assert "not valid JSON" in refused_text(tmp_path, WHOLE[:length])


@pytest.mark.parametrize(("content", "kind"), [
    ("[]", "an array"), ('[{"model_type": "gpt2"}]', "an array"), ('"gpt2"', "a string"), ("3", "an integer"),
    ("0.5", "a number"), ("true", "true or false"), ("null", "null"),
])  # fmt: skip
def test_json_that_is_no_object_is_named_for_what_it_is(tmp_path, content, kind):
    assert kind in refused_text(tmp_path, content)


@pytest.mark.parametrize("content", [
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", bytes(range(256)), b"\xff\xfe{\x00}\x00", b'{"a": "\xff"}',
    b"\x80\x02}q\x00.", b"PK\x03\x04\x14\x00\x00\x00\xe9\xff",
])  # fmt: skip
def test_binary_is_not_text(tmp_path, content):
    assert "config.json" in refused_text(tmp_path, content)


def test_nul_bytes_are_not_json(tmp_path):
    assert "not valid JSON" in refused_text(tmp_path, b"\0" * 1000)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf{" + GPT2.encode() + b"}")
    assert load(path).config().hidden == 768


def test_a_folder_without_a_config(tmp_path):
    assert "no config.json" in refused(tmp_path)


def test_a_folder_whose_config_is_a_folder(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert "no config.json" in refused(tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    assert "no such file" in refused(tmp_path / "config.json")


def test_a_named_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")


def test_a_device_is_not_read():
    assert "not a regular file" in refused("/dev/zero")


def test_a_link_in_a_circle(tmp_path):
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    refused(tmp_path / "config.json")


def test_a_file_of_many_megabytes_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    assert "too large" in refused(path)


# --- Values that no config has --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400 + ".0"])
@pytest.mark.parametrize("key", ["n_embd", "resid_pdrop", "not_a_key"])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(tmp_path, key, value):
    assert "not a finite number" in refused_text(tmp_path, f'{{{GPT2}, "{key}": {value}}}')


@pytest.mark.parametrize("key", ["n_embd", "not_a_key"])
@pytest.mark.parametrize("digits", [31, 4301, 10_000, 100_000])
def test_an_integer_of_thousands_of_digits_is_refused(tmp_path, key, digits):
    assert f"{digits} digits" in refused_text(tmp_path, f'{{{GPT2}, "{key}": {"9" * digits}}}')


@pytest.mark.parametrize("depth", [200_000, 20_000, 1_500, *range(900, 1_010)])
def test_nested_brackets_are_refused_at_every_depth(tmp_path, depth):
    """200,000 of them, and as many as the reader just takes."""
    for content in ("[" * depth, "[" * depth + "]" * depth, f'{{{GPT2}, "n_embd": {"[" * depth + "]" * depth}}}'):
        refused_text(tmp_path, content)


def test_nested_objects_are_refused(tmp_path):
    refused_text(tmp_path, '{"a":' * 200_000)
    refused_text(tmp_path, f'{{{GPT2}, "n_embd": {chr(123) + chr(34) + "a" + chr(34) + ":"}' * 100_000)


def test_a_deep_value_of_a_key_that_is_not_known_is_left_out_like_any_other(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(f'{{{GPT2}, "other": {"[" * 500 + "]" * 500}}}')
    assert analyze(path).assumptions["ignored_keys"] == ["other"]


@pytest.mark.parametrize("content", [
    '{"model_type": "gpt2", "n_embd": 8, "n_embd": 8}', '{"model_type": "gpt2", "model_type": "bert"}',
    '{"model_type": "gpt2", "task_specific_params": {"a": 1, "a": 2}}',
])  # fmt: skip
def test_a_key_that_stands_twice_is_named(tmp_path, content):
    assert "stands twice" in refused_text(tmp_path, content)


def test_two_names_of_one_key_may_agree_and_not_differ(tmp_path):
    assert from_hf({"model_type": "gpt2", "n_embd": 24, "hidden_size": 24}).fields["hidden"] == 24
    text = refused_text(tmp_path, f'{{{GPT2}, "n_embd": 24, "hidden_size": 36}}')
    assert all(part in text for part in ("n_embd", "hidden_size", "24", "36"))


def test_keys_that_cannot_be_printed_are_escaped_in_reports(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(f'{{{GPT2}, "\\ud800": 1, "two\\nlines": 2, "\\u001b[31m": 3}}')
    report = analyze(path)
    assert all(warning.isprintable() for warning in report.warnings)
    for form in ("json", "csv", "markdown", "latex"):
        report.render(form).encode()


# --- model_type and architectures -----------------------------------------------------------------------------------


def test_a_config_without_a_model_type(tmp_path):
    assert "model_type" in refused_text(tmp_path, "{}")


@pytest.mark.parametrize("value", ["null", "3", "true", '["gpt2"]', "{}", '""'])
def test_a_model_type_is_a_name(tmp_path, value):
    assert "model_type" in refused_text(tmp_path, f'{{"model_type": {value}}}')


def test_an_unknown_model_type_brings_the_known_ones(tmp_path):
    text = refused_text(tmp_path, '{"model_type": "zzzz"}')
    assert all(known in text for known in ("gpt2", "bert", "llama"))


@pytest.mark.parametrize(("given_", "meant"), [("gpt-2", "gpt2"), ("brt", "bert"), ("lama", "llama"), ("GPT2", "gpt2")])
def test_a_model_type_that_is_nearly_one_brings_a_suggestion(tmp_path, given_, meant):
    text = refused_text(tmp_path, json.dumps({"model_type": given_}))
    assert "did you mean" in text
    assert meant in text


@pytest.mark.parametrize("value", ['"GPT2LMHeadModel"', "[3]", "{}", "true", '["GPT2Whatever"]', '["BertModel"]'])
def test_architectures_are_a_list_of_the_types_classes(tmp_path, value):
    assert "architectures" in refused_text(tmp_path, f'{{{GPT2}, "architectures": {value}}}')


def test_the_class_decides_the_head():
    assert from_hf({"model_type": "gpt2"}).fields["head"] is True
    assert from_hf({"model_type": "gpt2", "architectures": ["GPT2Model"]}).fields["head"] is False
    assert from_hf({"model_type": "bert"}).fields["head"] is False
    assert from_hf({"model_type": "bert", "architectures": ["BertForMaskedLM"]}).fields["head"] is True


# --- Values of the wrong kind ---------------------------------------------------------------------------------------

WRONG = {
    "size": ("0", "-1", "1.5", "12.0", '"12"', "true", "false", "[12]", "{}", '""'),
    "probability": ("-0.1", "1", "1.0", "7", '"0.1"', "true", "[]"),
    "flag": ("0", "1", '"true"', '"no"', "null", "[]"),
    "name": ("3", "true", "null", '"gleu"', "[]", '""'),
}
KEYS = {
    "gpt2": {"size": ("n_embd", "n_head", "n_layer", "n_inner", "vocab_size", "n_positions"),
             "probability": ("resid_pdrop", "attn_pdrop", "embd_pdrop"),
             "flag": ("tie_word_embeddings",), "name": ("activation_function",)},
    "bert": {"size": ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
                      "max_position_embeddings"),
             "probability": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
             "flag": ("tie_word_embeddings",), "name": ("hidden_act",)},
    "llama": {"size": ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
                       "intermediate_size", "vocab_size"),
              "probability": ("attention_dropout",),
              "flag": ("attention_bias", "mlp_bias", "tie_word_embeddings"), "name": ("hidden_act",)},
}  # fmt: skip
CASES = [
    (model_type, key, value)
    for model_type, kinds in KEYS.items()
    for kind, keys in kinds.items()
    for key in keys
    for value in WRONG[kind]
]


@pytest.mark.parametrize(("model_type", "key", "value"), CASES)
def test_a_value_of_the_wrong_kind_is_named_with_its_key(tmp_path, model_type, key, value):
    text = refused_text(tmp_path, f'{{"model_type": "{model_type}", "{key}": {value}}}')
    assert key in text


@pytest.mark.parametrize("key", ["n_embd", "n_head", "n_layer", "vocab_size", "n_positions"])
def test_null_is_not_absent(tmp_path, key):
    text = refused_text(tmp_path, f'{{{GPT2}, "{key}": null}}')
    assert key in text
    assert "null" in text


def test_null_where_the_class_derives_is_absent():
    stated = {"model_type": "llama", "num_key_value_heads": None, "head_dim": None}
    assert from_hf(stated).fields == from_hf({"model_type": "llama"}).fields
    assert from_hf({"model_type": "gpt2", "n_inner": None}).fields == from_hf({"model_type": "gpt2"}).fields


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "gpt2", "n_embd": 770}, ("770", "12")),
    ({"model_type": "bert", "hidden_size": 100, "num_attention_heads": 7}, ("100", "7")),
    ({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5}, ("32", "5")),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_named(tmp_path, config, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError) as caught:
        analyze(path)
    assert "does not divide" in str(caught.value)
    assert all(word in str(caught.value) for word in words)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
KEY = st.one_of(
    st.sampled_from(sorted({key for kinds in KEYS.values() for keys in kinds.values() for key in keys})),
    st.sampled_from(("architectures", "num_labels", "id2label", "text_config", "add_cross_attention", "is_decoder",
                     "rope_scaling", "quantization_config", "position_embedding_type", "n_ctx")),
    st.text(string.printable, max_size=8),
)  # fmt: skip


@QUICK
@given(st.sampled_from(("gpt2", "bert", "llama", "mistral", "t5", "")), st.dictionaries(KEY, JSON, max_size=5))
def test_any_object_is_a_model_or_a_one_line_error(tmp_path_factory, model_type, config):
    path = tmp_path_factory.mktemp("any") / "config.json"
    path.write_text(json.dumps({**config, "model_type": model_type}))
    problem, totals = None, {}
    try:
        totals = analyze(path, seq_len=3).totals
    except InputError as error:
        problem = str(error)
    assert problem.isprintable() if problem is not None else totals["parameters"] > 0


def test_what_cannot_be_read_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError):
        load(tmp_path)


@pytest.mark.parametrize("depth", [2, 900])
def test_a_text_config_inside_a_text_config_is_refused(tmp_path, depth):
    text = '{"text_config":' * depth + '{"model_type":"gpt2"}' + "}" * depth
    assert "text_config" in refused_text(tmp_path, text)


@pytest.mark.parametrize("period", [10**15, 10**25])
def test_a_pattern_longer_than_any_stack_is_refused(tmp_path, period):
    assert "sliding_window_pattern" in refused_text(
        tmp_path, json.dumps({"model_type": "gemma3_text", "sliding_window_pattern": period})
    )
