"""The language: what is understood, what is refused and how it is said, and any text in bounded time."""

from __future__ import annotations

import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import RuleError
from holdfast.formats.rules.pattern import Pattern, _may_match
from holdfast.formats.rules.source import Span, Text, source_of
from holdfast.layout import Mesh
from holdfast.rules import RuleSet, presets

MESH = Mesh((("dp", 2), ("tp", 2)))
HEAD = "axes tp, pp\ncopies dp\n"
LETS = {"heads": 4, "experts": 8, "layers": 4, "groups": 2}


def pattern(text: str) -> Pattern:
    return Pattern.of(text, Span(Text("p", text), 1, 0, len(text)))


# -- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "captures"),
    [
        ("a.*.w", "a.b.w", {}),
        ("a.*.w", "a.b.c.w", None),
        ("a.**.w", "a.b.c.w", {}),
        ("**.w", "w", None),
        ("a.h*", "a.h", None),
        ("h.{n}.w", "h.12.w", {"n": "12"}),
        ("h.{n}.{n}", "h.1.1", {"n": "1"}),
        ("h.{n}.{n}", "h.1.2", None),
        ("{q|k}_proj", "k_proj", {}),
        ("{q|k}_proj", "v_proj", None),
        ("{x:q|k}_proj", "k_proj", {"x": "k"}),
        ("a.{x:**}", "a.b.c", {"x": "b.c"}),
        ("a.b", "aXb", None),
        (r"/h\.(?P<n>\d+)\.w/", "h.7.w", {"n": "7"}),
        (r"/h\.\d+/", "h.7.w", None),
        (r"/a\/b/", "a/b", {}),
    ],
)
def test_patterns(text, name, captures) -> None:
    assert pattern(text).match(name) == captures


WORDS = st.sampled_from(["a", "b", "ab", "*", "**", "{n}", "{a|b}", "x{m}"])
GLOBS = st.lists(WORDS, min_size=1, max_size=4).map(".".join).filter(lambda t: t.count("{n}") < 3)
NAMES = st.lists(st.sampled_from(["a", "b", "ab", "xa", "c1"]), min_size=1, max_size=5).map(
    ".".join
)


@settings(max_examples=400, deadline=None)
@given(GLOBS, GLOBS, st.lists(NAMES, max_size=30))
def test_what_covers_matches_all_that_the_other_does(one, two, names) -> None:
    a, b = pattern(one), pattern(two)
    assert a.covers(a)
    if a.covers(b):
        assert all(a.match(n) is not None for n in names if b.match(n) is not None)


# -- expressions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("2 + 3*4", 14), ("(2+3)*4", 20), ("7//2", 3), ("7%4", 3), ("6/4*2", 3), ("9-4-3", 2),
     ("tp*heads", 8), ("heads/tp", 2), ("half*2", 1)],
)  # fmt: skip
def test_expressions(text, value) -> None:
    rules = RuleSet.parse(
        f"{HEAD}need heads\nlet half = 1/2\n** replicated, padded 0 to {text} + 40",
        let={"heads": 4},
    )
    assert rules.layout("w", (3,), MESH).view(0).stored == (40 + value,)


def test_variables_of_the_call_come_first_then_the_text_then_what_it_includes(tmp_path) -> None:
    (tmp_path / "family.rules").write_text(
        "need n\nlet m = 1\naxes tp\n** replicated, padded 0 to n*10 + m"
    )
    (tmp_path / "mine.rules").write_text("let n = 2\nlet m = 3\ninclude family.rules")

    def stored(**let: int) -> tuple[int, ...]:
        rules = RuleSet.load(str(tmp_path / "mine.rules"), let=let)
        return rules.layout("w", (1,), Mesh()).view(0).stored

    assert stored() == (23,)
    assert stored(n=5) == (53,)
    late = tmp_path / "late.rules"
    late.write_text("let n = 2\ninclude family.rules\nlet m = 3")
    with pytest.raises(RuleError, match=r"m already has a value, from .*family.rules:2"):
        RuleSet.load(str(late))


# -- names and rules ------------------------------------------------------------------------------

