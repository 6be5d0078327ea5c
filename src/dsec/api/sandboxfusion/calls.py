"""What the OpenAPI document says of SandboxFusion's calls. They answer at the root, and below
`/sandboxfusion/{environment}`; docs/SANDBOXFUSION.md says more."""

from __future__ import annotations

from typing import Any

from dsec.api.calls import JSON, Call
from dsec.api.sandboxfusion import wire

_TEST = {"input": {"stdin": "1 2"}, "output": {"stdout": "3"}}
_CONFIG = {"language": "python", "provided_data": {"id": 1, "content": "Add two numbers.", "test": [_TEST]}}
_ASKED = {"dataset": "CommonOJ", "config": _CONFIG}
_ANSWER = {**_ASKED, "id": 1, "completion": "```python\nprint(sum(map(int, input().split())))\n```"}
_CALLS: tuple[tuple[str, str, Any, Any, Any], ...] = (
    (
        "run_code",
        "compile and run a program",
        wire.RunCodeRequest,
        wire.RunCodeResponse,
        {"code": "print(3)", "language": "python"},
    ),
    ("submit", "judge a completion by the tests that come along", wire.SubmitRequest, wire.EvalResult, _ANSWER),
    ("get_prompts", "texts of the problems that come along", wire.PromptsRequest, list[wire.Prompt], _ASKED),
    ("list_ids", "ids of the problems that come along", wire.PromptsRequest, list[wire.Id], _ASKED),
    ("get_prompt_by_id", "text of one", wire.PromptRequest, wire.Prompt, {**_ASKED, "id": 1}),
    ("get_metrics", "none: an empty object", wire.PromptsRequest, dict[str, Any], _ASKED),
    ("get_metrics_function", "none", wire.PromptsRequest, dict[str, None], _ASKED),
    ("list_datasets", "names that /submit takes", None, list[str], None),
    ("run_jupyter", "refused: 501", dict[str, Any], dict[str, Any], {}),
)


def _call(prefix: str, name: str, summary: str, takes: Any, gives: Any, example: Any) -> Call:  # noqa: PLR0917
    return Call(
        method="post" if takes is not None else "get",
        path=f"{prefix}/{name}",
        summary=f"SandboxFusion: {summary}",
        family="sandboxfusion",
        security=("bearer", "basic", "apiKey"),
        takes=((JSON, takes),) if takes is not None else (),
        example=example,
        gives=(JSON, gives),
    )


CALLS = (
    *(_call(prefix, *each) for prefix in ("", "/sandboxfusion/{environment}") for each in _CALLS),
    *(
        Call(
            method="get",
            path=f"{prefix}/v1/ping",
            summary="SandboxFusion: whether the server answers: `pong`",
            family="sandboxfusion",
            security=(),
            gives=(JSON, str),
        )
        for prefix in ("", "/sandboxfusion/{environment}")
    ),
)
