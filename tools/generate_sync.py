"""Writes src/dsec/sdk/_sync*.py, the sync client, from the async one: `python tools/generate_sync.py [--check]`.

Each public class becomes a class that holds the async object and runs its methods in the background loop of
`dsec.sdk._portal`. Signatures and docstrings are kept, with the async names replaced. What it relies on in the async
code:

- public attributes are annotated in `__init__`; a docstring may follow;
- what isn't for callers says so in its docstring ("Not for callers"); of `__init__`: callers don't construct the class;
- a public method that touches the event loop is `async`;
- results are values, or one of the classes of CLASSES, or an iterator of values or of `CreateResult`s.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SDK = ROOT / "src" / "dsec" / "sdk"
TARGETS = {
    "_sync_inside": ("_streams", "_command", "_commands", "_files"),
    "_sync_sessions": ("_sessions", "_network"),
    "_sync_machine": ("_machine",),
    "_sync_catalog": ("_catalog", "_functions", "_rights", "_nodes"),
    "_sync_sandbox": ("_sandbox",),
    "_sync": ("_run", "_client"),
    "_sync_groups": ("_groups",),
}
"""Generated module -> modules that it is made of."""
CLASSES = {
    "AsyncCommand": "Command",
    "AsyncCommands": "Commands",
    "AsyncFiles": "Files",
    "AsyncPortStream": "PortStream",
    "AsyncPorts": "Ports",
    "AsyncWatch": "Watch",
    "AsyncNetworkAccess": "NetworkAccess",
    "AsyncConsole": "Console",
    "AsyncCheckpoints": "Checkpoints",
    "AsyncSession": "Session",
    "AsyncSessions": "Sessions",
    "AsyncSandbox": "Sandbox",
    "AsyncCatalog": "Catalog",
    "AsyncRights": "Rights",
    "AsyncNodes": "Nodes",
    "AsyncFunction": "Function",
    "AsyncRun": "Run",
    "AsyncClient": "Client",
    "AsyncGroup": "Group",
}
HEADER = '''"""The sync client. Generated from the async one by tools/generate_sync.py: change that one and run the
tool."""

from __future__ import annotations

'''
_NAMES = re.compile(
    r"\bAsync(Commands?|Files|PortStream|Ports|Watch|NetworkAccess|Console|Checkpoints|Sandbox|Sessions?|Catalog|"
    r"Rights|Nodes|Function|Run|Client|Group)\b"
)


def sync_names(text: str) -> str:
    """Async names and phrases as the sync client says them."""
    text = _NAMES.sub(r"\1", text)
    for old, new in (
        ("AsyncIterator", "Iterator"),
        ("async for", "for"),
        ("async with", "with"),
        ("await ", ""),
        ("to be shared by all tasks of an event loop", "to be shared by all threads"),
        (
            "Connections of a client that nobody closed are closed when the event loop ends.",
            "Connections of a client that nobody closed are closed when the process ends.",
        ),
    ):
        text = text.replace(old, new)
    return re.sub(r",? (?:and )?may be coroutines", ", in the client's own thread", text)


def is_internal(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """It says that it isn't for callers."""
    return "Not for callers" in (ast.get_docstring(function) or "")


