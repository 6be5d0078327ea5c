"""The online judge's calls for problems that come with the request (`provided_data`): CommonOJ's form, programs that
read stdin and write stdout. There is no database of problems."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from dsec.api.sandboxfusion.running import Program, Runs
from dsec.api.sandboxfusion.wire import (
    EvalResult,
    EvalTestCase,
    Id,
    Prompt,
    PromptRequest,
    PromptsRequest,
    RunCodeRequest,
    RunStatus,
    StdioTest,
    SubmitRequest,
    TestConfig,
)
from dsec.errors import InvalidRequest, NotFound, Unsupported
from dsec.plan.completions import extract_code, same_lines
from dsec.plan.turns import Path

DATASETS = ("CommonOJ",)
"""Served by these names without a `dataset_type`."""
_TYPE = "CommonOJDataset"
_MOST_TESTS = 10_000
_TOLD = 1000
"""Characters of a passed case's input and output that are told again."""
_COMPILE_S, _RUN_COMPILED_S, _RUN_S = 10.0, 10.0, 20.0
_COMPILED = frozenset({"c", "cpp", "go", "java", "rust"})
_SUFFIX = {
    "cpp": "Write a whole C++ program with a main function.",
    "java": "Write a whole Java program with a public class Main that has a main method.",
}
_ANY_SUFFIX = "Write a whole program in {language}."


async def submit(  # noqa: PLR0917
    runs: Runs, caller: Path, project: str, environment: str, request: SubmitRequest, at_once: int
) -> EvalResult:
    """Judge a completion. `at_once`: no more than so many tests run at a time (0: as many as have room). Raises
    `InvalidRequest`, `Unsupported`, `NotFound`, and what running fails with."""
    config = request.config
    row = _row(request.dataset, config, request.id)
    language = config.language
    if not language:
        raise InvalidRequest("`config.language` is needed", field="config.language")
    code, how = extract_code(request.completion, language)
    tests = _tests(row)
    compiled = language in _COMPILED
    room = asyncio.Semaphore(at_once or len(tests))

    async def one(test: StdioTest) -> EvalTestCase:
        asked = RunCodeRequest(
            code=code,
            language=language,
            stdin=test.input["stdin"],
            compile_timeout=config.compile_timeout or _COMPILE_S,
            run_timeout=config.run_timeout or (_RUN_COMPILED_S if compiled else _RUN_S),
        )
        async with room:
            ran = await runs.run(caller, project, environment, Program(asked), patient=True)
        if ran.status is RunStatus.SANDBOX_ERROR:
            raise Unsupported(ran.message)
        output = ran.run_result.stdout if ran.run_result is not None else None
        passed = ran.status is RunStatus.SUCCESS and same_lines(output or "", test.output["stdout"])
        return EvalTestCase(
            passed=passed,
            exec_info=ran,
            test_info=_shortened(test) if passed and not config.extra.get("return_full_case") else test,
        )

    whole = bool(config.extra.get("run_all_cases"))
    found: list[EvalTestCase] = []
    tasks = [asyncio.ensure_future(one(test)) for test in tests]
    try:
        for task in tasks:
            found.append(await task)
            if not found[-1].passed and not whole:
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    accepted = len(found) == len(tests) and all(each.passed for each in found)
    return EvalResult(id=request.id, accepted=accepted, extracted_code=code, tests=found, extracted_type=how)


def prompts(request: PromptsRequest) -> list[Prompt]:
    """The texts of the problems that came along. Raises as `submit`."""
    rows = _rows(request.dataset, request.config)[request.offset :][: request.limit]
    return [_prompt(row, request.config) for row in rows]


def prompt(request: PromptRequest) -> Prompt:
    """One of them."""
    return _prompt(_row(request.dataset, request.config, request.id), request.config)


def check(dataset: str, config: TestConfig) -> None:
    """Raises `InvalidRequest` for a dataset that isn't served."""
    kind = config.dataset_type or (_TYPE if dataset in DATASETS else None)
    if kind != _TYPE:
        raise InvalidRequest(
            f"no problems of {kind or dataset!r} are served here",
            remedy=f"Send them as `config.provided_data`, with `config.dataset_type` {_TYPE}.",
            field="dataset",
        )


def _rows(dataset: str, config: TestConfig) -> list[dict[str, Any]]:
    check(dataset, config)
    if config.custom_extract_logic is not None:
        raise InvalidRequest(
            "`custom_extract_logic` is code for the server to run: refused", field="config.custom_extract_logic"
        )
    given = config.provided_data
    if given is None:
        raise InvalidRequest("`config.provided_data` is needed: there is no database", field="config.provided_data")
    return given if isinstance(given, list) else [given]


def _row(dataset: str, config: TestConfig, identity: Id) -> dict[str, Any]:
    rows = _rows(dataset, config)
    if isinstance(config.provided_data, dict):
        return rows[0]
    found = next((row for row in rows if row.get("id") == identity), None)
    if found is None:
        raise NotFound(f"no problem {identity!r} in `config.provided_data`")
    return found


def _tests(row: dict[str, Any]) -> list[StdioTest]:
    given = row.get("test")
    try:
        tests = (
            msgspec.json.decode(given, type=list[StdioTest])
            if isinstance(given, str)
            else msgspec.convert(given, list[StdioTest])
        )
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InvalidRequest(f"`provided_data.test`: {error}", field="config.provided_data") from None
    if not 0 < len(tests) <= _MOST_TESTS:
        raise InvalidRequest(f"1 to {_MOST_TESTS} tests, not {len(tests)}", field="config.provided_data")
    for test in tests:
        if "stdin" not in test.input or "stdout" not in test.output:
            raise InvalidRequest("a test has `input.stdin` and `output.stdout`", field="config.provided_data")
    return tests


def _prompt(row: dict[str, Any], config: TestConfig) -> Prompt:
    text, identity, labels = row.get("content", ""), row.get("id", 0), row.get("labels", {})
    try:
        named = msgspec.json.decode(labels, type=dict[str, Any]) if isinstance(labels, str) else labels
        language = config.language
        if language:
            text += "\n\n" + _SUFFIX.get(language, _ANY_SUFFIX.format(language=language))
        return msgspec.convert({"id": identity, "prompt": text, "labels": named}, Prompt)
    except (msgspec.MsgspecError, TypeError) as error:
        raise InvalidRequest(f"`provided_data`: {error}", field="config.provided_data") from None


def _shortened(test: StdioTest) -> StdioTest:
    return StdioTest(
        input={name: _short(text) for name, text in test.input.items()},
        output={name: _short(text) for name, text in test.output.items()},
    )


def _short(text: str) -> str:
    return text if len(text) <= _TOLD else text[:_TOLD] + "..."
