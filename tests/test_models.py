"""Presets against published counts and PyTorch's own FLOP counter; how a name, a file or a what-if becomes a model."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import LAW

from tfcost import Model, analyze, load
from tfcost.errors import ConfigError, InputError, UnknownName
from tfcost.models import preset_names

ORACLE = json.loads((Path(__file__).parent / "data/preset_flops.json").read_text(encoding="utf-8"))

PARAMETERS = {
    # Counts of the public checkpoints (model cards), a tied head once.
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    # Six encoder layers of 12d² + 13d, six decoder layers of 16d² + 19d, one table of 37,000 rows.
    "transformer-base": 6 * (12 * 512**2 + 13 * 512) + 6 * (16 * 512**2 + 19 * 512) + 37_000 * 512,
    "transformer-big": 6 * (12 * 1024**2 + 13 * 1024) + 6 * (16 * 1024**2 + 19 * 1024) + 37_000 * 1024,
    # 96 layers of 12d² + 13d, 50,257 tokens and 2,048 positions, a final norm.
    "gpt3-175b": 96 * (12 * 12288**2 + 13 * 12288) + (50_257 + 2_048) * 12288 + 2 * 12288,
}

PRINTED = {
    # What the papers print, and how far rounding and what they leave out may be from a count.
    "transformer-base": (65e6, 0.03),
    "transformer-big": (213e6, 0.01),
    "bert-base": (110e6, 0.01),
    "bert-large": (340e6, 0.02),
    "gpt3-175b": (174.6e9, 0.001),
    "llama-2-7b": (6.7e9, 0.01),
    "llama-3-8b": (8e9, 0.01),
}


# --- Presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_a_presets_parameters_are_exact(name, parameters):
    assert analyze(name).totals["parameters"] == parameters


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_a_presets_parameters_are_what_its_paper_prints(name, printed):
    value, tolerance = printed
    assert abs(analyze(name).totals["parameters"] - value) <= tolerance * value


def test_the_presets_of_this_issue_are_there():
    assert set(PARAMETERS) <= set(preset_names())


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_count_that_a_data_file_calls_published_is_ours_or_what_the_paper_prints(name):
    published = load(name).published_parameters
    assert published in (PARAMETERS[name], PRINTED.get(name, (None, None))[0])


@pytest.mark.parametrize("row", ORACLE["models"], ids=lambda row: row["preset"])
def test_a_presets_flops_are_what_pytorch_counts(row):
    assert analyze(row["preset"]).totals["parameters"] == row["parameters"]
    for point in row["forward_flops"]:
        totals = analyze(row["preset"], batch=point["b"], seq_len=point["N"], attention="eager").totals
        assert totals["forward_flops"] == point["flops"]


@pytest.mark.parametrize("name", sorted(preset_names()))
def test_a_preset_says_where_it_is_from(name):
    model = load(name)
    assert len(model.source) > 20
    assert model.ignored_keys == ()


@pytest.mark.parametrize(("name", "seq_len"), [
    ("gpt2", 1024), ("gpt3-175b", 2048), ("bert-base", 512), ("llama-2-7b", 2048), ("llama-3-8b", 2048),
    ("transformer-base", 2048),
])  # fmt: skip
def test_a_models_default_length_is_its_own_maximum_up_to_2048(name, seq_len):
    assert analyze(name).inputs["seq_len"] == seq_len


def test_an_encoder_decoders_source_is_as_long_as_its_target_unless_stated():
    assert analyze("transformer-base", seq_len=7).inputs == {"batch": 1, "seq_len": 7, "src_len": 7}
    assert analyze("transformer-base", seq_len=7, src_len=5).inputs == {"batch": 1, "seq_len": 7, "src_len": 5}


def test_a_model_is_priced_with_flash_attention_and_the_documents_with_eager():
    assert analyze("gpt2").assumptions["attention"] == "flash"
    assert analyze("transformer-base").assumptions["attention"] == "flash"
    assert analyze(hidden=8, heads=2, layers=1).assumptions["attention"] == "eager"


# --- Names and paths ------------------------------------------------------------------------------------------------


def write(folder: Path, **keys) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(keys), encoding="utf-8")
    return path


TINY = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 7}


def tiny(path) -> bool:
    return load(path).config().hidden == 8


def test_a_config_is_read_from_a_file_or_the_folder_that_holds_it(tmp_path):
    path = write(tmp_path / "model", **TINY)
    for given_ in (path, str(path), path.parent, str(path.parent), f"{path.parent}/"):
        assert tiny(given_)


def test_any_name_of_a_config_file_will_do(tmp_path):
    renamed = write(tmp_path, **TINY).rename(tmp_path / "my model.txt")
    assert tiny(renamed)


def test_a_name_wins_over_a_folder_unless_it_has_a_separator(tmp_path, monkeypatch):
    write(tmp_path / "gpt2", **TINY)
    monkeypatch.chdir(tmp_path)
    assert load("gpt2").config().hidden == 768
    assert tiny("./gpt2")
    assert tiny("gpt2/config.json")
    assert tiny(Path("gpt2"))


def test_a_folder_without_a_separator_is_found_where_no_name_is_so(tmp_path, monkeypatch):
    write(tmp_path / "mine", **TINY)
    monkeypatch.chdir(tmp_path)
    assert tiny("mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert tiny(".")
    assert tiny("config.json")


def test_names_are_read_without_case():
    assert load("GPT2").config() == load("gpt2").config()


@pytest.mark.parametrize(("name", "meant"), [
    ("gpt-2", "gpt2"), ("lama-2-7b", "llama-2-7b"), ("bert_base", "bert-base"), ("gpt2xl", "gpt2-xl"),
])  # fmt: skip
def test_a_name_that_is_nearly_one_brings_a_suggestion(name, meant):
    with pytest.raises(UnknownName, match="did you mean") as caught:
        load(name)
    assert meant in str(caught.value)


def test_a_name_like_no_other_says_where_the_names_are():
    """There are too many for a line."""
    with pytest.raises(UnknownName) as caught:
        load("zzzzzz")
    assert "tfcost models" in str(caught.value)


@pytest.mark.parametrize("name", [
    "", "a\0b", "a" * 5000, "./" + "a" * 5000, "./nothing-here", "nothing.json", "~", "\n", "./a\nb", "./\x1b[31mred",
])  # fmt: skip
def test_a_name_that_cannot_be_one_is_one_clear_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        load(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_loaded_model_may_be_analysed_again_and_again(tmp_path):
    model = load(write(tmp_path, **TINY))
    assert isinstance(model, Model)
    assert analyze(model).totals == analyze(tmp_path).totals
    assert analyze(model, layers=3).totals["parameters"] > analyze(model).totals["parameters"]
    assert analyze(model).totals == analyze(tmp_path).totals


def test_a_key_that_is_not_known_is_reported_and_left_out(tmp_path):
    report = analyze(write(tmp_path, **TINY, n_flux=3, more_flux={}))
    assert report.assumptions["ignored_keys"] == ["n_flux", "more_flux"]
    assert any("n_flux" in warning and "more_flux" in warning for warning in report.warnings)
    assert report.totals == analyze(write(tmp_path, **TINY)).totals


# --- What-ifs -------------------------------------------------------------------------------------------------------

KEYS = {
    "gpt2": {
        "hidden": "n_embd", "heads": "n_head", "layers": "n_layer", "ffn_hidden": "n_inner", "vocab": "vocab_size",
        "max_positions": "n_positions", "dropout": "resid_pdrop", "attention_dropout": "attn_pdrop",
        "embedding_dropout": "embd_pdrop", "tied": "tie_word_embeddings",
    },
    "bert": {
        "hidden": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers",
        "ffn_hidden": "intermediate_size", "vocab": "vocab_size", "max_positions": "max_position_embeddings",
        "dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
    },
    "llama": {
        "hidden": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers",
        "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn_hidden": "intermediate_size",
        "vocab": "vocab_size", "attention_dropout": "attention_dropout", "tied": "tie_word_embeddings",
    },
}  # fmt: skip
VALUES = {
    "hidden": st.sampled_from((24, 48)), "heads": st.sampled_from((2, 4, 12)), "layers": st.integers(1, 4),
    "kv_heads": st.sampled_from((1, 2)), "head_dim": st.integers(1, 7), "ffn_hidden": st.integers(1, 50),
    "vocab": st.integers(1, 99), "max_positions": st.integers(9, 40), "tied": st.booleans(),
}  # fmt: skip
DROPOUT = st.sampled_from((0.0, 0.1))


@st.composite
def what_ifs(draw):
    """A model type, a config of it that states some keys, and a what-if of some fields."""
    model_type = draw(st.sampled_from(sorted(KEYS)))
    keys = KEYS[model_type]
    fields = {field: draw(VALUES.get(field, DROPOUT)) for field in keys}
    stated = {field: value for field, value in fields.items() if field in ("hidden", "heads") or draw(st.booleans())}
    changed = {field: draw(VALUES.get(field, DROPOUT)) for field in keys if draw(st.booleans())}
    return model_type, {keys[field]: value for field, value in stated.items()}, changed


@LAW
@given(what_ifs())
def test_a_what_if_is_a_config_that_states_the_other_value(tmp_path_factory, drawn):
    """Values that the config states stay, values that it leaves out are derived again: as if the file said so."""
    model_type, stated, changed = drawn
    folder = tmp_path_factory.mktemp("what-if")
    base = write(folder / "base", model_type=model_type, **stated)
    edits = {KEYS[model_type][field]: value for field, value in changed.items()}
    edited = write(folder / "edited", model_type=model_type, **(stated | edits))
    assert analyze(base, seq_len=6, attention="eager", **changed).totals == analyze(
        edited, seq_len=6, attention="eager"
    ).totals


def test_what_is_left_out_is_derived_again(tmp_path):
    """GPT-2's n_inner is 4d, Llama's head_dim d/h and its key heads h, where the file does not say otherwise."""
    cfg = load(write(tmp_path, model_type="gpt2", n_embd=8, n_head=2)).config(hidden=24)
    assert (cfg.ffn_hidden, cfg.head_dim) == (96, 12)
    cfg = load(write(tmp_path, model_type="llama", hidden_size=8, num_attention_heads=2)).config(hidden=24, heads=6)
    assert (cfg.head_dim, cfg.kv_heads) == (4, 6)


def test_what_is_stated_stays(tmp_path):
    cfg = load(write(tmp_path, model_type="gpt2", n_embd=8, n_head=2, n_inner=20)).config(hidden=24)
    assert cfg.ffn_hidden == 20
    llama = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 3,
             "intermediate_size": 21}  # fmt: skip
    cfg = load(write(tmp_path, model_type="llama", **llama)).config(hidden=24, heads=6)
    assert (cfg.head_dim, cfg.kv_heads, cfg.ffn_hidden) == (3, 1, 21)


def test_dropouts_that_share_a_key_change_together(tmp_path):
    """BERT's hidden_dropout_prob is the embedding's too; GPT-2 states that one by its own key."""
    bert = load(write(tmp_path, model_type="bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
    assert bert.config(dropout=0.0).embedding_dropout == 0.0
    assert bert.config(dropout=0.0).attention_dropout == 0.1
    gpt2 = load(write(tmp_path, model_type="gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1))
    assert gpt2.config(dropout=0.0).embedding_dropout == 0.1


def test_layers_of_an_encoder_decoder_are_each_stacks():
    model = load("transformer-base")
    cfg = model.config(layers=2)
    assert (cfg.encoder_layers, cfg.decoder_layers) == (2, 2)
    cfg = model.config(encoder_layers=12)
    assert (cfg.encoder_layers, cfg.decoder_layers) == (12, 6)


def test_bias_is_every_bias():
    cfg = load("gpt2").config(bias=False)
    assert (cfg.attention_bias, cfg.attention_output_bias, cfg.ffn_bias, cfg.norm_bias) == (False,) * 4
    cfg = load("llama-2-7b").config(bias=True)
    assert (cfg.attention_bias, cfg.attention_output_bias, cfg.ffn_bias, cfg.norm_bias) == (True, True, True, False)


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama-3-8b", "transformer-base"])
def test_an_untied_head_adds_a_table(name):
    tied, untied = (analyze(name, tied=tied, head=True).totals for tied in (True, False))
    cfg = load(name).config()
    assert untied["parameters"] - tied["parameters"] == cfg.vocab * cfg.hidden == untied["head_parameters"]


def test_a_what_if_is_checked_like_flags():
    with pytest.raises(InputError, match="-d/--hidden 770 does not divide by -h/--heads 12"):
        analyze("gpt2", hidden=770)
    with pytest.raises(InputError, match="--kv-heads"):
        analyze("llama-3-8b", kv_heads=5)
    with pytest.raises(InputError, match="--src-len"):
        analyze("gpt2", src_len=5)


def test_a_sequence_beyond_the_position_table_is_answered_with_a_warning():
    report = analyze("gpt2", seq_len=2000)
    assert any("2,000" in warning and "1,024" in warning for warning in report.warnings)
    assert report.totals["forward_flops"] == 12 * (24 * 2000 * 768**2 + 4 * 2000**2 * 768) + 2 * 2000 * 768 * 50257
    assert analyze("gpt2", seq_len=1024).warnings == []
    assert analyze("llama-3-8b", seq_len=100_000).warnings == []  # no table


def test_a_config_error_is_an_input_error():
    """So that one except clause catches whatever a person can get wrong."""
    assert issubclass(ConfigError, InputError)
    assert issubclass(UnknownName, InputError)
    assert issubclass(InputError, ValueError)
