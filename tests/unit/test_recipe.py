"""Dockerfiles as text: words, instructions with their lines, patterns. What comes in is read, or clearly refused."""

from __future__ import annotations

import shlex
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.errors import InvalidRequest, Unsupported
from dsec.recipe import words
from dsec.recipe.dockerfile import assignments, parse
from dsec.recipe.ignore import Ignored, Pattern

VARIABLES = {"A": "1", "EMPTY": "", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$Ab", ""),
        (r"\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A  b"', "1  b"),
        (r'"\$A\n"', r"$A\n"),
        ("${NO:-x$A}", "x1"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY-x}", ""),
        ("${A:+yes}", "yes"),
        ("${EMPTY:+yes}", ""),
        ("${EMPTY+yes}", "yes"),
        ("${NO:-${EMPTY:-deep}}", "deep"),
        ("${A:?fail}", "1"),
        ("$", "$"),
        ("a$", "a$"),
        ("/x:$PATH", "/x:/bin"),
        ("a\\", "a\\"),
    ],
)
def test_a_word(word: str, text: str) -> None:
    assert words.expand(word, VARIABLES) == text


@pytest.mark.parametrize(
    "word", ["${A", "${", "${}", "'a", '"a', "${A%x}", "${NO?gone}", "${A:", "${A:-x", "${A:-" * 99]
)
def test_a_word_that_can_not_be_read(word: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        words.expand(word, VARIABLES)


@given(st.text(max_size=200))
def test_any_word_is_read_or_refused(word: str) -> None:
    try:
        assert isinstance(words.expand(word, VARIABLES), str)
    except ValueError as error:
        assert str(error)  # noqa: PT017


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80))
def test_what_is_quoted_stays_as_it_is(text: str) -> None:
    assert words.expand(shlex.quote(text), VARIABLES) == text


def test_variables_that_double_each_other_end() -> None:
    variables = {"A": "x" * 200_000}
    with pytest.raises(ValueError, match="longer than"):
        words.expand("$A" * 10, variables)


def test_lines_comments_directives_and_forms() -> None:
    found = parse(
        "# escape=`\n"
        "ARG V=1\n"
        "\n"
        "from x:${V} as Build\n"
        "run echo a `\n"
        "  # not part of it\n"
        "\n"
        "  b \\\n"
        'CMD ["a", "b"]\n'
        'ENTRYPOINT [ "a", b ]\n'
        "COPY --from=build --chown=a:b x y /z/\n"
        "HEALTHCHECK --interval=3s CMD true\n"
        "FROM scratch\r\n"
    )
    assert found.escape == "`"
    assert [each.name for each in found.arguments] == ["ARG"]
    assert [(stage.line, stage.base, stage.name) for stage in found.stages] == [
        (4, "x:${V}", "build"),
        (13, "scratch", None),
    ]
    run, cmd, entrypoint, copy, _ = found.stages[0].instructions
    assert (run.line, run.text) == (5, "echo a   b \\")
    assert cmd.argv == ["a", "b"]
    assert entrypoint.argv is None
    assert copy.flags == {"from": ["build"], "chown": ["a:b"]}
    assert copy.text == "x y /z/"


def test_heredocs() -> None:
    found = parse(
        "FROM x\n"
        "RUN cat <<A >f && cat <<-'B'\n# kept\n$x\nA\n\tb\n\tB\n"
        "COPY <<one.txt <<\"two\" /d/\n1 \\\none.txt\n2\ntwo\n"
        "RUN echo $((1<<3))\n"
        "RUN last\n"
    )  # fmt: skip
    run, copy, shift, last = found.stages[0].instructions
    assert [(h.name, h.content, h.expand) for h in run.heredocs] == [("A", "# kept\n$x\n", True), ("B", "b\n", False)]
    assert [(h.name, h.content, h.expand) for h in copy.heredocs] == [
        ("one.txt", "1 \\\n", True),
        ("two", "2\n", False),
    ]
    assert not shift.heredocs
    assert last.line == 14