REFUSED = [
    ("** unique, shard 0 over tq", "there is no axis 'tq'", "tq", "did you mean 'tp'?"),
    ("** uniqe", "there is no replica rule 'uniqe'", "uniqe", "did you mean 'unique'?"),
    ("** unique, shrd 0", "there is no step 'shrd'", "shrd", "did you mean 'shard'"),
    ("** unique, fused 0 (a, b)", "there is no variable 'a'", "a", "there are"),
    ("** unique, shard over tp", "a dim (0, 1, ...) expected, found 'over'", "over", None),
    ("** unique shard 0 over tp", "the end of the line expected, found 'shard'", "shard", None),
    ("** unique, shard 0 over tp,", "a step expected, found the end", "", None),
    ("** unique, fused 0 (1, 2", "')' expected, found the end", "", None),
    ("** unique, padded 0 by 3", "'to' or 'multiple' expected, found 'by'", "by", None),
    ("** unique, scaled (((1)", "')' expected", "", None),
    ("**", "unique, replicated or averaged expected, found the end", "", None),
    ("a.{n.w unique", "'{' in a pattern without its other half", "a.{n.w", None),
    ("a.{1}.w unique", "{1} is neither a name nor alternatives", "a.{1}.w", None),
    ("/a(/ unique", "not a regular expression", "/a(/", None),
    ("/(a+)+/ unique", "may take for ever", "/(a+)+/", "without the outer repetition"),
    ("/(a|a)*b/ unique", "may take for ever", "/(a|a)*b/", None),
    ("a.{tp} unique", "tp has a meaning already", "a.{tp}", None),
    ("let tp = 3\n** unique", "tp is a mesh axis", "tp", None),
    ("let x = 1\nlet x = 2\n** unique", "x already has a value, from r:3", "x", None),
    ("need x\n** unique", "x has no value", "x", "let x = ..."),
    ("let over = 3", "'over' is a word of the language", "over", None),
    ("copies tp", "tp is an axis to divide over, and one of copies", "tp", None),
    ("** unique\na.w unique", "can never win: line 3 matches all", "a.w", "write it above **"),
    ("a.w unique\na.w unique", "can never win", "a.w", None),
    ("{a|b}.w unique\na.w unique", "can never win", "a.w", None),
    ("include llma", "neither a preset nor a file 'llma'", "llma", "did you mean 'llama'?"),
    ("include llama more", "include takes the name", "more", None),
    ("rename a -> b -> c", "a rename is not complete", "c", None),
    ("rename a.* -> b", "each wildcard needs a name", "a.*", "write {x} for *"),
    ("rename a.{n} -> b", "{n} is on one side only", "a.{n}", None),
    ("   ** unique", "a statement begins at the start of a line", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "marked", "hint"), REFUSED, ids=lambda v: str(v)[:20])
def test_errors_quote_the_line_and_mark_the_place(text, message, marked, hint) -> None:
    head = "" if text.startswith(" ") else HEAD
    with pytest.raises(RuleError) as error:
        RuleSet.parse(head + text, "r")
    lines = str(error.value).split("\n")
    assert re.match(r"r:\d+: ", lines[0]) and message in lines[0]
    number = int(lines[0].split(":")[1])
    assert lines[1].strip() == (head + text).split("\n")[number - 1].strip()
    if marked is not None:
        start, end = lines[2].index("^"), lines[2].rindex("^") + 1
        assert lines[1][start:end] == marked or (marked == "" and start >= len(lines[1]))
    if hint is not None:
        assert hint in str(error.value.hint)


def test_names_and_rules_must_fit() -> None:
    rules = RuleSet.parse(HEAD + "a.*.w replicated\n*.b.w replicated\nc.w replicated\n", "r")
    with pytest.raises(RuleError) as error:
        rules.check({"a.b.w": (2,), "a.x.w": (2,), "d.w": (2,)}, MESH)
    text = str(error.value)
    assert "r: no rule matches 'd.w'" in text and "did you mean 'c.w'" in text
    assert "r:3: ambiguous: 'a.b.w' is matched by this rule" in text and "and by line 4" in text
    assert "r:4: this rule is used by no name" in text and "'a.b.w' goes to r:3" in text
    assert "r:5: this rule is used by no name" in text and "did you mean 'd.w'" in text


def test_the_order_that_makes_it_clear() -> None:
    rules = RuleSet.parse(HEAD + "a.b.w replicated\na.*.w replicated\n*.b.w replicated\n")
    rules.check({"a.b.w": (2,), "a.x.w": (2,), "x.b.w": (2,)}, MESH)


def test_a_value_for_no_variable_is_refused() -> None:
    text = HEAD + "need heads\n** unique, padded 0 to heads"
    for let, message in (({"haeds": 2, "heads": 3}, "'haeds' is none of its variables"),
                         ({"tp": 2, "heads": 3}, "'tp' is none of its variables")):  # fmt: skip
        with pytest.raises(RuleError) as error:
            RuleSet.parse(text, let=let)
        assert message in str(error.value) and "heads" in str(error.value.hint)


