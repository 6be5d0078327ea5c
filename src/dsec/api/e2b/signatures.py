"""Signed URLs: one file of one sandbox, for whoever has the URL.

A signature is unpadded base64 of SHA-256 over path, operation, user, access token and, where there is one, expiration.
A URL that names no sandbox is matched against the tokens that this process told or saw: bounded, and half a
microsecond each, so that a wrong signature costs about as much as any other request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections import OrderedDict

from dsec.api.e2b.call import Call
from dsec.api.e2b.errors import GONE
from dsec.edge.client import EdgeClient
from dsec.errors import Unauthenticated

_MAX_TOKENS = 8192


class Signatures:
    """Checks signatures, and knows the tokens that are in use."""

    def __init__(self, edge: EdgeClient) -> None:
        self._edge = edge
        self._tokens: OrderedDict[str, bytes] = OrderedDict()

    def token(self, sandbox_id: str) -> str:
        """A sandbox's access token, for its user. Raises `SandboxNotFound`."""
        token = self._edge.access_token(sandbox_id)
        self.saw(sandbox_id, token)
        return token

    def saw(self, sandbox_id: str, token: str) -> None:
        """Somebody uses this token. It was checked."""
        if sandbox_id not in self._tokens:
            self._tokens[sandbox_id] = token.encode()
            if len(self._tokens) > _MAX_TOKENS:
                self._tokens.popitem(last=False)

    def check(self, call: Call, operation: str, sandbox_id: str | None) -> str:
        """The sandbox whose file the request may touch. `operation`: read or write. `sandbox_id`: which the request
        names, or None. Raises `Unauthenticated`."""
        x = call.x
        expiration = x.text("signature_expiration")
        if expiration is not None and not (expiration.isascii() and expiration.isdigit() and _in_time(expiration)):
            raise Unauthenticated("the signature is past its expiration")
        # A plus in a signature that wasn't percent-encoded arrives as a space.
        given = (x.text("signature") or "").replace(" ", "+").encode()
        start = hashlib.sha256(":".join([x.text("path") or "", operation, x.text("username") or "", ""]).encode())
        end = b"" if expiration is None else f":{expiration}".encode()

        def signs(token: bytes) -> bool:
            digest = start.copy()
            digest.update(token + end)
            return hmac.compare_digest(b"v1_" + base64.b64encode(digest.digest()).rstrip(b"="), given)

        if sandbox_id is None:
            for known_id, token in self._tokens.items():
                if signs(token):
                    return known_id
        elif signs(self._known(sandbox_id)):
            return sandbox_id
        raise Unauthenticated("the signature is not valid")

    def _known(self, sandbox_id: str) -> bytes:
        try:
            return self._edge.access_token(sandbox_id).encode()
        except GONE:
            raise Unauthenticated("the signature is not valid") from None


def _in_time(expiration: str) -> bool:
    return time.time() <= int(expiration[:20])
