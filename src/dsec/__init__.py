"""dsec: sandboxes for training and evaluating AI agents. This module is the client's public names;
`import dsec` needs no server.

    import dsec

    with dsec.Sandbox.create("python") as sandbox:
        print(sandbox.commands.run("echo hello").stdout)

`AsyncClient` and `AsyncSandbox` are the same for asyncio.
"""

from dsec import errors
from dsec.errors import CallerError, DsecError, PlatformError
from dsec.sdk._client import AsyncClient
from dsec.sdk._command import AsyncCommand
from dsec.sdk._functions import AsyncFunction, FunctionFailed
from dsec.sdk._groups import AsyncGroup
from dsec.sdk._judging import JudgeResult
from dsec.sdk._problems import Problem
from dsec.sdk._results import CommandFailed, CommandResult, CreateResult, Output, RunResult
from dsec.sdk._run import AsyncRun
from dsec.sdk._sandbox import AsyncSandbox
from dsec.sdk._sessions import AsyncSession
from dsec.sdk._streams import AsyncPortStream, AsyncWatch
from dsec.sdk._sync import Client, Run
from dsec.sdk._sync_catalog import Function
from dsec.sdk._sync_groups import Group
from dsec.sdk._sync_inside import Command, PortStream, Watch
from dsec.sdk._sync_sandbox import Sandbox
from dsec.sdk._sync_sessions import Session
from dsec.spec.causes import Cause
from dsec.spec.events import SandboxEvent
from dsec.spec.functions import FunctionCall, FunctionLimits, FunctionResult, FunctionSpec
from dsec.spec.grading import Grader, Verdict
from dsec.spec.groups import Health, Service
from dsec.spec.judging import Case, CaseVerdict, Judged, JudgeLimits, JudgeSpec
from dsec.spec.network import KeyPolicy, NetworkInfo, PermissionOptions
from dsec.spec.sandbox import ExecSpec, FileEvent, FileInfo, ProcessInfo, PtySize, SandboxInfo, SandboxSpec, State
from dsec.spec.sessions import SessionInfo, SessionLog, SessionResult

__all__ = [
    "AsyncClient",
    "AsyncCommand",
    "AsyncFunction",
    "AsyncGroup",
    "AsyncPortStream",
    "AsyncRun",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncWatch",
    "CallerError",
    "Case",
    "CaseVerdict",
    "Cause",
    "Client",
    "Command",
    "CommandFailed",
    "CommandResult",
    "CreateResult",
    "DsecError",
    "ExecSpec",
    "FileEvent",
    "FileInfo",
    "Function",
    "FunctionCall",
    "FunctionFailed",
    "FunctionLimits",
    "FunctionResult",
    "FunctionSpec",
    "Grader",
    "Group",
    "Health",
    "JudgeLimits",
    "JudgeResult",
    "JudgeSpec",
    "Judged",
    "KeyPolicy",
    "NetworkInfo",
    "Output",
    "PermissionOptions",
    "PlatformError",
    "PortStream",
    "Problem",
    "ProcessInfo",
    "PtySize",
    "Run",
    "RunResult",
    "Sandbox",
    "SandboxEvent",
    "SandboxInfo",
    "SandboxSpec",
    "Service",
    "Session",
    "SessionInfo",
    "SessionLog",
    "SessionResult",
    "State",
    "Verdict",
    "Watch",
    "errors",
]
