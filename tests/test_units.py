"""Counts as people write them, against exact arithmetic; figures as people read them, against their exact values."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import QUICK

from tfcost.errors import InputError
from tfcost.units import binary_and_decimal, parse_bytes, parse_count, parse_counts, parse_probability, scaled

FACTORS = {
    "": 1, "k": 1000, "K": 1000, "M": 1000**2, "G": 1000**3, "B": 1000**3, "T": 1000**4,
    "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4,
}  # fmt: skip


@pytest.mark.parametrize(("text", "count"), [
    ("4096", 4096), ("4_096", 4096), ("4k", 4000), ("4Ki", 4096), ("2M", 2_000_000), ("10B", 10_000_000_000),
    ("2T", 2_000_000_000_000), ("1.5M", 1_500_000), ("0.5k", 500), ("1.5Ki", 1536), ("1", 1), ("+4", 4), (" 4k ", 4000),
    ("1_000_000", 10**6), ("0.001k", 1), ("007", 7), ("1.0", 1), ("2.50k", 2500), ("1Ti", 2**40),
])  # fmt: skip
def test_counts_as_people_write_them(text, count):
    assert parse_count(text, "-N") == count


@QUICK
@given(st.integers(1, 10**18 - 1), st.integers(0, 6), st.sampled_from(sorted(FACTORS)))
def test_a_count_is_exact_or_refused(digits, places, suffix):
    """Never a float on the way: 0.1 of a thousand is 100, and a fraction of one is an error."""
    text = str(digits).rjust(places + 1, "0")
    text = f"{text[:-places]}.{text[-places:]}" if places else text
    exact = Fraction(digits, 10**places) * FACTORS[suffix]
    if exact.denominator == 1:
        assert parse_count(text + suffix, "-N") == exact
    else:
        with pytest.raises(InputError, match="whole number"):
            parse_count(text + suffix, "-N")


@pytest.mark.parametrize("text", [
    "", " ", "0", "-1", "-4k", "0k", "0.0", "1.5", "abc", "k", "4x", "4kB", "4 k", "4KI", "4ki", "1__0", "_1", "1_",
    "1e3", "0x10", "1,5", "1/2", "٤", "４", "²", "NaN", "inf", "-0", "--4", "4-", "1.", ".5k", "4\n5", "4;ls",
    "__import__", "1.5.5k", "½", "0.0004k",
])  # fmt: skip
def test_what_is_no_count_is_one_line_that_names_the_flag_and_what_was_given(text):
    with pytest.raises(InputError) as caught:
        parse_count(text, "-N/--seq-len")
    message = str(caught.value)
    assert "-N/--seq-len" in message
    assert "whole number of at least 1" in message
    assert repr(text) in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["9" * 31, "9" * 10_000, "0." + "0" * 10_000 + "1", "1" * 25 + "." + "1" * 25])
def test_absurdly_many_digits_are_refused_briefly(text):
    with pytest.raises(InputError) as caught:
        parse_count(text, "-d")
    assert "digits" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_long_text_is_not_echoed_whole():
    with pytest.raises(InputError) as caught:
        parse_count("x" * 10_000, "-d")
    assert len(str(caught.value)) < 200


def test_lists_of_counts():
    assert parse_counts("1k,2k,4k", "-N") == [1000, 2000, 4000]
    assert parse_counts("7", "-N") == [7]
    assert parse_counts("1, 2", "-N") == [1, 2]


@pytest.mark.parametrize("text", ["1,,2", ",", "1,", "1;2", "1,x", "1,0"])
def test_a_list_with_a_fault_is_refused(text):
    with pytest.raises(InputError, match="-N"):
        parse_counts(text, "-N")


BYTES = {"kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3,
         "TiB": 1024**4}  # fmt: skip


@QUICK
@given(st.integers(0, 10**12), st.integers(0, 6), st.sampled_from(sorted(BYTES)))
def test_a_size_is_exact_with_a_fraction_of_a_byte_dropped(digits, places, suffix):
    text = str(digits).rjust(places + 1, "0")
    text = f"{text[:-places]}.{text[-places:]}" if places else text
    exact = Fraction(digits, 10**places) * BYTES[suffix]
    assert 0 <= exact - parse_bytes(text + suffix, "--overhead") < 1


def test_gb_is_never_gib():
    assert parse_bytes("80GB", "--overhead") == 80 * 10**9
    assert parse_bytes("80GiB", "--overhead") == 80 * 2**30
    assert parse_bytes("1024", "--overhead") == 1024


@pytest.mark.parametrize("text", [
    "", "80G", "80g", "80gb", "80Gb", "80 GB GB", "-1GB", "GB", "1e9", "1.5", "80GBps", "0x10", "²", "٤", "²GB",
    "1,5GB", "9" * 31, "9" * 100 + "GB", "x" * 1000,
])  # fmt: skip
def test_what_is_no_size_is_named(text):
    with pytest.raises(InputError) as caught:
        parse_bytes(text, "--overhead")
    assert "--overhead" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("0.1", 0.1), (".5", 0.5), ("0.999", 0.999), ("1e-3", 0.001)])
def test_probabilities(text, value):
    assert parse_probability(text, "--dropout") == value


@pytest.mark.parametrize("text", ["1", "1.0", "-0.1", "nan", "inf", "", "half", "0,1", "10%", "x" * 1000])
def test_what_is_no_probability_is_named(text):
    with pytest.raises(InputError) as caught:
        parse_probability(text, "--dropout")
    assert "--dropout" in str(caught.value)
    assert len(str(caught.value)) < 200


# --- Figures to read ------------------------------------------------------------------------------------------------

PREFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}


def read_back(text: str, unit: str) -> Fraction:
    """The value that a reader of a scaled figure takes away."""
    number, _, rest = text.partition(" ")
    assert rest.endswith(unit)
    mantissa, _, power = number.replace(",", "").partition("e")
    return Fraction(mantissa) * 10 ** int(power or 0) * PREFIX[rest.removesuffix(unit)]


@QUICK
@given(st.one_of(st.integers(0, 10**7), st.integers(0, 10**60)))
def test_a_scaled_figure_is_within_half_a_digit_of_the_exact_one(value):
    shown = read_back(scaled(value, "FLOPs"), "FLOPs")
    assert abs(shown - value) <= Fraction(value, 2000)  # four digits: at most 1/2 in 1000


@QUICK
@given(st.integers(1, 10**60))
def test_a_scaled_figure_is_short(value):
    assert len(scaled(value, "B")) <= 14


@pytest.mark.parametrize(("value", "text"), [
    (0, "0 FLOPs"), (999, "999 FLOPs"), (1000, "1.000 kFLOPs"), (291_648_307_200, "291.6 GFLOPs"),
    (1_000_000, "1.000 MFLOPs"), (70_274_254_897_152, "70.27 TFLOPs"), (123_400_000_000, "123.4 GFLOPs"),
])  # fmt: skip
def test_scaled_figures(value, text):
    assert scaled(value, "FLOPs") == text


@QUICK
@given(st.integers(1, 10**15 - 1))
def test_a_bare_scaled_count_is_written_as_it_is_read(value):
    """10⁹ is B, as in parse_count; what is printed may be typed again."""
    again = parse_count(scaled(value).replace(" ", "").replace(",", ""), "-N")
    assert abs(again - value) <= Fraction(value, 2000)


@QUICK
@given(st.integers(0, 2**80))
def test_bytes_are_shown_both_ways_and_labelled(count):
    """GiB is 2³⁰ and GB 10⁹, each within its last digit."""
    text = binary_and_decimal(count)
    if count < 1024:
        assert text == f"{count:,} B"
        return
    match = re.fullmatch(r"([0-9.,]+) ([KMGT]iB) \(([0-9.,]+) ([kMGT]B)\)", text)
    assert match is not None
    power = " KMGT".index(match[2][0])
    assert " kMGT".index(match[4][0]) == power
    for number, base in ((match[1], 1024), (match[3], 1000)):
        assert abs(Fraction(number.replace(",", "")) - Fraction(count, base**power)) <= Fraction(1, 200) + Fraction(
            count, base**power * 2**52
        )


@pytest.mark.parametrize(("count", "text"), [
    (2**30, "1.00 GiB (1.07 GB)"), (10**9, "953.67 MiB (1,000.00 MB)"), (2**40, "1.00 TiB (1.10 TB)"), (0, "0 B"),
    (1023, "1,023 B"), (1024, "1.00 KiB (1.02 kB)"),
])  # fmt: skip
def test_bytes_examples(count, text):
    assert binary_and_decimal(count) == text
