"""The toy translator learns, translates, plots, and says clearly what is wrong with its input."""

import itertools
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest
import torch

from tfcost.data_files import data_path
from tfcost.errors import InputError
from tfcost.validate import translate
from tfcost.validate.translate import (
    CLASSIC,
    END,
    PAD,
    PRESETS,
    START,
    UNKNOWN,
    Translator,
    Vocabulary,
    batch_loss,
    build_model,
    fit,
    greedy_decode,
    learning_rate,
    main,
    pad,
    plot_attention,
    read_pairs,
)

pytestmark = pytest.mark.torch

TINY = replace(PRESETS["small"], hidden=16, heads=2, ffn_hidden=32, layers=1, epochs=2)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def train_pairs():
    return read_pairs(data_path("translation", "train.tsv"))


@pytest.fixture(scope="module")
def held_out():
    return read_pairs(data_path("translation", "held_out.tsv"))


@pytest.fixture(scope="module")
def trained(train_pairs) -> tuple[Translator, list[float]]:
    return fit(train_pairs, PRESETS["small"], seed=0)


# The pairs.

SUBJECTS = (("ich", "i", 0), ("du", "you", 1), ("er", "he", 2), ("sie", "she", 2), ("wir", "we", 3), ("sie", "they", 3))
VERBS = {
    "want": "mochte mochtest mochte mochten",
    "see": "sehe siehst sieht sehen",
    "have": "habe hast hat haben",
    "buy": "kaufe kaufst kauft kaufen",
    "take": "nehme nimmst nimmt nehmen",
}
NEUTER = {"bier": "beer", "buch": "book", "ei": "egg", "boot": "boat"}
MASCULINE = {"apfel": "apple", "hund": "dog", "tee": "tea"}
FEMININE = {"katze": "cat", "lampe": "lamp", "orange": "orange"}
NOUNS = [(noun, ("", "es")) for noun in NEUTER.items()]
NOUNS += [(noun, ("en", "en")) for noun in MASCULINE.items()]
NOUNS += [(noun, ("e", "e")) for noun in FEMININE.items()]


def grammar():
    """All sentences of data/translation/README.md: (german, english)."""
    ways = (None, ("gross", "big"), ("alt", "old"), "no")
    for (subject, pronoun, person), (verb, forms), ((german, english), (article, adjective)), way in itertools.product(
        SUBJECTS, VERBS.items(), NOUNS, ways
    ):
        third = "has" if verb == "have" else f"{verb}s"
        if way == "no":
            what, thing = f"kein{article} {german}", f"no {english}"
        else:
            stem, word = way or ("", "")
            what = " ".join(filter(None, [f"ein{article}", stem and stem + adjective, german]))
            named = f"{word} {english}".strip()
            thing = f"{'an' if named[0] in 'aeiou' else 'a'} {named}"
        yield f"{subject} {forms.split()[person]} {what}", f"{pronoun} {third if person == 2 else verb} {thing}"


def test_pairs_are_the_grammar(train_pairs, held_out):
    expected = {"train": [], "held_out": []}
    for german, english in grammar():
        check = zlib.crc32(german.encode())
        if german == CLASSIC or check % 3 == 0:
            split = "held_out" if german != CLASSIC and check // 3 % 7 == 0 else "train"
            expected[split].append((german.split(), english.split()))
    assert train_pairs == expected["train"]
    assert held_out == expected["held_out"]
    assert (CLASSIC.split(), ["i", "want", "a", "beer"]) in train_pairs
    assert (len(train_pairs), len(held_out)) == (348, 50)


def test_held_out_sentences_are_new_and_their_words_are_not(train_pairs, held_out):
    assert not {tuple(source) for source, _ in train_pairs} & {tuple(source) for source, _ in held_out}
    for side in (0, 1):
        assert {word for pair in held_out for word in pair[side]} <= {
            word for pair in train_pairs for word in pair[side]
        }


# It learns and translates.


def test_small_preset_learns(trained, held_out):
    translator, losses = trained
    assert losses[0] > 2
    assert losses[-1] < 0.05
    assert translator.translate([CLASSIC.split()]) == [["i", "want", "a", "beer"]]
    assert translator.exact_matches(held_out) >= 0.9 * len(held_out)


def test_one_sentence_translates_as_it_does_in_a_batch(trained, held_out):
    translator, _ = trained
    sources = [source for source, _ in held_out]
    assert [translator.translate([source])[0] for source in sources[:8]] == translator.translate(sources)[:8]