def test_optional_rules_may_go_unused_and_overrides_stand_above_an_include() -> None:
    names = {"model.layers.0.mlp.up_proj.weight": (8, 8), "model.norm.weight": (8,)}
    mesh = Mesh((("tp", 2),))
    RuleSet.load("llama").check(names, mesh)
    rules = RuleSet.parse("model.norm.weight  replicated\ninclude llama\n", "r")
    rules.check(names, mesh)
    assert rules.match("model.norm.weight").rule.span.source.path == "r"


def test_an_unknown_axis_of_the_mesh_is_refused() -> None:
    rules = RuleSet.parse(HEAD + "** replicated", "r")
    with pytest.raises(RuleError, match="axis 'tpp' that no `axes` or `copies` names"):
        rules.check({"w": (2,)}, Mesh((("tpp", 2),)))
    rules.check({"w": (2,)}, Mesh((("tpp", 1),)))


def test_files_include_files_but_not_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.rules").write_text("include b.rules\n")
    (tmp_path / "b.rules").write_text("include a.rules\n")
    with pytest.raises(RuleError, match=r"b.rules:1: .*a.rules includes itself"):
        RuleSet.load(str(tmp_path / "a.rules"))
    with pytest.raises(RuleError, match="no file of rules"):
        RuleSet.load(str(tmp_path))
    (tmp_path / "c.rules").write_bytes(b"\xff\xfe")
    with pytest.raises(RuleError, match="cannot be read"):
        RuleSet.load(str(tmp_path / "c.rules"))


# -- renames --------------------------------------------------------------------------------------


def test_renames_go_both_ways() -> None:
    rules = RuleSet.parse(
        "rename wte.weight -> embed.weight\n"
        "rename h.{n}.ln_{i:1|2}.{x} -> layers.{n}.norm{i}.{x}\n"
        "rename {x:**} -> {x}\n"
    )
    names = ["wte.weight", "h.3.ln_1.bias", "h.3.ln_2.bias", "other.deep.name"]
    new = rules.renamed(names)
    assert list(new.values()) == ["embed.weight", "layers.3.norm1.bias", "layers.3.norm2.bias",
                                  "other.deep.name"]  # fmt: skip
    assert rules.renamed_back(new.values()) == {v: k for k, v in new.items()}
    assert rules.rename("h.1.ln_2.weight") == "layers.1.norm2.weight"


def test_a_name_that_may_come_from_either_of_two_is_refused() -> None:
    rules = RuleSet.parse(
        "rename a.{n} -> c.{n}\nrename b.{n} -> c.{n}\nrename e.{x:**} -> c.{x}", "r"
    )
    assert rules.renamed_back(["c.1.2"]) == {"c.1.2": "e.1.2"}
    with pytest.raises(RuleError, match=r"r:2: 'c.1' may have been 'a.1' or 'b.1'"):
        rules.renamed_back(["c.1"])
    general = RuleSet.parse("rename a.{n} -> c.{n}\nrename e.{x:**} -> c.{x}")
    assert general.renamed_back(["c.1"]) == {"c.1": "a.1"}  # the more specific one comes first
    with pytest.raises(RuleError, match="no rename matches 'd'"):
        rules.renamed_back(["d"])


def test_renames_that_lose_something_are_refused() -> None:
    rules = RuleSet.parse("rename a.{n} -> c.{n}\nrename b.{n} -> c.{n}", "r")
    with pytest.raises(RuleError, match=r"r:2: both 'a.1' and 'b.1' would be called 'c.1'"):
        rules.renamed(["a.1", "b.1"])
    with pytest.raises(RuleError, match=r"r:2: this rename is used by no name"):
        rules.renamed(["a.1"])
    with pytest.raises(RuleError, match=r"no rename matches 'x.1'"):
        rules.renamed(["a.1", "b.2", "x.1"])


# -- any text -------------------------------------------------------------------------------------


def attempt(text: str) -> None:
    """Nothing but RuleErrors, soon."""
    began = time.process_time()
    try:
        rules = RuleSet.parse(
            text, let={k: v for k, v in LETS.items() if re.search(rf"^need .*\b{k}\b", text, re.M)}
        )
        rules.renamed(["h.0.w", "layers.1.self_attn.q_proj.weight"])
        rules.check({"h.0.w": (8, 6), "model.layers.1.self_attn.q_proj.weight": (12, 8)}, MESH)
        rules.layout("h.0.w", (8, 6), MESH).fragments(1)
    except RuleError:
        pass
    assert time.process_time() - began < 5


