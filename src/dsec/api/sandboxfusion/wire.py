"""SandboxFusion's requests and answers, as its clients send and read them. Fields that aren't known are ignored, as
there."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from dsec.spec.judging import Language
from dsec.spec.sandbox import MIB

LANGUAGES = {
    "python": Language.PYTHON,
    "bash": Language.BASH,
    "c": Language.C,
    "cpp": Language.CPP,
    "rust": Language.RUST,
    "go": Language.GO,
    "nodejs": Language.NODE,
    "js": Language.NODE,
    "java": Language.JAVA,
}
"""Its names -> ours. `c` is ours alone."""

Timeout = Annotated[float, Meta(gt=0, le=3600)]
Source = Annotated[str, Meta(max_length=4 * MIB)]
Text = Annotated[str, Meta(max_length=64 * MIB)]
Name = Annotated[str, Meta(min_length=1, max_length=4096)]
Id = int | str


class RunStatus(StrEnum):
    """Of a request."""

    SUCCESS = "Success"
    FAILED = "Failed"
    """A command's exit code wasn't 0, or its time was over."""
    SANDBOX_ERROR = "SandboxError"
    """It says nothing about the program: clients raise."""


class CommandStatus(StrEnum):
    """Of one command."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


class RunCodeRequest(Struct, frozen=True, kw_only=True):
    """`POST /run_code`."""

    code: Source
    language: str
    compile_timeout: Timeout = 10.0
    run_timeout: Timeout = 10.0
    memory_limit_MB: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1
    """-1: the server's default."""
    stdin: Text | None = None
    files: dict[Name, Text | None] = {}
    """Path -> base64 of the content; relative paths are in the program's directory."""
    fetch_files: Annotated[list[Name], Meta(max_length=1000)] = []
    """To be in the answer, where they are there after the run."""


class CommandResult(Struct, frozen=True, kw_only=True):
    """How a command ended."""

    status: CommandStatus
    execution_time: float | None = None
    """Seconds of wall time."""
    cpu_time: float | None = None
    return_code: int | None = None
    """Below 0: the signal that ended it. None: its time was over."""
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(Struct, frozen=True, kw_only=True):
    """The answer to `POST /run_code`."""

    status: RunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
    """What there was of `fetch_files`, as base64."""


class TestConfig(Struct, frozen=True, kw_only=True):
    """How a dataset's problem is judged."""

    __test__ = False
    dataset_type: str | None = None
    language: str | None = None
    locale: str | None = None
    is_fewshot: bool | None = None
    compile_timeout: Timeout | None = None
    run_timeout: Timeout | None = None
    custom_extract_logic: str | None = None
    """Refused where it is set: it is Python code for the server to run."""
    provided_data: list[dict[str, Any]] | dict[str, Any] | None = None
    """The problem, or several: `id`, `content`, `labels`, `test`."""
    extra: dict[str, Any] = {}


class SubmitRequest(Struct, frozen=True, kw_only=True):
    """`POST /submit`."""

    dataset: str
    id: Id
    completion: Source
    """A model's answer, or the code itself in a fenced block."""
    config: TestConfig


class StdioTest(Struct, frozen=True, kw_only=True):
    """One case of a problem: `stdin` and `stdout`."""

    input: dict[str, str]
    output: dict[str, str]


class EvalTestCase(Struct, frozen=True, kw_only=True):
    """One case's verdict."""

    passed: bool
    exec_info: RunCodeResponse
    test_info: StdioTest | None = None


class EvalResult(Struct, frozen=True, kw_only=True):
    """The answer to `POST /submit`."""

    id: Id
    accepted: bool
    extracted_code: str
    full_code: str | None = None
    test_code: str | None = None
    tests: list[EvalTestCase]
    extracted_type: str | None = None
    extra: dict[str, Any] | None = None


class PromptsRequest(Struct, frozen=True, kw_only=True):
    """`POST /get_prompts`, `POST /list_ids`."""

    dataset: str
    config: TestConfig
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=0)] = 1_000_000


class PromptRequest(Struct, frozen=True, kw_only=True):
    """`POST /get_prompt_by_id`."""

    dataset: str
    config: TestConfig
    id: Id


class Prompt(Struct, frozen=True, kw_only=True):
    """A problem's text."""

    id: Id
    prompt: str
    labels: dict[str, Any] = {}


class Detail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error, in the form that its server has, with our code beside it."""

    detail: str
    code: str = ""
    infra: bool = False
    retryable: bool = False