def test_unknown_words_and_the_length_limit(trained):
    translator, _ = trained
    assert translator.source.encode(["ich", "haus", "<end>"])[1:] == [UNKNOWN, UNKNOWN]
    (words,) = translator.translate([["ich", "mochte", "ein", "haus"]])
    assert words[:2] == ["i", "want"]
    assert not {"<pad>", "<start>", "<end>"} & set(words)
    short = Translator(translator.model, translator.source, translator.target, limit=2)
    assert short.translate([CLASSIC.split()]) == [["i", "want"]]
    long = Translator(translator.model, translator.source, translator.target, limit=7)
    assert len(long.translate([["bier"] * 30])[0]) <= 7
    with pytest.raises(InputError, match="cannot translate an empty sentence"):
        translator.translate([[]])


def test_same_seed_same_model(train_pairs):
    (one, first), (two, second), (_, other) = (fit(train_pairs[:64], TINY, seed) for seed in (5, 5, 6))
    assert first == second != other
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_full_preset_is_the_documents_model():
    preset = PRESETS["full"]
    words = Vocabulary([[str(i) for i in range(10)]])
    with torch.device("meta"):
        model = build_model(preset, words, words)
    layers = 6 * (3_152_384 + 4_204_032)  # data: the encoder and decoder layer of d = 512, d_ff = 2048
    assert sum(p.numel() for p in model.parameters()) == layers + 3 * 512 * len(words)
    assert model.decoder.layer[0].attention.head_dim == 64
    assert preset.rate == 1e-4


# How it is trained.


def test_inputs_are_shifted_right_and_padding_is_ignored(trained):
    model = build_model(replace(TINY, dropout=0.0), *(Vocabulary([["a", "b", "c", "d"]]) for _ in range(2)))
    seen = {}
    model.decoder.register_forward_pre_hook(lambda module, given: seen.update(inputs=given[0]))
    source, target = torch.tensor([[4, 5, 6], [7, 5, PAD]]), torch.tensor([[5, 6], [4, PAD]])
    loss = batch_loss(model, source, target)
    assert seen["inputs"].tolist() == [[START, 5, 6], [START, 4, PAD]]
    # By hand: five words are asked for, each from the words before it; the sixth place is padding.
    logits = [model(source[:1], torch.tensor([[START, 5, 6]]))[0], model(source[1:, :2], torch.tensor([[START, 4]]))[0]]
    wanted = [[5, 6, END], [4, END]]
    by_hand = [
        -row.log_softmax(-1)[i, word] for row, words in zip(logits, wanted, strict=True) for i, word in enumerate(words)
    ]
    torch.testing.assert_close(loss, torch.stack(by_hand).mean())
    # More padding changes nothing.
    wider = batch_loss(model, torch.nn.functional.pad(source, (0, 3)), torch.nn.functional.pad(target, (0, 2)))
    torch.testing.assert_close(wider, loss)