def test_assignments_old_and_new() -> None:
    found = parse("FROM x\nENV a b  c\nENV a=1 b='2 3' c=\"4 5\"\nLABEL a=b\nENV a\nENV a=1 b\n").stages[0].instructions
    assert assignments(found[0]) == [("a", "b  c")]
    assert assignments(found[1]) == [("a", "1"), ("b", "'2 3'"), ("c", '"4 5"')]
    for each, line in ((found[3], 5), (found[4], 6)):
        with pytest.raises(InvalidRequest, match=f"line {line}"):
            assignments(each)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", InvalidRequest, "no FROM"),
        ("RUN x", InvalidRequest, "line 1: RUN stands before"),
        ("FROM a b", InvalidRequest, "line 1"),
        ("FROM a AS b\nFROM c AS B", InvalidRequest, "line 2: 'B' can't be"),
        ("FROM a\n\n# c\nFLY \\\n x", Unsupported, "line 4: unknown instruction 'FLY'"),
        ("FROM a\nRUN", InvalidRequest, "line 2: RUN says nothing"),
        ("FROM a\nRUN --security=insecure x", Unsupported, "line 2: RUN --security"),
        ("FROM a\nCOPY --from=a --from=b x y", InvalidRequest, "line 2: COPY --from is said twice"),
        ("FROM a\nRUN <<X\nno end", InvalidRequest, "line 2: the heredoc X has no end"),
        ("FROM a\nSHELL sh", InvalidRequest, "line 2: SHELL takes a list"),
        ("# escape=x\nFROM a", InvalidRequest, "line 1: the escape character"),
        ("FROM a\0b", InvalidRequest, "NUL"),
        ("FROM a\n" + "RUN x\n" * 5001, InvalidRequest, "more than 5000"),
        ("x" * (5 << 20), InvalidRequest, "larger than"),
    ],
)
def test_what_is_no_dockerfile(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        parse(text)
    assert message in str(raised.value)


@given(st.lists(st.sampled_from(["FROM a", "RUN x \\", "<<E", "E", "COPY [", "#", "`", "\t", "ENV a=$", "--x=", "\\"])))
def test_any_lines_are_read_or_refused(lines: list[str]) -> None:
    try:
        found = parse("\n".join(lines))
    except (InvalidRequest, Unsupported) as error:
        assert error.message  # noqa: PT017
    else:
        assert all(1 <= each.line <= len(lines) for stage in found.stages for each in stage.instructions)


def test_patterns_to_ignore() -> None:
    lines = ["# comment", "*.pyc", "**/node_modules", "a/b", "!a/b/keep", "/x?z", "[a-c]q", "dir/*/f", "e/**/g", ""]
    ignored = Ignored(lines)
    yes = ["x.pyc", "d/e/node_modules/f", "node_modules", "a/b", "a/b/c", "xyz", "bq", "dir/1/f/g", "e/g", "e/1/2/g"]
    no = ["d/x.pyc", "a/b/keep", "a/b/keep/too", "a", "dq", "dir/f", "x/z", "comment"]
    assert [path for path in yes if not ignored(path)] == []
    assert [path for path in no if ignored(path)] == []
    assert Ignored(["*", "!kept"])("other")
    assert not Ignored(["*", "!kept"])("kept/x")
    assert not Ignored([".", "..", "../x"])("x")


@pytest.mark.parametrize("text", ["[", "a[b", "[^", "[z-a]"])
def test_a_pattern_that_is_none(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not a pattern"):
        Ignored([text])


def test_a_hostile_pattern_takes_no_time() -> None:
    begun = time.process_time()
    assert not Pattern("*a" * 500 + "b").matches(["a" * 255])
    assert not Pattern("**/*a/" * 200 + "b", deep=True).matches(["a"] * 400)
    assert time.process_time() - begun < 5