ALPHABET = st.sampled_from(
    list("ab*{}|/()+-.,#=01\n \t\\:\u00e9")
    + ["unique", "shard", "over", "tp", "let", "fused", "axes "]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(ALPHABET, max_size=80).map("".join)))
def test_any_text_is_rules_or_a_rule_error(text) -> None:
    attempt(text)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(presets()), st.integers(0, 1 << 32))
def test_mutated_presets_are_rules_or_a_rule_error(preset, seed) -> None:
    rng, text = random.Random(seed), source_of(preset).text
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text))
        how = rng.randrange(4)
        if how == 0:
            text = text[:at] + text[at + rng.randint(1, 20) :]
        elif how == 1:
            text = text[:at] + rng.choice("(){}*/|,#\n 09ax=") + text[at:]
        elif how == 2:
            other = rng.randrange(len(text))
            text = text[:at] + text[other : other + rng.randint(1, 60)] + text[at:]
        else:
            text = text[:at] + chr(rng.randrange(1, 0x300)) + text[at + 1 :]
        text = text or "x"
    attempt(text)


@pytest.mark.parametrize(
    "text",
    [
        "** unique, scaled " + "(" * 100_000,
        "** unique, scaled " + "1+" * 4000 + "1",
        "** unique, scaled " + "1*" * 100_000 + "1",
        "let a = 999999999999999999\n"
        + "".join(
            f"let a{i} = a{i - 1 if i else ''}*a{i - 1 if i else ''}\n" for i in range(40)
        ).replace("a-1", "a")
        + "** unique",
        "".join(f"let b{i} = {f'b{i - 1} + ' if i else ''}1\n" for i in range(3000))
        + "** replicated, scaled b2999",
        "** unique, padded 0 to 999999999999999999",
        "** replicated, interleaved 0 8 of (1)\n" * 3,
        "*" * 5000 + " unique",
        "**.**.**.**.**.**.**.**.**.x unique",
        "/" + "a*" * 500 + "/ unique",
        "{" + "|".join("ab" for _ in range(70)) + "} unique",
        "{a|b}{a|b}{a|b}{a|b}{a|b}{a|b}{a|b}{a|b} unique\n" * 2,
        "\n".join(f"h.{i}.* unique" for i in range(1500)),
        "x" * (1 << 20) + "y",
        "** unique, shard 999999999999999999 over tp",
        "** unique, fused 0 (" + "0," * 3000 + "size)",
    ],
    ids=range(16),
)
def test_large_and_nested_texts_end_soon(text) -> None:
    attempt("axes tp\ncopies dp\n" + text)


def test_values_are_exact() -> None:
    rules = RuleSet.parse("** replicated, scaled third * 3", let={"third": Fraction(1, 3)})
    assert rules.layout("w", (2,), Mesh()).view(0).scale == 1.0


# -- long names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "matches"),
    [
        ("**.a.**.a.**.a.**.weight", "a" + ".a" * 4000 + ".bias", False),
        ("**.a.**.a.**.a.**.weight", "a" + ".a" * 4000 + ".weight", True),
        ("**.mlp.**.weight", "a" + ".mlp" * 20_000 + ".bias", False),
        ("*a*a*a*a*a*b", "a" * 3000, False),
        ("**.{x}.**.{y:a|b}.**.a.**.{x}.w", "a" + ".a" * 2000 + ".bias", False),
    ],
)
def test_a_glob_takes_no_power_of_a_names_length(text: str, name: str, matches: bool) -> None:
    """By backtracking each of these takes from minutes to years."""
    assert (pattern(text).match(name) is not None) is matches


def test_a_regular_expression_is_refused_over_a_name_that_is_too_long_for_it() -> None:
    four = pattern("/(.+)a(.+)a(.+)a(.+)b/")
    assert four.match("layers.0.a.0.a.1.a.2.b") is not None
    with pytest.raises(RuleError, match=r"4 repetitions may take for ever over a name of 2,000"):
        four.match("a" * 2000)


@given(
    st.lists(
        st.sampled_from(["*", "**", "{x}", "{y:**}", "{a|bc}", "{z:a|bc}", "a", "bc", ".", ".a."]),
        min_size=1,
        max_size=6,
        unique_by=lambda piece: piece if piece[0] == "{" else object(),
    ).map("".join),
    st.text("abc.", max_size=10),
)
def test_trying_all_places_at_once_finds_what_backtracking_does(text: str, name: str) -> None:
    assert _may_match(text, name) is (pattern(text).match(name) is not None)
