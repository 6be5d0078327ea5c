"""What the tests of the E2B face share: requests by hand, and the forms of its errors."""

from __future__ import annotations

import json
from typing import Any

from api_kit import Served

from dsec.spec.sandbox import ExecSpec

NEW = {"templateID": "other", "timeout": 60}


class Box:
    """A sandbox made by the E2B face, and requests to it."""

    def __init__(self, server: Served, answer: dict[str, Any]) -> None:
        self.server = server
        self.id: str = answer["sandboxID"]
        self.token: str = answer["envdAccessToken"]

    async def raw(
        self, method: str, path: str, body: bytes = b"", *, token: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        fields = {"e2b_sandbox_id": self.id, "e2b_sandbox_port": "49983", "x_access_token": token or self.token}
        fields |= headers
        return await self.server.raw(method, path, body, key="", **{k: v for k, v in fields.items() if v})

    async def rpc(self, name: str, message: object, **headers: str) -> tuple[int, Any]:
        status, _, body = await self.raw(
            "POST", f"/{name}", json.dumps(message).encode(), content_type="application/json", **headers
        )
        return status, json.loads(body)

    async def stream(self, name: str, body: bytes, **headers: str) -> tuple[int, list[Any]]:
        status, _, answer = await self.raw("POST", f"/{name}", body, content_type="application/connect+json", **headers)
        messages = []
        while answer:
            size = int.from_bytes(answer[1:5], "big")
            messages.append(json.loads(answer[5 : 5 + size]))
            answer = answer[5 + size :]
        return status, messages


async def rest(server: Served, method: str, path: str, body: object = None, key: str | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = {"content_type": "application/json", "x_api_key": server.key if key is None else key}
    status, _, answer = await server.raw(method, path, data, key="", **headers)
    return status, json.loads(answer) if answer else None


def is_error(answer: tuple[int, Any], status: int) -> bool:
    """The form that E2B's client reads."""
    return answer[0] == status == answer[1]["code"] and bool(answer[1]["message"])


def parsed(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, Any]:
    assert answer[1]["content-type"] == "application/json"
    return answer[0], json.loads(answer[2])


def command(*argv: str) -> Any:
    return ExecSpec(argv=list(argv))