class Writer:
    """The text of the sync module."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.imports: dict[str, str] = {}
        self.used: set[str] = set()
        self.made: set[str] = set()

    def add(self, indent: int, text: str) -> None:
        self.lines += [" " * (4 * indent) + line if line else "" for line in text.split("\n")]

    def module(self, name: str) -> None:
        tree = ast.parse((SDK / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = node.module or ""
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):  # type aliases that signatures use
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name):
                    self.imports[target.id] = f"dsec.sdk.{name}"
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                self.imports[node.name] = f"dsec.sdk.{name}"
                self.klass(node)

    def klass(self, node: ast.ClassDef) -> None:
        name = CLASSES[node.name]
        self.made.add(name)
        self.use(node.name)
        self.add(0, f"\n\nclass {name}(Wrapper):")
        self.docstring(1, ast.get_docstring(node, clean=False))
        self.add(1, f"\n_async: {node.name}\n")
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                if item.name == "__init__":
                    self.constructor(node.name, item)
                elif item.name in SPECIAL or not (item.name.startswith("_") or is_internal(item)):
                    self.method(node.name, item)

    def constructor(self, owner: str, init: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if is_internal(init):
            self.add(1, f'def __init__(self, inner: {owner}) -> None:\n    """Not for callers."""')
            self.add(2, "self._async = inner\n")
        else:
            self.add(1, f"def __init__({self.parameters(init.args)}) -> None:")
            self.add(2, f"self._async = {owner}({self.passed(init.args)})\n")
        for position, step in enumerate(init.body):
            if (
                isinstance(step, ast.AnnAssign)
                and isinstance(step.target, ast.Attribute)
                and not step.target.attr.startswith("_")
            ):
                self.attribute(step.target.attr, ast.unparse(step.annotation), init.body[position + 1 : position + 2])

    def attribute(self, name: str, kind: str, following: list[ast.stmt]) -> None:
        self.add(1, f"@property\ndef {name}(self) -> {self.annotation(kind)}:")
        if following and isinstance(following[0], ast.Expr) and isinstance(following[0].value, ast.Constant):
            self.docstring(2, str(following[0].value.value))
        self.add(2, f"return {self.wrapped(kind, f'self._async.{name}')}\n")

    def method(self, owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        name = SPECIAL.get(node.name, node.name)
        decorators = {ast.unparse(each) for each in node.decorator_list}
        returns = ast.unparse(node.returns) if node.returns else "None"
        for each in sorted(decorators):
            self.add(1, f"@{each}")
        self.add(1, f"def {name}({self.parameters(node.args)}) -> {self.annotation(returns)}:")
        self.docstring(2, ast.get_docstring(node, clean=False))
        holder = owner if "classmethod" in decorators else "self._async"
        target = f"{holder}.{node.name}"
        if name == "__enter__":
            self.add(2, "return self\n")
        elif name == "__iter__":
            self.add(2, "return iterate(aiter(self._async))\n")
        elif name == "__repr__":
            self.add(2, 'return repr(self._async).replace("Async", "", 1)\n')
        elif "property" in decorators:
            self.add(2, f"return {target}\n")
        else:
            made = f"{target}({self.passed(node.args)})"
            if returns.startswith("AsyncIterator[CreateResult["):
                self.add(2, f"for item in iterate({made}):")
                self.add(3, "sandbox = Sandbox(item.sandbox) if item.sandbox is not None else None")
                self.add(3, "yield CreateResult(item.index, sandbox, item.error)\n")
            elif returns.startswith("AsyncIterator["):
                self.add(2, f"return iterate({made})\n")
            elif isinstance(node, ast.AsyncFunctionDef):
                self.add(2, f"return {self.wrapped(returns, f'call({made})')}\n")
            else:
                self.add(2, f"return {self.wrapped(returns, made)}\n")

    def parameters(self, arguments: ast.arguments) -> str:
        for each in ast.walk(arguments):
            if isinstance(each, ast.arg) and each.annotation is not None:
                each.annotation = ast.parse(self.annotation(ast.unparse(each.annotation)), mode="eval").body
            elif isinstance(each, ast.Name):
                self.use(each.id)
        return ast.unparse(arguments)

    def passed(self, arguments: ast.arguments) -> str:
        def value(each: ast.arg) -> str:
            kind = ast.unparse(each.annotation) if each.annotation else ""
            if re.search(r"\b(Client|Sandbox)\b", kind):
                return f"unwrap_each({each.arg})" if kind.startswith("Iterable[") else f"unwrap({each.arg})"
            return each.arg

        parts = [value(each) for each in arguments.args[1:]]
        parts += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        parts += [f"{each.arg}={value(each)}" for each in arguments.kwonlyargs]
        if arguments.kwarg:
            parts.append(f"**{arguments.kwarg.arg}")
        return ", ".join(parts)

    def wrapped(self, kind: str, made: str) -> str:
        if kind.startswith("Sequence[") and kind[9:-1] in CLASSES:
            self.use(CLASSES[kind[9:-1]])
            return f"[{CLASSES[kind[9:-1]]}(each) for each in {made}]"
        if kind not in CLASSES:
            return made
        self.use(CLASSES[kind])
        return f"{CLASSES[kind]}({made})"

    def annotation(self, kind: str) -> str:
        kind = sync_names(kind)
        for name in re.findall(r"[A-Za-z_]\w*", kind):
            self.use(name)
        return kind

    def docstring(self, indent: int, text: str | None) -> None:
        if text:
            self.lines.append(" " * (4 * indent) + '"""' + sync_names(text) + '"""')

    def use(self, name: str) -> None:
        self.used.add(name)

    def text(self, elsewhere: dict[str, str]) -> str:
        """`elsewhere`: sync classes of other modules; those of the last one are for annotations only."""
        found: dict[str, set[str]] = {"dsec.sdk._portal": {"Wrapper", "call", "iterate", "unwrap", "unwrap_each"}}
        for name in self.used:
            if name == "Iterator":
                found.setdefault("collections.abc", set()).add(name)
            elif name in elsewhere and name not in self.made:
                found.setdefault(elsewhere[name], set()).add(name)
            elif name in self.imports and name not in CLASSES.values():
                found.setdefault(self.imports[name], set()).add(name)
        imports = [f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(found.items())]
        later = sorted(self.used & set(CLASSES.values()) - self.made - elsewhere.keys())
        if later:
            imports.insert(0, "from typing import TYPE_CHECKING\n")
            imports.append(f"\nif TYPE_CHECKING:\n    from dsec.sdk._sync import {', '.join(later)}\n")
        return HEADER + "".join(imports) + "\n".join(self.lines) + "\n"


SPECIAL = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__repr__": "__repr__"}


def generate() -> dict[Path, str]:
    """The modules' texts, formatted."""
    texts: dict[Path, str] = {}
    made: dict[str, str] = {}
    for target, modules in TARGETS.items():
        writer = Writer()
        for name in modules:
            writer.module(name)
        text = writer.text(made)
        made |= dict.fromkeys(writer.made, f"dsec.sdk.{target}")
        path = SDK / f"{target}.py"
        for command in (["check", "--select", "I,F401", "--fix", "-q"], ["format", "-q"]):
            text = subprocess.run(
                [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"],
                input=text,
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            ).stdout
        texts[path] = text
    return texts


def main() -> int:
    """Write the files, or with --check say whether they are what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    texts = generate()
    if check:
        return int(any(not path.exists() or path.read_text() != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