def test_pad_vocabulary_and_learning_rate():
    assert pad([[4], [5, 6, 7]]).tolist() == [[4, PAD, PAD], [5, 6, 7]]
    vocabulary = Vocabulary([["b", "a"], ["b"]])
    assert vocabulary.words == ["<pad>", "<start>", "<end>", "<unk>", "a", "b"]
    assert vocabulary.decode(vocabulary.encode(["b", "x", "a"])) == ["b", "<unk>", "a"]
    preset = PRESETS["full"]
    rates = [learning_rate(step, preset) for step in range(1, 400)]
    assert rates[0] == preset.rate / preset.warmup
    assert rates[preset.warmup // 2 - 1] == pytest.approx(preset.rate / 2)
    assert rates[preset.warmup - 1] == rates[-1] == max(rates) == preset.rate


def test_only_an_encoder_decoder_translates():
    from tfcost.validate.reference import Transformer

    with pytest.raises(InputError, match="only an encoder-decoder"):
        greedy_decode(Transformer(hidden=8, heads=2, layers=1, vocab=9), [[4]], 5)


# Attention maps.


def test_attention_maps_have_their_own_tokens(trained):
    maps = trained[0].attention([*CLASSIC.split(), "haus"])
    reads = ["ich", "mochte", "ein", "bier", "<unk>"]
    assert set(maps) == {"encoder", "decoder", "cross"}
    for kind, (weights, queries, keys) in maps.items():
        assert weights.shape == (2, 4, len(queries), len(keys))
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        assert (queries == reads) == (kind == "encoder")
        assert (keys == reads) == (kind != "decoder")
        assert kind == "encoder" or queries[:3] == ["<start>", "i", "want"]
    assert not maps["decoder"][0].triu(1).any()


def test_plots(trained, tmp_path):
    pytest.importorskip("matplotlib")
    paths = plot_attention(trained[0].attention(CLASSIC.split()), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["encoder-attention.png", "decoder-attention.png", "cross-attention.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


# The command line.


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(translate.PRESETS, "small", TINY)
    return ["--preset", "small", "--quiet", "--epochs", "1"]


def test_command_prints_what_it_did_and_repeats_itself(quick, capsys):
    outputs = []
    for _ in range(2):
        assert main([*quick, "--seed", "3", CLASSIC, "wir haben ein haus", "--max-words", "4"]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
        assert captured.err == "warning: 'haus' is not among the training words and is read as <unk>\n"
    lines = outputs[0].splitlines()
    assert outputs[0] == outputs[1]
    assert [line.split()[0] for line in lines[:3]] == ["model", "training", "loss"]
    assert lines[3].startswith("held out ")
    assert "of 50 sentences translated exactly" in lines[3]
    assert lines[4].startswith("ich mochte ein bier -> ")
    assert len(lines[5].removeprefix("wir haben ein haus -> ").split()) <= 4


def test_command_plots_and_shows_progress_on_stderr(quick, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([option for option in quick if option != "--quiet"] + ["--plot", str(tmp_path / "maps")]) == 0
    captured = capsys.readouterr()
    assert "trained in" in captured.err
    assert "trained in" not in captured.out
    assert len(list((tmp_path / "maps").glob("*.png"))) == captured.out.count("wrote ") == 3


def write(folder, train="h\te\nich\ti\n", held="h\te\nich\ti\n"):
    folder.mkdir(exist_ok=True)
    (folder / "train.tsv").write_text(train, encoding="utf-8")
    (folder / "held_out.tsv").write_text(held, encoding="utf-8")
    return str(folder)


def test_own_pairs(quick, capsys, tmp_path):
    assert main([*quick, "--data", write(tmp_path / "mine"), "ich"]) == 0
    assert "of 1 sentences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "smal"], "argument --preset: invalid choice: 'smal'"),
        (["--epochs", "0"], "argument --epochs: expected a whole number from 1 to 999999, got '0'"),
        (["--epochs", "1.5"], "argument --epochs: expected a whole number"),
        (["--rate", "-1"], "argument --rate: expected a number above 0 and up to 1, got '-1'"),
        (["--rate", "nan"], "got 'nan'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0"),
        (["--max-words", "x"], "argument --max-words: expected a whole number"),
        (["--colour"], "unrecognized arguments: --colour"),
        ([" "], "cannot translate an empty sentence"),
        (["--data", "{tmp}/none"], "none/train.tsv: No such file or directory"),
        (["--data", "{tmp}/one-side"], "train.tsv, line 2: expected german<TAB>english, got 'ich i'"),
        (["--data", "{tmp}/empty"], "held_out.tsv has no sentence pairs"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, message, quick, capsys, tmp_path):
    write(tmp_path / "one-side", train="h\te\nich i\n")
    write(tmp_path / "empty", held="h\te\n")
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert main(given) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tfcost: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "bad.tsv").write_bytes(b"h\te\n\xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_pairs(tmp_path / "bad.tsv")


def test_plot_without_matplotlib_says_which_extra(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*quick, "--plot", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == "tfcost: --plot needs matplotlib: pip install '.[plot]' in tfcost's folder\n"
    assert captured.out == ""


def test_plot_into_a_file_is_one_line(trained, quick, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    assert main([*quick, "--plot", str(tmp_path / "file")]) == 2
    assert "tfcost: cannot write" in capsys.readouterr().err


def test_without_torch_says_which_extra():
    run = "runpy.run_module('tfcost.validate.translate', run_name='__main__')"
    code = f"import sys, runpy; sys.modules['torch'] = None; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tfcost: this needs torch: pip install '.[torch]' in tfcost's folder\n"


def test_interrupt(quick, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(translate, "fit", stop)
    assert main(quick) == 130
